"""Grammars on their way to the core: compiled in a thread, kept by digest, and their requests held until then.

What a request has to be replayed by, ids that it was resumed with, is done in that thread too.

The frontend has compiled each within its budget already; llguidance's own limits bound it here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from llguidance import LLMatcher

from services.common import checkpoint
from services.common.errors import RequestError, StartError, invalid
from services.common.grammar import Grammar, GrammarError
from services.common.grammar_compiler import Compiler
from services.scheduler.core.request import RequestKey

KEPT_GRAMMARS = 32
"""A matcher at its start each, with what was found out about its language on the way."""

MAX_WAITING = 1024
"""Requests that wait for it: the core, whose queue has a limit of its own, does not know them yet."""

log = logging.getLogger(__name__)

T = TypeVar("T")

Build = Callable[[LLMatcher], T]
"""Makes what a request needs of its grammar's matcher, which it must leave as it is. May raise RequestError."""

Proceed = Callable[[T | RequestError], None]
"""What is done with a request once that is built, or cannot be."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request that waits: what works for it, and how it is refused."""

    task: asyncio.Task[None]
    refuse: Callable[[RequestError], None]


class GrammarCompiling:
    """Lives on the event loop. `folder` is the checkpoint's; `start` reads its tokenizer while the model loads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading: asyncio.Future[Compiler | None] | None = None
        self._compiler: Compiler | None = None
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._pending: dict[bytes, asyncio.Future[LLMatcher]] = {}

    def start(self) -> None:
        """Begins to read the tokenizer, off the event loop."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().run_in_executor(self._pool, self._read)

    async def is_served(self) -> bool:
        """Whether grammars are served: the tokenizer could be read."""
        self.start()
        assert self._reading is not None
        self._compiler = await self._reading
        return self._compiler is not None

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._waiting)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    def submit(
        self, key: RequestKey, grammar: Grammar, build: Build[T], proceed: Proceed[T], *, is_long: bool = False
    ) -> None:
        """Calls `proceed` with what is built of the grammar, now where it is known, else later.

        A build that is long is done in the thread, and so never now.
        """
        digest = grammar.digest
        if (known := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            if not is_long:
                proceed(_built(build, known))
                return
        if len(self._waiting) >= MAX_WAITING:
            message = f"{len(self._waiting)} requests wait for their grammars to be compiled; try again later"
            proceed(RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", message))
            return
        task = asyncio.create_task(self._compile(key, grammar, build, proceed, is_long=is_long))
        self._waiting[key] = _Waiting(task, proceed)

    def drop(self, key: RequestKey) -> None:
        """It has been aborted; an unknown one is ignored."""
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting.task.cancel()

    def refuse_all(self, error: RequestError) -> None:
        """Those that wait are told so, and wait no more."""
        for key, waiting in list(self._waiting.items()):
            self.drop(key)
            waiting.refuse(error)

    def keys_of(self, frontend: int) -> list[RequestKey]:
        """Those of one frontend that wait."""
        return [key for key in self._waiting if key.frontend == frontend]

    def close(self) -> None:
        """Drops what waits; the compilation that runs, if any, ends by itself."""
        for key in list(self._waiting):
            self.drop(key)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _compile(
        self, key: RequestKey, grammar: Grammar, build: Build[T], proceed: Proceed[T], *, is_long: bool
    ) -> None:
        result: T | RequestError
        try:
            if (matcher := self._kept.get(grammar.digest)) is None:
                matcher = await asyncio.shield(self._matcher(grammar))
            if is_long:
                result = await asyncio.get_running_loop().run_in_executor(self._pool, _built, build, matcher)
            else:
                result = _built(build, matcher)
        except GrammarError as error:
            result = invalid(error.under("grammar"), error.description, "GRAMMAR")
        except asyncio.CancelledError:
            raise
        except (
            BaseException
        ) as error:  # a panic of the compiler is none of Exception; its request must end all the same
            log.exception("a grammar could not be compiled")
            message = f"the request's grammar could not be compiled: {error!r}"
            result = RequestError(grpc.StatusCode.INTERNAL, "GRAMMAR_FAILED", message)
        if self._waiting.pop(key, None) is not None:
            proceed(result)

    def _matcher(self, grammar: Grammar) -> asyncio.Future[LLMatcher]:
        """One compilation for all that ask for the same."""
        digest = grammar.digest
        if (pending := self._pending.get(digest)) is not None:
            return pending
        compiler = self._compiler
        if compiler is None:
            raise RuntimeError("a grammar before start")
        future = asyncio.get_running_loop().run_in_executor(self._pool, compiler.compile, grammar)
        self._pending[digest] = future
        future.add_done_callback(lambda done: self._keep(digest, done))
        return future

    def _keep(self, digest: bytes, done: asyncio.Future[LLMatcher]) -> None:
        del self._pending[digest]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[digest] = done.result()
        while len(self._kept) > KEPT_GRAMMARS:
            self._kept.popitem(last=False)

    def _read(self) -> Compiler | None:
        try:
            return Compiler(self._folder, checkpoint.read_config(self._folder).eos_token_ids)
        except StartError as error:
            log.warning("grammars are not served: %s", error)
            return None


def _built(build: Build[T], matcher: LLMatcher) -> T | RequestError:
    """In the thread, or on the event loop."""
    try:
        return build(matcher)
    except RequestError as error:
        return error
