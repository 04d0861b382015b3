"""How a command reaches a server that asks for TLS or a token."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from services.cli.parts import part
from services.common.errors import StartError

TOKEN_VARIABLE = "TRIPTYCH_TOKEN"


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of TLS and of a token."""
    files = {"ca": "CAs that the server's certificate may be of; without it, plain text", "cert": "own certificate"}
    for name, text in (files | {"key": "key of that one"}).items():
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=f"PEM file: {text}")
    parser.add_argument("--tls-server-name", default="", metavar="NAME", help="that the server's certificate must have")
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"bearer token; others of this machine see a command line, not the variable {TOKEN_VARIABLE}",
    )


def access_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """The client's arguments, of the flags and the environment. Raises StartError."""
    token = os.environ.get(TOKEN_VARIABLE, "") if parsed.token is None else parsed.token
    chosen: dict[str, Any] = {"token": token.strip()}
    if parsed.tls_ca is None:
        for flag in ("tls_cert", "tls_key", "tls_server_name"):
            if getattr(parsed, flag):
                raise StartError(f"--{flag.replace('_', '-')} is given without --tls-ca, which turns TLS on; give both")
        return chosen
    package = part("triptych_client", extra="cli", what="talking to a model")
    try:
        credentials = package.tls_credentials(parsed.tls_ca, parsed.tls_cert, parsed.tls_key)
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from None
    except ValueError:
        raise StartError("--tls-cert and --tls-key go together; give both, or neither") from None
    return chosen | {"credentials": credentials, "server_name": parsed.tls_server_name}
