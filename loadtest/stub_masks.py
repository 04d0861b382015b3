"""The stub executor's masks: those that have come, by step and slot, and the steps that wait for theirs."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
from triptych.executor.v1 import executor_pb2

from loadtest.stub_batch import PlanError

Allowed = npt.NDArray[np.bool_]
"""[vocab_size] whether an id may be drawn."""


class StubMasks:
    """Of one epoch. What breaks the contract is a PlanError, here or where the step waits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._come: dict[int, dict[int, Allowed]] = {}
        self._kept: dict[int, Allowed] = {}
        self._done = 0
        self._changed = asyncio.Event()

    def put(self, message: executor_pb2.Masks) -> None:
        """Raises PlanError for a second mask of a row, or one of a step that is done."""
        if message.step <= self._done:
            raise PlanError(f"masks of step {message.step}, which is done")
        come = self._come.setdefault(message.step, {})
        for mask in message.masks:
            if mask.slot in come:
                raise PlanError(f"step {message.step} has a second mask of slot {mask.slot}")
            come[mask.slot] = self._read(mask)
        self._changed.set()

    async def take(self, step: int, slots: frozenset[int]) -> dict[int, Allowed]:
        """All of a step, once they are there. Raises PlanError for one that nobody waits for."""
        while not slots.issubset(self._come.get(step, {})):
            self._changed.clear()
            await self._changed.wait()
        come = self._come.pop(step, {})
        self._done = step
        if astray := sorted(come.keys() - slots):
            raise PlanError(f"step {step} has a mask of slot {astray[0]}, which does not wait for one")
        return come

    def _read(self, mask: executor_pb2.Mask) -> Allowed:
        kind = mask.WhichOneof("kind")
        if kind == "cached_id":
            if mask.cached_id not in self._kept:
                raise PlanError(f"no mask is kept under {mask.cached_id}")
            allowed = self._kept[mask.cached_id]
        elif kind == "bitmap":
            if len(mask.bitmap) != 4 * -(-self._vocab_size // 32):
                raise PlanError(f"a bitmap has {len(mask.bitmap)} bytes for {self._vocab_size} ids")
            bits = np.unpackbits(np.frombuffer(mask.bitmap, np.uint8), bitorder="little")
            allowed = bits[: self._vocab_size].astype(bool)
        elif kind in ("allowed_ids", "banned_ids"):
            allowed = np.full(self._vocab_size, kind == "banned_ids")
            allowed[np.frombuffer(getattr(mask, kind), "<u4")] = kind == "allowed_ids"
        else:
            raise PlanError(f"the mask of slot {mask.slot} is empty")
        if mask.HasField("cache_as"):
            self._kept[mask.cache_as] = allowed
        return allowed
