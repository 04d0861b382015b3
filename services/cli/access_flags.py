"""How a command reaches a server that asks for TLS or a token."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from services.cli.parts import part
from services.common.errors import StartError
from services.common.tls import PeerTls

TOKEN_VARIABLE = "TRIPTYCH_TOKEN"


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of TLS and of a token."""
    add_tls_flags(parser)
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"bearer token; others of this machine see a command line, not the variable {TOKEN_VARIABLE}",
    )


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Of a server that asks for no token."""
    files = {"ca": "CAs that the server's certificate may be of; without it, plain text", "cert": "own certificate"}
    for name, text in (files | {"key": "key of that one"}).items():
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=f"PEM file: {text}")
    parser.add_argument("--tls-server-name", default="", metavar="NAME", help="that the server's certificate must have")


def access_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """The client's arguments, of the flags and the environment. Raises StartError."""
    chosen: dict[str, Any] = {"token": _token(parsed)}
    if (tls := tls_of(parsed)) is None:
        return chosen
    return chosen | {"credentials": tls.files().value, "server_name": tls.server_name}


def tls_of(parsed: argparse.Namespace) -> PeerTls | None:
    """None: plain text. Raises StartError for flags that do not go together."""
    if parsed.tls_ca is None:
        for flag in ("tls_cert", "tls_key", "tls_server_name"):
            if getattr(parsed, flag):
                raise StartError(f"--{flag.replace('_', '-')} is given without --tls-ca, which turns TLS on; give both")
        return None
    if (parsed.tls_cert is None) != (parsed.tls_key is None):
        raise StartError("--tls-cert and --tls-key go together; give both, or neither")
    return PeerTls(parsed.tls_ca, parsed.tls_cert, parsed.tls_key, parsed.tls_server_name, option="--tls-")


def token_metadata(parsed: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """What shows the token in a call, nothing without one. Raises StartError for one that cannot be sent."""
    if not (token := _token(parsed)):
        return ()
    requests = part("triptych_client.requests", extra="cli", what="a token")
    try:
        made: tuple[tuple[str, str], ...] = requests.authorization(token)
    except ValueError as error:
        raise StartError(str(error)) from None
    return made


def _token(parsed: argparse.Namespace) -> str:
    token = os.environ.get(TOKEN_VARIABLE, "") if parsed.token is None else parsed.token
    return str(token).strip()
