"""What a stage is made of: checks with a name, what they run on, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.instances import Instance
from tests.gpu_check.card import Card, cupy_device
from tests.kernels.hostshim.hostshim import HostDevice


class SkippedError(Exception):
    """A check that cannot be done here; the text says why."""


@dataclass(frozen=True)
class Check:
    """`run` returns what there is to tell, raises SkippedError, or anything else where the check fails."""

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """Of one check; `passed` is None where it was skipped."""

    stage: str
    name: str
    passed: bool | None
    note: str
    seconds: float


@dataclass
class Place:
    """Where the checks run: on a card, or without one on the host shim."""

    dry: bool
    cubins: Path
    """What `make kernels` wrote."""
    few: bool = False
    """One case of each kernel, as under a sanitizer, which is slow."""
    model: Path | None = None
    deadline_s: float = float("inf")
    """Of time.monotonic()."""
    capability: int = 90

    def kernels(self, *together: Instance) -> Any:
        """The kernels.launch.Device itself, for tensors that lie where it computes; the shim compiles `together`."""
        return HostDevice(together=together) if self.dry else cupy_device(self.capability, self.cubins)

    def device(self, *together: Instance) -> Any:
        """A fresh one for arrays of the host, to be called as tests/kernels calls HostDevice."""
        return Card(self.kernels(*together), "cpu" if self.dry else "cuda")

    def left_s(self) -> float:
        """Of the time given."""
        return self.deadline_s - time.monotonic()

    def needs_card(self, why: str) -> None:
        """Raises SkippedError without one."""
        if self.dry:
            raise SkippedError(why)


@dataclass
class Tally:
    """Runs checks, prints each as it ends, and keeps what became of them."""

    place: Place
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, stage: str, checks: Iterator[Check]) -> None:
        """All checks of a stage; those that come after the time is up are skipped."""
        print(f"\n{stage}", flush=True)
        for check in checks:
            begun = time.monotonic()
            passed, note = self._one(check)
            outcome = Outcome(stage, check.name, passed, note, time.monotonic() - begun)
            self.outcomes.append(outcome)
            word = {True: "ok", False: "FAILED", None: "skipped"}[passed]
            print(f"  {word:8}{check.name}{': ' if note else ''}{note}", flush=True)

    def _one(self, check: Check) -> tuple[bool | None, str]:
        if self.place.left_s() <= 0:
            return None, "the time is up"
        try:
            return True, check.run()
        except SkippedError as reason:
            return None, str(reason)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return False, f"{type(error).__name__}: {' | '.join(lines[:6])[:600]}"

    def table(self) -> list[tuple[str, ...]]:
        """A line a stage: passed, failed, skipped, seconds."""
        rows = []
        for stage in dict.fromkeys(outcome.stage for outcome in self.outcomes):
            members = [outcome for outcome in self.outcomes if outcome.stage == stage]
            counts = [str(sum(member.passed is state for member in members)) for state in (True, False, None)]
            rows.append((stage, *counts, f"{sum(member.seconds for member in members):.1f}"))
        return rows

    @property
    def failed(self) -> bool:
        """Whether any check did. Skipped ones did not."""
        return any(outcome.passed is False for outcome in self.outcomes)
