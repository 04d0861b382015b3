"""`triptych gateway`: SMG, an OpenAI-compatible HTTP gateway, before frontends that serve the vllm adapter.

This process becomes SMG: what follows `--` goes to it as it stands, after what is given here.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from services.common.config import Address
from services.common.errors import StartError
from services.common.server import free_port

LISTEN = "127.0.0.1:8000"
FRONTEND = "127.0.0.1:50051"

POLL_S = 0.2
ASK_S = 5.0
"""What the gateway is given for one answer about itself."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy of the environment stands before what this machine serves."""

METRICS_HOST = "127.0.0.1"

MISSING = "needs SMG: pip install 'triptych[gateway]' (smg is not installed)"

_EPILOG = (
    """Options of SMG's own follow `--`: triptych gateway -- --api-key KEY --log-level info. See docs/gateway.md."""
)


def run(argv: Sequence[str]) -> int:
    """Becomes SMG. Raises StartError where it is not installed or an address is none."""
    own, passed = _split(argv)
    options = _parser().parse_args(own)
    command = executable("triptych gateway")
    arguments = smg_arguments(
        address(options.listen, "--listen"), [address(one, "--frontend") for one in options.frontend or [FRONTEND]]
    )
    if options.otlp_endpoint is not None:
        arguments += trace_arguments(options.otlp_endpoint)
    os.execv(command[0], [*command, *arguments, *passed])


def executable(who: str) -> list[str]:
    """How SMG is run: of this Python's packages, else by PATH. Raises StartError that names what to install."""
    if importlib.util.find_spec("smg") is not None:
        return [sys.executable, "-P", "-m", "smg"]
    if (found := shutil.which("smg")) is not None:
        return [found]
    raise StartError(f"{who} {MISSING}")


def smg_arguments(listen: str, frontends: Sequence[str]) -> list[str]:
    """SMG's command line. Its metrics are on loopback, on a free port."""
    host, port = _split_address(listen)
    return [
        "launch",
        "--host",
        host,
        "--port",
        str(port),
        "--prometheus-host",
        METRICS_HOST,
        "--prometheus-port",
        str(free_port(METRICS_HOST, 0)),
        "--worker-urls",
        *(f"grpc://{frontend}" for frontend in frontends),
    ]


def trace_arguments(endpoint: str) -> list[str]:
    """SMG's, so that its spans go to the collector at that URL and traces run on from it. Raises StartError."""
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or parts.path.strip("/"):
        raise StartError(
            f"--otlp-endpoint is {endpoint!r}: SMG sends spans without TLS alone, so http://HOST:4317 is needed"
        )
    # At a log level above info it makes no spans, and passes no trace context on.
    return ["--enable-trace", "--otlp-traces-endpoint", address(parts.netloc, "--otlp-endpoint"), "--log-level", "info"]


def address(text: str, flag: str) -> str:
    """HOST:PORT, checked. Raises StartError naming the flag."""
    try:
        return TypeAdapter(Address).validate_python(text)
    except ValidationError as error:
        raise StartError(f"{flag} is {text!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def free_address(listen: str, flag: str) -> str:
    """An address that can be listened on now; port 0 takes a free one. Raises StartError naming the flag."""
    host, _, given = listen.rpartition(":")
    checked = listen if given == "0" and host else address(listen, flag)
    host, port = _split_address(checked)
    try:
        port = free_port(host, port)
    except OSError as error:
        raise StartError(
            f"the gateway cannot listen on {listen}: {error.strerror}; choose another with {flag}"
        ) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def wait_ready(listen: str, model: str) -> None:
    """Returns when a gateway lists the model and has its tokenizer, and so can serve it."""
    while not await asyncio.to_thread(_serves, listen, model):  # noqa: ASYNC110  there is no event to wait for
        await asyncio.sleep(POLL_S)


def _serves(listen: str, model: str) -> bool:
    try:
        models = _ask(listen, "/v1/models")["data"]
        tokenizers = _ask(listen, "/v1/tokenizers")["tokenizers"]
    except (OSError, HTTPException, ValueError, KeyError):  # not there yet
        return False
    return any(each["id"] == model for each in models) and any(each["name"] == model for each in tokenizers)


def _ask(listen: str, path: str) -> Any:
    with _DIRECT.open(f"http://{listen}{path}", timeout=ASK_S) as answer:
        return json.load(answer)


def _split_address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triptych gateway",
        description="Serves the OpenAI API over HTTP: runs SMG before frontends that were started with --vllm-adapter.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--listen", metavar="HOST:PORT", default=LISTEN, help=f"address to serve HTTP on ({LISTEN})")
    parser.add_argument(
        "--frontend", metavar="HOST:PORT", action="append", help=f"a frontend; may be given again ({FRONTEND})"
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="trace: send SMG's spans to this OpenTelemetry collector, as http://HOST:4317, and pass their traces on",
    )
    return parser
