"""`triptych top`: what engines do now, refreshed until q: requests, KV, steps, tokens a second, latencies."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from services.cli.access_flags import add_tls_flags, tls_of
from services.cli.engines import DEFAULT_ADDRESS, address
from services.cli.parts import config_type, part
from services.cli.top.fleet import Fleet
from services.common.config import resolve
from services.common.errors import StartError
from services.common.peer import Peer

_EPILOG = """Keys: q ends, j and k (or the arrows) choose the engine that is told of in full. Latencies are percentiles
of the last minute, interpolated in the histograms that schedulers keep; with --once, since each scheduler's start."""


def run(argv: Sequence[str]) -> int:
    """Exit code 0; with --once 1 where an engine does not answer."""
    parsed = _parser().parse_args(argv)
    part("rich", extra="cli", what="triptych top")
    live = not (parsed.once or parsed.json)
    if live and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise StartError("triptych top needs a terminal for input and output; without one give --once or --json")
    fleet = Fleet(_engines(parsed))
    if live:
        from services.cli.top import screen

        return asyncio.run(screen.show(fleet, parsed.interval_s))
    return asyncio.run(_print(fleet, parsed.interval_s, once=parsed.once, as_json=parsed.json))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triptych top", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument(
        "engines", nargs="*", type=address, metavar="HOST:PORT", help=f"of schedulers ({DEFAULT_ADDRESS})"
    )
    parser.add_argument("--config", metavar="FILE", help="the engines of the frontend of this file, with its TLS")
    parser.add_argument("--interval-s", type=_interval, default=1.0, metavar="S", help="between two looks (1)")
    parser.add_argument("--once", action="store_true", help="look twice, an interval apart, print, and end")
    parser.add_argument("--json", action="store_true", help="print a JSON object a look, one a line, until Ctrl-C")
    add_tls_flags(parser)
    return parser


def _engines(parsed: argparse.Namespace) -> list[Peer]:
    """Raises StartError."""
    if parsed.engines and parsed.config is not None:
        raise StartError("engines and --config both say what to look at; give one of them")
    tls = tls_of(parsed)
    if parsed.config is None:
        return [Peer(target, tls) for target in dict.fromkeys(parsed.engines or [DEFAULT_ADDRESS])]
    frontend: Any = resolve(config_type("frontend"), ["--config", parsed.config]).config
    return [Peer(target, tls or frontend.peer_tls()) for target in (frontend.engine, *frontend.more_engines)]


async def _print(fleet: Fleet, interval_s: float, *, once: bool, as_json: bool) -> int:
    """Looks, and prints from the second look on: a rate is of two. Ctrl-C ends it."""
    try:
        await fleet.look()
        while True:
            await asyncio.sleep(interval_s)
            await fleet.look()
            if as_json:
                print(json.dumps(fleet.as_json(), allow_nan=False), flush=True)
            else:
                _print_table(fleet)
            if once:
                return int(any(engine.now is None for engine in fleet.engines))
    finally:
        await fleet.close()


def _print_table(fleet: Fleet) -> None:
    from rich.console import Console

    from services.cli.top.view import View

    # Somebody else's width, where there is no terminal, would wrap lines there.
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS") or 80), highlight=False)
    view = View(fleet, ascii_only=not console.encoding.startswith("utf"))
    for line in view.whole(console.width):
        console.print(line, no_wrap=True, overflow="crop")


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 60")
    return value
