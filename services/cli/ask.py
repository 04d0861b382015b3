"""What `chat`, `generate` and `up --prompt` share: options, an answer as it streams, errors for people."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.cli.access_flags import TOKEN_VARIABLE, access_of, add_access_flags
from services.cli.grammar_flags import add_grammar_flags, grammar_of
from services.cli.logprobs_shown import show_logprobs
from services.cli.parts import part
from services.common.errors import StartError

if TYPE_CHECKING:
    from triptych_client import Client, Delta, OptionArgs, PositionLogprobs, Stream, TriptychError

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

_TLS_WORDS = ("andshake", "SSL", "Peer name", "ertificate", "erification")
"""Of gRPC's messages where a server is there and TLS with it fails."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Flags of a generation, named like the options of the contract."""
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="of the frontend (%(default)s)")
    add_access_flags(parser)
    parser.add_argument("--model", default="", help="name to ask for; by default the one served there")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="deadline of an answer; by default none")
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on where the model would end")
    for flag, text in (("--allowed-token-ids", "draw these ids alone"), ("--banned-token-ids", "draw none of these")):
        parser.add_argument(flag, type=_ids, metavar="ID,ID", help=text)
    add_grammar_flags(parser)
    parser.add_argument(
        "--logprobs",
        action="store_true",
        help="print below an answer how likely each of its ids was, on standard error",
    )
    parser.add_argument(
        "--top-logprobs", type=int, metavar="K", help="with it, the K likeliest ids at each position beside its own"
    )


def options_of(parsed: argparse.Namespace) -> OptionArgs:
    """The flags that were given. Raises StartError for one that would do nothing."""
    names = (*_OPTIONS, "stop", "ignore_eos", "allowed_token_ids", "banned_token_ids")
    chosen: Any = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    scores_prompt = getattr(parsed, "prompt_logprobs", False)
    if parsed.top_logprobs is not None and not (parsed.logprobs or scores_prompt):
        raise StartError("--top-logprobs stands beside --logprobs (or generate's --prompt-logprobs); give one of them")
    if parsed.logprobs:
        chosen["logprobs"] = parsed.top_logprobs or 0
    if scores_prompt:
        chosen["prompt_logprobs"] = parsed.top_logprobs or 0
    if (grammar := grammar_of(parsed)) is not None:
        chosen["grammar"] = grammar
    return chosen  # type: ignore[no-any-return]


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ids such as 5,17") from None


def client(address: str) -> Client:
    """In plain text. Raises StartError where the client package is not installed."""
    package = part("triptych_client", extra="cli", what="talking to a model")
    made: Client = package.Client(address)
    return made


def client_of(parsed: argparse.Namespace) -> Client:
    """As the flags say. Raises StartError, also for files of TLS and tokens that cannot be used."""
    package = part("triptych_client", extra="cli", what="talking to a model")
    try:
        made: Client = package.Client(
            parsed.address, model=parsed.model, timeout_s=parsed.timeout_s, **access_of(parsed)
        )
    except ValueError as error:
        raise StartError(str(error)) from None
    return made


@dataclass
class Shown:
    """What has been printed of an answer so far."""

    text: str = ""
    tokens: int = 0
    finish: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)


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
        shown.logprobs += delta.logprobs
        shown.text += delta.text
        shown.finish = _ending(delta) or shown.finish
        print(delta.text, end="", flush=True)
    print(flush=True)
    if shown.logprobs:
        show_logprobs(shown.logprobs)
    print(_speed(shown, started_s, first_s, last_s), file=sys.stderr, flush=True)


async def show_choices(stream: Stream, *, before: Callable[[], None] | None = None) -> None:
    """Prints each choice of an answer under its index as soon as it is whole, then the speed of all.

    `before` as in `show`.
    """
    started_s = time.monotonic()
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[PositionLogprobs]] = {}
    tokens = 0
    async for delta in stream:
        if before is not None:
            before()
            before = None
        tokens += len(delta.token_ids)
        texts.setdefault(delta.index, []).append(delta.text)
        logprobs.setdefault(delta.index, []).extend(delta.logprobs)
        if ending := _ending(delta):
            print(f"--- choice {delta.index}, {ending}\n{''.join(texts.pop(delta.index))}", flush=True)
            if told := logprobs.pop(delta.index):
                show_logprobs(told)
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
    if error.code.name == "UNAVAILABLE" and not error.reason and any(word in str(error) for word in _TLS_WORDS):
        return StartError(f"no TLS with {address}: {error}; look at --tls-ca, --tls-cert and --tls-server-name")
    if error.code.name == "UNAUTHENTICATED":
        return StartError(f"{error}; give it in the variable {TOKEN_VARIABLE}, or with --token")
    if error.code.name == "UNAVAILABLE" and not error.reason:
        return StartError(
            f"nothing answers at {address}; start a server with `triptych up`, or give --address (and --tls-ca where "
            "it speaks TLS)"
        )
    if error.code.name == "UNIMPLEMENTED" and not error.reason:
        return StartError(f"{address} answers, but it is no frontend of Triptych; give the frontend's --address")
    retry = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
    return StartError(f"{error}{retry}")
