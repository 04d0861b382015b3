"""What `chat`, `generate` and `up --prompt` share: options, an answer as it streams, errors for people."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.cli.parts import part
from services.common.errors import StartError

if TYPE_CHECKING:
    from triptych_client import Client, Delta, OptionArgs, Stream, TriptychError

DEFAULT_ADDRESS = "127.0.0.1:50051"

_OPTIONS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "ids at most; by default up to the end of the context"),
    "min_tokens": (int, "ids at least"),
    "temperature": (float, "0 takes the likeliest id each time; by default the model's"),
    "top_k": (int, "keep the k likeliest ids"),
    "top_p": (float, "keep the fewest ids whose probabilities reach this sum"),
    "min_p": (float, "drop ids less likely than this share of the likeliest"),
    "repetition_penalty": (float, "of ids in prompt or answer; 1 is none"),
    "presence_penalty": (float, "of ids in the answer"),
    "frequency_penalty": (float, "the same, for each time they occur"),
    "seed": (int, "equal seeds, equal answers"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Flags of a generation, named like the options of the contract."""
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="of the frontend (%(default)s)")
    parser.add_argument("--model", default="", help="name to ask for; by default the one served there")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="deadline of an answer; by default none")
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on where the model would end")


def options_of(parsed: argparse.Namespace) -> OptionArgs:
    """The flags that were given."""
    names = (*_OPTIONS, "stop", "ignore_eos")
    chosen: Any = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    return chosen  # type: ignore[no-any-return]


def client(address: str, *, model: str = "", timeout_s: float | None = None) -> Client:
    """Raises StartError where the client package is not installed."""
    package = part("triptych_client", extra="cli", what="talking to a model")
    made: Client = package.Client(address, model=model, timeout_s=timeout_s)
    return made


@dataclass
class Shown:
    """What has been printed of an answer so far."""

    text: str = ""
    tokens: int = 0
    finish: str = ""


async def show(stream: Stream, shown: Shown, *, before: Callable[[], None] | None = None) -> None:
    """Prints an answer to standard output as it comes, then its speed to standard error.

    `before` is called once, when all that the server says of the prompt is known.
    """
    started_s = time.monotonic()
    first_s = last_s = 0.0
    async for delta in stream:
        if before is not None:
            before()
            before = None
        if delta.token_ids:
            last_s = time.monotonic()
            first_s = first_s or last_s
            shown.tokens += len(delta.token_ids)
        shown.text += delta.text
        shown.finish = _ending(delta) or shown.finish
        print(delta.text, end="", flush=True)
    print(flush=True)
    print(_speed(shown, started_s, first_s, last_s), file=sys.stderr, flush=True)


async def show_choices(stream: Stream, *, before: Callable[[], None] | None = None) -> None:
    """Prints each choice of an answer under its index as soon as it is whole, then the speed of all.

    `before` as in `show`.
    """
    started_s = time.monotonic()
    texts: dict[int, list[str]] = {}
    tokens = 0
    async for delta in stream:
        if before is not None:
            before()
            before = None
        tokens += len(delta.token_ids)
        texts.setdefault(delta.index, []).append(delta.text)
        if ending := _ending(delta):
            print(f"--- choice {delta.index}, {ending}\n{''.join(texts.pop(delta.index))}", flush=True)
    print(f"[{tokens} tokens of all choices in {time.monotonic() - started_s:.2f} s]", file=sys.stderr, flush=True)


def _ending(delta: Delta) -> str:
    if delta.finish is None:
        return ""
    if delta.finish.stop_string is not None:
        return f"stop string {delta.finish.stop_string!r}"
    return "length" if delta.finish.reason.value == "length" else "end of the answer"


def _speed(shown: Shown, started_s: float, first_s: float, last_s: float) -> str:
    if not shown.tokens:
        return f"[0 tokens, {shown.finish}]"
    head = f"[{shown.tokens} tokens, first after {first_s - started_s:.2f} s"
    if shown.tokens > 1 and last_s > first_s:
        head += f", then {(shown.tokens - 1) / (last_s - first_s):.1f} tokens/s"
    return f"{head}; {shown.finish}]"


def for_people(error: TriptychError, address: str) -> StartError:
    """One line that says what to do."""
    if error.code.name == "UNAVAILABLE" and not error.reason:
        return StartError(f"nothing answers at {address}; start a server with `triptych up`, or give --address")
    if error.code.name == "UNIMPLEMENTED" and not error.reason:
        return StartError(f"{address} answers, but it is no frontend of Triptych; give the frontend's --address")
    retry = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
    return StartError(f"{error}{retry}")
