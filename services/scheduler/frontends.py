"""The frontends attached now: their outboxes, by number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from triptych.engine.v1 import engine_pb2

from services.scheduler.outbox import Outbox
from services.scheduler.outputs import Outputs


class Frontends:
    """A number is given once, from 1 on, so that nothing of a stream that has ended can reach a later one."""

    def __init__(self) -> None:
        self._outboxes: dict[int, Outbox] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._outboxes)

    def __contains__(self, number: int) -> bool:
        return number in self._outboxes

    def __iter__(self) -> Iterator[Outbox]:
        return iter(list(self._outboxes.values()))

    def add(self, outbox: Outbox) -> int:
        """The frontend's number."""
        number = next(self._numbers)
        self._outboxes[number] = outbox
        return number

    def remove(self, number: int) -> bool:
        """False if it was gone already."""
        return self._outboxes.pop(number, None) is not None

    def send(self, number: int, outputs: Outputs) -> bool:
        """False if the frontend has just been cut for reading too slowly; one that is gone takes anything."""
        outbox = self._outboxes.get(number)
        if outbox is None:
            return True
        outbox.put_outputs(outputs)
        return not outbox.is_closed

    def greet(self, hello: engine_pb2.EngineHello) -> None:
        """To all: the model is loaded."""
        for outbox in self:
            outbox.put_hello(hello)

    def send_heartbeat(self, heartbeat: engine_pb2.Heartbeat) -> None:
        """To all."""
        for outbox in self:
            outbox.put_heartbeat(heartbeat)
