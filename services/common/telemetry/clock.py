"""What another machine's clock is ahead of ours, from messages there and back (RFC 5905, section 8)."""

from __future__ import annotations

from collections import deque

_SAMPLES = 8

FIRST_PINGS, FIRST_INTERVAL_S, INTERVAL_S = 4, 0.2, 10.0


class ClockOffset:
    """The sample of the shortest way there and back counts, of the last few: it can be the least wrong.

    Where the other clock's time fits into that way, the clocks cannot be told apart, and the offset is 0: so it is on
    one machine.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)  # (round trip, offset)
        self.ns = 0
        """Theirs minus ours."""

    def add(self, sent_ns: int, theirs_ns: int, back_ns: int) -> None:
        """Our time of sending, their time between, our time of hearing back. A clock that was set back counts not."""
        if back_ns < sent_ns:
            return
        self._samples.append((back_ns - sent_ns, theirs_ns - (sent_ns + back_ns) // 2))
        round_trip_ns, offset_ns = min(self._samples)
        self.ns = offset_ns if abs(offset_ns) > round_trip_ns // 2 else 0


def ping_interval_s(num_sent: int) -> float:
    """Until the next ping: the first few come soon, then they are rare."""
    return FIRST_INTERVAL_S if num_sent < FIRST_PINGS else INTERVAL_S
