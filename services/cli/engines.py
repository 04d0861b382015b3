"""Engines that a command is about: their schedulers, by address."""

from __future__ import annotations

import argparse

from services.common.config import host_port

DEFAULT_ADDRESS = "127.0.0.1:50052"
"""A scheduler's, unless it is told another port."""


def address(text: str) -> str:
    """For argparse: HOST:PORT."""
    try:
        return host_port(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT, such as {DEFAULT_ADDRESS}") from None
