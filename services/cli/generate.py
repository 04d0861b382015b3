"""`triptych generate`: continues a raw prompt, without a chat template."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from services.cli.ask import Shown, add_options, client, for_people, options_of, show, show_choices
from services.common.errors import StartError


def run(argv: Sequence[str]) -> int:
    """Streams to standard output."""
    parser = argparse.ArgumentParser(prog="triptych generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="by default what standard input holds")
    parser.add_argument("-n", type=int, metavar="N", help="answers to one prompt, each printed whole once it is there")
    add_options(parser)
    parsed = parser.parse_args(argv)
    prompt = sys.stdin.read() if parsed.prompt is None else parsed.prompt
    asyncio.run(_generate(prompt, parsed))
    return 0


async def _generate(prompt: str, parsed: argparse.Namespace) -> None:
    async with client(parsed.address, model=parsed.model, timeout_s=parsed.timeout_s) as connection:
        from triptych_client import TriptychError

        try:
            options = options_of(parsed)
            options["n"] = parsed.n
            stream = connection.generate(prompt, **options)
            await (show_choices(stream) if (parsed.n or 1) > 1 else show(stream, Shown()))
        except ValueError as error:  # an option that its field cannot hold
            raise StartError(str(error)) from None
        except TriptychError as error:
            raise for_people(error, parsed.address) from None
