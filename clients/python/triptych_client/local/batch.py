"""Many calls at once, a bounded number of them in flight: results in the order of the prompts."""

from __future__ import annotations

import functools
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from triptych_client import results
from triptych_client.errors import REQUEST_ID_KEY, TriptychError, from_rpc, text_of
from triptych_client.results import Completion

Outcome = Completion | TriptychError
Start = Callable[[int], Any]
"""Starts the call of a prompt by its index and returns grpc's future of it."""


def run(start: Start, count: int, *, limit: int, keep_errors: bool, told: Callable[[Outcome], None]) -> list[Outcome]:
    """Results by index; `told` gets each as it comes. No call is left running, however this ends.

    Raises the first error that comes, with a note of its prompt's index, unless `keep_errors`.
    """
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    running: dict[int, Any] = {}
    outcomes: dict[int, Outcome] = {}
    following = 0
    try:
        while len(outcomes) < count:
            while following < count and len(running) < limit:
                running[following] = start(following)
                running[following].add_done_callback(functools.partial(_put, ended, following))
                following += 1
            index = ended.get()
            outcome = _outcome(running.pop(index))
            if isinstance(outcome, TriptychError) and not keep_errors:
                outcome.add_note(f"prompt {index} (from 0) of {count}")
                raise outcome
            outcomes[index] = outcome
            told(outcome)
    finally:
        for call in running.values():
            call.cancel()
    return [outcomes[index] for index in range(count)]


@contextmanager
def progress(count: int, shown: bool | None) -> Iterator[Callable[[Outcome], None]]:
    """A bar on standard error: `shown`, or, for None, where that is a terminal and tqdm is installed."""
    try:
        bar_type = None if shown is False or (shown is None and not sys.stderr.isatty()) else _bar_type()
    except ModuleNotFoundError as error:
        if shown:
            raise ModuleNotFoundError(
                "a progress bar needs tqdm: pip install 'triptych-client[local]'", name="tqdm"
            ) from error
        bar_type = None
    if bar_type is None:
        yield lambda _: None
        return
    with bar_type(total=count, unit="prompt", file=sys.stderr, dynamic_ncols=True) as bar:
        tokens = 0

        def told(outcome: Outcome) -> None:
            nonlocal tokens
            tokens += outcome.usage.completion_tokens if isinstance(outcome, Completion) else 0
            bar.set_postfix_str(f"{tokens} tokens", refresh=False)
            bar.update()

        yield told


def _bar_type() -> Any:
    from tqdm import tqdm

    return tqdm


def _put(ended: queue.SimpleQueue[int], index: int, _: Any) -> None:
    ended.put(index)


def _outcome(call: Any) -> Outcome:
    try:
        response = call.result()
    except grpc.RpcError as error:
        return from_rpc(error)
    return results.completion(text_of(call.initial_metadata(), REQUEST_ID_KEY) or "", response.response)
