"""Masks for the rows that wait for them, built in a thread while the executor computes.

A plan goes out before the id before its own is known, so a masked row of it waits here until that id has come:

    plan N  ->  executor computes N      plan N+1 -> waits there
                result N  ->  ids into the states  ->  masks of N+1  ->  executor, which samples N+1 now

Every masked row gets its mask, also one whose request has ended meanwhile: one that allows everything, since its id is
dropped. What the states say of their requests besides (the grammar is at its end, ids are forced, it failed) goes to
`settle`, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from triptych.executor.v1 import executor_pb2

from services.scheduler.core.request import FailureKind, RequestKey
from services.scheduler.core.step import MaskedRow, StepPlan, Updates
from services.scheduler.executor_run import ExecutorLostError, ExecutorRun
from services.scheduler.grammar_state import ContradictedError, GrammarFailedError, GrammarState

CONTRADICTED = "grammar: all that it allows next is banned by the request's ids, biases or min_tokens; leave an id"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Said:
    """What a state says of its request: `forced` ids that follow its last one (None: nothing is waited for), that it
    has `ended`, or how it failed."""

    key: RequestKey
    forced: list[int] | None = None
    ended: bool = False
    failure: tuple[FailureKind, str] | None = None


Settle = Callable[[Said], int]
"""Tells the core; how many of the forced ids it took."""


@dataclass(eq=False)
class _Entry:
    """A request's state, and how many output ids have been given to it: the state itself is the thread's."""

    state: GrammarState
    is_stepwise: bool
    num_known: int = 0


@dataclass
class _Work:
    """For one request: ids to go on by, then the mask of a row, if one waits. Without an entry: it has ended."""

    key: RequestKey
    entry: _Entry | None = None
    token_ids: list[int] = field(default_factory=list)
    slot: int | None = None


@dataclass
class _Job:
    """What a plan or a result has brought; the masks are all of one step."""

    run: ExecutorRun
    step: int
    works: list[_Work]


@dataclass
class _Done:
    masks: list[executor_pb2.Mask] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)


class Masking:
    """Lives on the event loop; jobs are done one after the other, so that ids reach the states in order.

    `settle` as above; `changed` is called when a job is done.
    """

    def __init__(self, settle: Settle, changed: Callable[[], None]) -> None:
        self.num_requests = 0
        """Choices that came with a grammar, from the start."""
        self.num_masks = 0
        self.mask_s = 0.0
        """What building them took."""
        self._settle = settle
        self._changed = changed
        self._entries: dict[RequestKey, _Entry] = {}
        self._pending: list[tuple[int, MaskedRow]] = []  # (step, row) whose id before is on its way
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._num_open = 0
        self._pool: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """A job is not done yet."""
        return self._num_open > 0

    def admit(self, key: RequestKey, state: GrammarState, *, is_stepwise: bool = False, num_known: int = 0) -> None:
        """A choice that the core has taken, with so many output ids that the state has taken."""
        self._entries[key] = _Entry(state, is_stepwise, num_known)
        self.num_requests += 1

    def admitted(self) -> list[RequestKey]:
        """Of the choices that have states."""
        return list(self._entries)

    def forget(self, key: RequestKey) -> None:
        """It has ended; one without a grammar is ignored."""
        self._entries.pop(key, None)

    def ended(self, updates: Updates) -> None:
        """Forgets what the core has ended."""
        if self._entries:
            for finished in updates.finished:
                self.forget(finished.key)
            for failure in updates.failed:
                self.forget(failure.key)

    def planned(self, plan: StepPlan, run: ExecutorRun) -> None:
        """Rows of a plan that wait for their masks."""
        works = []
        for row in plan.masked:
            entry = self._entries.get(row.key)
            if entry is None or entry.num_known == row.position:
                works.append(_Work(row.key, entry, slot=row.slot))
            else:
                self._pending.append((plan.step, row))
        self._put(run, plan.step, works)

    def applied(self, updates: Updates, run: ExecutorRun) -> None:
        """Ids of a result, what has ended with them forgotten; the rows of the next step can have their masks now."""
        if not self._entries and not self._pending:
            return
        self.ended(updates)
        works: dict[RequestKey, _Work] = {}
        at = 0
        for key, count in zip(updates.keys, updates.counts, strict=True):
            if (entry := self._entries.get(key)) is not None:
                entry.num_known += count
                works[key] = _Work(key, entry, updates.token_ids[at : at + count])
            at += count
        rows, self._pending = self._pending, []
        step = updates.step + 1
        for number, row in rows:
            entry = self._entries.get(row.key)
            if number == step and (entry is None or entry.num_known == row.position):
                works.setdefault(row.key, _Work(row.key, entry)).slot = row.slot
            else:
                self._pending.append((number, row))
        self._put(run, step, list(works.values()))

    def new_epoch(self) -> None:
        """No row of before waits any more."""
        self._pending.clear()

    def close(self) -> None:
        """Nothing is built any more."""
        if self._task is not None:
            self._task.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, run: ExecutorRun, step: int, works: list[_Work]) -> None:
        if not works:
            return
        if self._task is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._task = asyncio.create_task(self._work(self._pool), name="masks")
        self._num_open += 1
        self._jobs.put_nowait(_Job(run, step, works))

    async def _work(self, pool: ThreadPoolExecutor) -> None:
        while True:
            job = await self._jobs.get()
            try:
                await self._finish(job, pool)
            except Exception:  # a fault of ours in one job must not leave all later ones without masks
                log.exception("masks of step %d failed", job.step)
            finally:
                self._num_open -= 1
                self._changed()

    async def _finish(self, job: _Job, pool: ThreadPoolExecutor) -> None:
        begun_s = time.monotonic()
        done = await asyncio.get_running_loop().run_in_executor(pool, _do, job)
        self.num_masks += len(done.masks)
        self.mask_s += time.monotonic() - begun_s
        if done.masks:
            await self._send(job, done.masks)
        for said in done.said:
            self.tell(said)

    async def _send(self, job: _Job, masks: list[executor_pb2.Mask]) -> None:
        try:
            await job.run.send_masks(executor_pb2.Masks(step=job.step, masks=masks))
        except ExecutorLostError as error:  # whoever waits for its answers learns of it there
            log.debug("masks of step %d: %s", job.step, error)

    def tell(self, said: Said) -> None:
        """Settles what a state says of its request."""
        entry = self._entries.get(said.key)
        taken = self._settle(said)
        if entry is not None:
            entry.num_known += taken


def _do(job: _Job) -> _Done:
    """In the thread. One request's trouble is its own."""
    done = _Done()
    for work in job.works:
        mask, said = _advance(work)
        if mask is not None:
            done.masks.append(mask)
        if said is not None:
            done.said.append(said)
    return done


def _advance(work: _Work) -> tuple[executor_pb2.Mask | None, Said | None]:
    if work.entry is None:
        return _open(work), None
    state = work.entry.state
    failure: tuple[FailureKind, str] | None = None
    forced: list[int] | None = None
    mask = None
    try:
        state.take(work.token_ids)
        if work.entry.is_stepwise and work.token_ids:
            forced = state.force()
        words = state.mask() if work.slot is not None else None
        if work.slot is not None and words is not None:
            mask = executor_pb2.Mask(slot=work.slot, bitmap=words.astype("<u4", copy=False).tobytes())
    except ContradictedError:
        failure = FailureKind.GRAMMAR_CONTRADICTED, CONTRADICTED
    except GrammarFailedError as error:
        failure = FailureKind.GRAMMAR_FAILED, f"the request's grammar cannot go on: {error}"
    except Exception as error:
        log.exception("a grammar's state failed")
        failure = FailureKind.GRAMMAR_FAILED, f"the request's grammar cannot go on: {error!r}"
    if mask is None:
        mask = _open(work)
    if forced is None and failure is None and not state.ended:
        return mask, None
    return mask, Said(work.key, forced, state.ended, failure)


def _open(work: _Work) -> executor_pb2.Mask | None:
    """Allows everything: the id is dropped."""
    return None if work.slot is None else executor_pb2.Mask(slot=work.slot, banned_ids=b"")
