"""Which grammars are taken: each is compiled once in a worker process, within a budget, and its verdict is kept."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.errors import RequestError, invalid
from services.common.grammar import Grammar, to_proto
from services.frontend.grammar_worker import LENGTH_BYTES

KEPT_VERDICTS = 1024
OVER_BUDGET_KEPT_S = 60.0
"""A grammar that was over the budget may have met a busy machine: that verdict is not for ever."""

MAX_WAITING = 64
"""Grammars that wait to be compiled; each may take the whole budget."""

START_LIMIT_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """Of one grammar: its texts' bytes, and the time and memory to compile it."""

    grammar_bytes: int
    compile_s: float
    compile_bytes: int


@dataclass(frozen=True)
class Verdict:
    """`fault` is (field under the grammar, what is wrong with it); None: it compiles. Kept until `until_s`."""

    fault: tuple[str, str] | None = None
    until_s: float = float("inf")


class WorkerLostError(Exception):
    """The worker has ended, or had to be ended, at what it was given; the message says which."""


class GrammarCheck:
    """`await check(grammar)`. The worker is started by the first grammar, and again after one that it died of."""

    def __init__(self, folder: Path, eos_ids: Sequence[int], budget: Budget) -> None:
        self._budget = budget
        self._worker = _Worker(folder, eos_ids, budget)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[Verdict]] = {}
        self._turn = asyncio.Lock()

    async def check(self, grammar: Grammar, path: str = "options.grammar") -> None:
        """Returns when it is known to compile. Raises RequestError naming the field under `path`."""
        if (size := grammar.num_bytes) > self._budget.grammar_bytes:
            limit = self._budget.grammar_bytes
            raise invalid(path, f"has {size} bytes of text, at most {limit} are taken (max_grammar_bytes)")
        verdict = await self._verdict(grammar)
        if verdict.fault is not None:
            field, description = verdict.fault
            raise invalid(f"{path}.{field}" if field else path, description, "GRAMMAR")

    async def close(self) -> None:
        """Ends the worker."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._worker.kill()

    async def _verdict(self, grammar: Grammar) -> Verdict:
        digest = grammar.digest
        known = self._verdicts.get(digest)
        if known is not None and time.monotonic() < known.until_s:
            self._verdicts.move_to_end(digest)
            return known
        task = self._pending.get(digest)
        if task is None:
            if len(self._pending) >= MAX_WAITING:
                raise RequestError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "GRAMMAR_QUEUE_FULL",
                    f"{len(self._pending)} other grammars wait to be compiled; try again later",
                    retry_after_s=self._budget.compile_s,
                )
            task = self._pending[digest] = asyncio.create_task(self._compile(grammar, digest))
        return await asyncio.shield(task)  # others may wait for it too

    async def _compile(self, grammar: Grammar, digest: bytes) -> Verdict:
        try:
            async with self._turn:
                try:
                    verdict = Verdict(await self._worker.compile(grammar))
                except WorkerLostError as error:
                    log.warning("a grammar of %d bytes: %s", grammar.num_bytes, error)
                    verdict = Verdict((grammar.field, str(error)), time.monotonic() + OVER_BUDGET_KEPT_S)
            self._verdicts[digest] = verdict
            self._verdicts.move_to_end(digest)
            while len(self._verdicts) > KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
            return verdict
        finally:
            del self._pending[digest]


class _Worker:
    """One process, one grammar at a time."""

    def __init__(self, folder: Path, eos_ids: Sequence[int], budget: Budget) -> None:
        self._budget = budget
        eos = ",".join(map(str, sorted(eos_ids)))
        module = "services.frontend.grammar_worker"
        # -P: a folder `services` where the user stands must not be taken for ours.
        self._command = [sys.executable, "-P", "-m", module, str(folder), eos, str(budget.compile_bytes)]
        self._process: asyncio.subprocess.Process | None = None

    async def compile(self, grammar: Grammar) -> tuple[str, str] | None:
        """The fault, None where there is none. Raises WorkerLostError, or RequestError where no worker can be had."""
        if self._process is None or self._process.returncode is not None:
            await self._start()
        message = to_proto(grammar).SerializeToString()
        try:
            answer = await self._ask(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        except BaseException:
            await self.kill()
            raise
        return None if answer is None else (answer[0], answer[1])

    async def kill(self) -> None:
        """Ends the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _start(self) -> None:
        begun_s = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"RAYON_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                fault = await self._answer(self._process)
        except (TimeoutError, WorkerLostError) as error:
            await self.kill()
            log.error("the worker that compiles grammars does not start: %s", error)
            raise _no_worker("the frontend's log says more") from None
        except BaseException:
            await self.kill()
            raise
        if fault is not None:
            await self.kill()
            raise _no_worker(fault[1])
        log.info("the worker that compiles grammars is ready after %.1f s", time.monotonic() - begun_s)

    async def _ask(self, message: bytes) -> list[str] | None:
        process, budget = self._process, self._budget
        assert process is not None and process.stdin is not None
        process.stdin.write(message)
        try:
            async with asyncio.timeout(budget.compile_s):
                return await self._answer(process)
        except TimeoutError:
            raise WorkerLostError(
                f"takes more than {budget.compile_s:g} s to compile (grammar_compile_s); make it simpler, or its "
                "bounds smaller"
            ) from None

    async def _answer(self, process: asyncio.subprocess.Process) -> list[str] | None:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise WorkerLostError(
                f"takes more than {self._budget.compile_bytes >> 20} MiB to compile (grammar_compile_bytes), or breaks "
                "the compiler; make it simpler, or its bounds smaller"
            )
        answer: list[str] | None = json.loads(line)
        return answer


def _no_worker(why: str) -> RequestError:
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, "NO_GRAMMARS", f"grammars cannot be compiled here: {why}")
