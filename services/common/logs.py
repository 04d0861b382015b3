"""Logging set-up of every process: one line a record, to standard error."""

from __future__ import annotations

import logging


def setup(service: str, level: str) -> None:
    """`service` starts each line, so that lines of several processes can be told apart; `level` as in logging."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname).1s {service} %(name)s: %(message)s",
        force=True,
    )
    # gRPC's own debug records are about its event loop, one a call.
    logging.getLogger("grpc").setLevel(max(logging.INFO, logging.getLevelName(level.upper())))
