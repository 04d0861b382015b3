"""`triptych generate`: continues a raw prompt, without a chat template."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from services.cli.ask import Shown, add_options, client_of, for_people, options_of, show, show_choices
from services.cli.prompt_shown import show_prompt
from services.common.errors import StartError


def run(argv: Sequence[str]) -> int:
    """Streams to standard output."""
    parser = argparse.ArgumentParser(prog="triptych generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="by default what standard input holds")
    parser.add_argument("-n", type=int, metavar="N", help="answers to one prompt, each printed whole once it is there")
    add_options(parser)
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    parser.add_argument(
        "--prompt-logprobs",
        action="store_true",
        help="print how likely each id of the prompt is; --max-tokens 0: that alone",
    )
    parsed = parser.parse_args(argv)
    prompt = sys.stdin.read() if parsed.prompt is None else parsed.prompt
    asyncio.run(_generate(prompt, parsed))
    return 0


async def _generate(prompt: str, parsed: argparse.Namespace) -> None:
    async with client_of(parsed) as connection:
        from triptych_client import TriptychError

        try:
            options = options_of(parsed)
            options["n"] = parsed.n
            options["echo"] = parsed.echo or None
            stream = connection.generate(prompt, **options)

            several = (parsed.n or 1) > 1

            def before() -> None:
                show_prompt(stream, scores=parsed.prompt_logprobs, text=parsed.echo)
                if parsed.echo and several:
                    print(flush=True)  # a choice begins a line of its own

            await (show_choices(stream, before=before) if several else show(stream, Shown(), before=before))
        except ValueError as error:  # an option that its field cannot hold
            raise StartError(str(error)) from None
        except TriptychError as error:
            raise for_people(error, parsed.address) from None
