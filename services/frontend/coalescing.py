"""Deltas that a client wants fewer of: held back until they are due, and then sent as one."""

from __future__ import annotations

import itertools

from services.frontend.request import Called, Delta, Hold

MOST_IDS = 4096
"""Of a choice in one message, alternatives to its ids included: with logprobs about 120 KB, so that 16 choices of a
client that did not read stay below the 4 MB of a message."""


class Coalescer:
    """What is held back of each choice of a request. Times are seconds of one clock, the caller's."""

    def __init__(self, hold: Hold, num_choices: int) -> None:
        self._interval_s = hold.interval_s
        self._num_parts = 0
        self._held = [_Held(hold) for _ in range(num_choices)]
        self.num_ids = 0
        """Held of all choices, alternatives to them included."""

    @property
    def empty(self) -> bool:
        """Nothing is held."""
        return self._num_parts == 0

    def add(self, choice: int, delta: Delta, now_s: float) -> bool:
        """Takes what is new of a choice; True where what is held of it is now due."""
        held = self._held[choice]
        for part in _parts(delta):
            held.add(part)
            self._num_parts += 1
            self.num_ids += weight(part)
        return held.is_due(now_s)

    def due(self, now_s: float) -> list[tuple[int, Delta]]:
        """What is to be sent now, by choice."""
        if not self._num_parts:
            return []
        return [(choice, self._take(held, now_s)) for choice, held in enumerate(self._held) if held.is_due(now_s)]

    def rest(self, now_s: float) -> list[tuple[int, Delta]]:
        """All that is held, due or not: nothing more will come."""
        return [(choice, self._take(held, now_s)) for choice, held in enumerate(self._held) if held.anything]

    def next_s(self) -> float | None:
        """When something that is held is due though nothing is added; None: never."""
        if not self._interval_s:
            return None
        return min((held.due_s for held in self._held if held.anything and held.due_s is not None), default=None)

    def _take(self, held: _Held, now_s: float) -> Delta:
        parts = held.take(now_s)
        self._num_parts -= len(parts)
        self.num_ids -= sum(map(weight, parts))
        return _joined(parts)


class _Held:
    """Of one choice."""

    def __init__(self, hold: Hold) -> None:
        self.due_s: float | None = None
        """When what is held is due whatever comes; unset before the first delta, and without an interval."""
        self._hold = hold
        self._parts: list[Delta] = []
        self._num_ids = 0

    @property
    def anything(self) -> bool:
        return bool(self._parts)

    def add(self, delta: Delta) -> None:
        self._parts.append(delta)
        self._num_ids += len(delta.token_ids)

    def is_due(self, now_s: float) -> bool:
        if not self._parts:
            return False
        hold = self._hold
        if not hold.tokens and not hold.interval_s:
            return True
        if self._parts[-1].stopped is not None or 0 < hold.tokens <= self._num_ids:
            return True
        return hold.interval_s > 0 and (self.due_s is None or now_s >= self.due_s)

    def take(self, now_s: float) -> list[Delta]:
        count = self._most()
        parts, self._parts = self._parts[:count], self._parts[count:]
        self._num_ids -= sum(len(part.token_ids) for part in parts)
        if self._hold.interval_s:
            self.due_s = now_s + self._hold.interval_s
        return parts

    def _most(self) -> int:
        """How many parts one message takes, at least one."""
        num_ids = 0
        for count, part in enumerate(self._parts):
            num_ids += weight(part)
            if count and num_ids > MOST_IDS:
                return count
        return len(self._parts)


def weight(delta: Delta) -> int:
    """Its ids and the alternatives to them."""
    return len(delta.token_ids) + sum(len(entry.top) for entry in delta.logprobs)


def fits_a_message(delta: Delta) -> bool:
    """With others of its request."""
    return len(delta.logprobs) < 2 or weight(delta) <= MOST_IDS


def _parts(delta: Delta) -> list[Delta]:
    """The delta, or where an engine that was slow to be read gave more than fits a message: several.

    Text may lag behind ids, so the last has all of it.
    """
    if fits_a_message(delta):
        return [delta]
    each = max(1, MOST_IDS // (1 + len(delta.logprobs[0].top)))
    cuts = range(0, len(delta.token_ids), each)
    parts = [Delta("", delta.token_ids[at : at + each], delta.logprobs[at : at + each]) for at in cuts]
    return [*parts[:-1], delta._replace(token_ids=parts[-1].token_ids, logprobs=parts[-1].logprobs)]


def _joined(parts: list[Delta]) -> Delta:
    if len(parts) == 1:
        return parts[0]
    return Delta(
        text="".join(part.text for part in parts),
        token_ids=tuple(itertools.chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(itertools.chain.from_iterable(part.logprobs for part in parts)),
        stopped=parts[-1].stopped,
        cumulative_logprob=parts[-1].cumulative_logprob,
        reasoning="".join(part.reasoning for part in parts),
        calls=_joined_calls(parts),
    )


def _joined_calls(parts: list[Delta]) -> tuple[Called, ...]:
    pieces: dict[int, list[Called]] = {}
    for called in itertools.chain.from_iterable(part.calls for part in parts):
        pieces.setdefault(called.index, []).append(called)
    return tuple(
        Called(index, first.id, first.name, "".join(piece.arguments for piece in (first, *rest)))
        for index, (first, *rest) in pieces.items()
    )
