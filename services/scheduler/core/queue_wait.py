"""How long a request that comes now will wait before it starts, and which of those that wait have waited too long.

Two things keep a request in the queue, and the longer of the two waits is expected:

    room     those before it need slots and blocks, which come free as running ones end. By Little's law (1961) those
             are R / D a second: R run, and a choice holds its slot for D on average, from its first step to its last
             id, and the one step more until others may have it.
    prefill  the prompts before it are computed first, at the rate of steps that prompts filled by half or more.

Both follow what was measured lately, whatever made it so: the model, the batch, the lengths of prompts and answers.
Where nothing was measured yet, a request is let in: as long as no choice has ended, D is the age of the oldest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.request import Request

PATIENCE = 1.15
"""A request that was let in is refused after so many times the limit: the expectation is no promise, and most of those
that it was wrong about start a moment later. Found by tests/scheduler/test_core_queue_wait.py."""

_ENDS = 64
_STEPS = 16
"""What means are taken over: so many, the later ones counting more."""


class _Mean:
    """Of all values at first, of the last `size` or so then. None without any."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._count = 0
        self.value: float | None = None

    def add(self, value: float) -> None:
        """One more."""
        self._count = min(self._count + 1, self._size)
        self.value = value if self.value is None else self.value + (value - self.value) / self._count


@dataclass(frozen=True)
class Ahead:
    """What comes before a request: choices and tokens of the queue, with its own choices; `room` of these find a slot
    and blocks at once, so they will run beside those `running`. Prompts that run have `prefill_tokens` to go; the first
    of all runs since `oldest_ns`."""

    choices: int
    queued_tokens: int
    room: int
    prefill_tokens: int
    running: int
    oldest_ns: int


class QueueWait:
    """Without `limit_ns` nobody is refused, and waits are expected all the same."""

    def __init__(self, limit_ns: int | None) -> None:
        self.limit_ns = limit_ns
        self._run_ns = _Mean(_ENDS)
        self._step_ns = _Mean(_STEPS)  # from a plan to its result
        self._token_ns = _Mean(_STEPS)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._applied_ns = 0

    # -- what was measured

    def ended(self, request: Request) -> None:
        """A choice is over, however. One without an id tells nothing."""
        if request.first_token_ns and request.submission.is_counted:
            self._run_ns.add(request.last_id_ns - request.scheduled_ns)

    def stepped(self, planned_ns: int, now_ns: int, prompt_tokens: int, room_tokens: int) -> None:
        """The result of a step is there that had room for so many prompt tokens. It began when it was planned, or when
        the one before it was done."""
        begun_ns, self._applied_ns = max(planned_ns, self._applied_ns), now_ns
        self._step_ns.add(now_ns - planned_ns)
        if prompt_tokens and 2 * prompt_tokens >= room_tokens:
            self._token_ns.add((now_ns - begun_ns) / prompt_tokens)

    # -- what is expected

    def expected_ns(self, ahead: Ahead, now_ns: int) -> int:
        """Until the last of its choices starts."""
        return max(self._for_room_ns(ahead, now_ns), self._for_prefill_ns(ahead))

    def _for_room_ns(self, ahead: Ahead, now_ns: int) -> int:
        missing = ahead.choices - ahead.room
        if missing <= 0:
            return 0
        run_ns = self._run_ns.value
        if run_ns is None:
            run_ns = now_ns - ahead.oldest_ns
        else:
            run_ns += self._step_ns.value or 0
        return math.ceil(missing * run_ns / max(1, ahead.running + ahead.room))

    def _for_prefill_ns(self, ahead: Ahead) -> int:
        if self._token_ns.value is None:
            return 0
        return math.ceil(self._token_ns.value * (ahead.queued_tokens + ahead.prefill_tokens))

    # -- who has waited too long

    @property
    def next_ns(self) -> int | None:
        """When `overdue` may next have something to tell."""
        while self._waiting and _has_left(self._waiting[0][1]):
            self._waiting.popleft()
        return self._waiting[0][0] if self._waiting else None

    def joined(self, request: Request) -> None:
        """A choice waits. One that goes on from elsewhere has begun for its caller, and may wait."""
        if self.limit_ns is not None and request.submission.is_counted and not request.submission.resumed:
            self._waiting.append((request.queued_ns + round(PATIENCE * self.limit_ns), request))

    def overdue(self, now_ns: int) -> Iterator[Request]:
        """Those that have waited too long; each comes once. A request of which one choice has started is none."""
        while (next_ns := self.next_ns) is not None and next_ns <= now_ns:
            request = self._waiting.popleft()[1]
            if not any(sibling.scheduled_ns for sibling in request.siblings):
                yield request

    def clear(self) -> None:
        """Nobody waits."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


def _has_left(request: Request) -> bool:
    return request.ended or request.scheduled_ns > 0
