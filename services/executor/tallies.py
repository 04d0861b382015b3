"""What an executor has done since it began: plain counts, kept always, that metrics read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from triptych.executor.v1 import executor_pb2 as pb

from services.common.telemetry import names
from services.common.telemetry.readings import Reading
from services.executor.plan import Plan


class Tallies:
    """Lives on the event loop."""

    def __init__(self, ranks: int) -> None:
        self.load_s = 0.0
        """What loading the weights took; 0 before it was done."""
        self.warm_up_s = 0.0
        """What making the KV tensors and warming up took; 0 before it was done."""
        self.kv_bytes = 0
        self.is_driven = False
        """A scheduler has an epoch open."""
        self.epochs = 0
        self._ranks = ranks
        self._steps = self._rows = self._tokens = 0
        self._wait_us = self._execute_us = self._sample_us = 0
        self._faults: Counter[str] = Counter()

    def stepped(self, plan: Plan, result: pb.StepResult) -> None:
        """A plan has its result; one without rows that count is no step."""
        token_counts = plan.token_counts
        if len(plan.uncounted_slots):
            token_counts = token_counts[np.isin(plan.slots, plan.uncounted_slots, invert=True)]
        if not len(token_counts):
            return
        self._steps += 1
        self._rows += len(token_counts)
        self._tokens += int(token_counts.sum())
        self._wait_us += result.wait_us
        self._execute_us += result.execute_us
        self._sample_us += result.sample_us

    def faulted(self, kind: pb.FaultKind.ValueType) -> None:
        """A scheduler is told of a fault."""
        self._faults[pb.FaultKind.Name(kind).removeprefix("FAULT_KIND_").lower()] += 1

    def readings(self) -> Iterator[Reading]:
        """What metrics tell of it."""
        yield Reading(names.EXECUTOR_STEPS, self._steps)
        parts_us = {"wait": self._wait_us, "execute": self._execute_us, "sample": self._sample_us}
        for part, spent_us in parts_us.items():
            yield Reading(names.EXECUTOR_STEP_TIME, spent_us / 1e6, {names.PART: part})
        yield Reading(names.EXECUTOR_ROWS, self._rows)
        yield Reading(names.EXECUTOR_TOKENS, self._tokens)
        for kind in pb.FaultKind.keys()[1:]:
            name = kind.removeprefix("FAULT_KIND_").lower()
            yield Reading(names.EXECUTOR_FAULTS, self._faults[name], {names.KIND: name})
        yield Reading(names.EXECUTOR_EPOCHS, self.epochs)
        yield Reading(names.EXECUTOR_DRIVEN, self.is_driven)
        yield Reading(names.KV_BYTES, self.kv_bytes)
        yield Reading(names.LOAD_TIME, self.load_s)
        yield Reading(names.WARM_UP_TIME, self.warm_up_s)
        yield Reading(names.RANKS, self._ranks)
