"""The queue of requests that wait: first come, first served; any of them may leave at any time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from services.scheduler.core.request import Request, RequestKey


class WaitingQueue:
    """Ordered by arrival. What was preempted arrived before all that waits, so it joins at the head."""

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestKey, Request] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def head(self) -> Request | None:
        """The next to be scheduled."""
        return next(iter(self._requests.values()), None)

    def append(self, request: Request) -> None:
        """Joins behind all others."""
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens

    def put_back(self, request: Request) -> None:
        """Joins before all others."""
        self.append(request)
        self._requests.move_to_end(request.key, last=False)

    def discard(self, request: Request) -> None:
        """Leaves, if it is there."""
        if self._requests.pop(request.key, None) is not None:
            self.num_tokens -= request.num_tokens

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def recount(self) -> None:
        """After the token counts of those that wait have changed."""
        self.num_tokens = sum(request.num_tokens for request in self._requests.values())
