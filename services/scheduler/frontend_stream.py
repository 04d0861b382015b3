"""One Attach stream: the hellos, then requests down and outputs up. A lease: its requests end with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
from triptych.engine.v1 import engine_pb2

from services.common.contract import PROTOCOL_VERSION
from services.common.errors import RequestError, invalid, unserved
from services.scheduler import door
from services.scheduler.engine import Engine
from services.scheduler.fragments import HalfSent
from services.scheduler.outbox import Outbox

log = logging.getLogger(__name__)


class FrontendStream:
    """Reads what a frontend sends while its outbox is written."""

    def __init__(self, engine: Engine, max_pending_bytes: int) -> None:
        self._engine = engine
        self._outbox = Outbox(max_pending_bytes)
        self._number: int | None = None
        self._half_sent = HalfSent()

    async def serve(
        self, messages: AsyncIterator[engine_pb2.AttachRequest]
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """All messages up. Raises RequestError where the stream is to end with a status other than OK."""
        hello = await _first(messages)
        self._check_hello(hello)
        self._number = self._engine.attach(self._outbox)
        log.info("frontend %.64r attached as %d", hello.frontend_id, self._number)
        reader = asyncio.create_task(self._read(messages), name=f"frontend-{self._number}")
        try:
            while (message := await self._outbox.take()) is not None:
                yield message
        finally:
            reader.cancel()
            self.close()

    def close(self) -> None:
        """The stream is over; may be called twice."""
        self._outbox.close()
        if self._number is not None and self._engine.detach(self._number):
            log.info("frontend %d left", self._number)

    async def _read(self, messages: AsyncIterator[engine_pb2.AttachRequest]) -> None:
        try:
            async for message in messages:
                self._handle(message)
            self._outbox.close()
        except RequestError as error:
            self._outbox.close(error)
        except Exception:
            log.exception("reading from frontend %s failed", self._number)
            self._outbox.close(
                RequestError(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error; the scheduler's log holds it")
            )

    def _handle(self, message: engine_pb2.AttachRequest) -> None:
        assert self._number is not None
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(message.submit)
        elif kind == "abort":
            self._engine.abort(self._number, message.abort)
            self._half_sent.drop(door.read_abort_ids(message.abort))
        elif kind == "ping":
            door.check(message.ping)
            self._outbox.put_heartbeat(self._engine.heartbeat(message.ping.sent_unix_ns))
        elif kind == "fragment":
            self._take_fragment(message.fragment)
        elif kind == "hello":
            raise invalid("hello", "comes once, as the first message", "PROTOCOL")
        else:
            raise unserved("message", "is of a kind that this scheduler does not know")

    def _submit(self, submit: engine_pb2.Submit) -> None:
        assert self._number is not None
        try:
            self._half_sent.refuse_whole(submit.request_id)
        except RequestError as error:
            self._engine.refuse(self._number, submit.request_id, error)
        else:
            self._engine.submit(self._number, submit)

    def _take_fragment(self, fragment: engine_pb2.Fragment) -> None:
        assert self._number is not None
        if not fragment.total_bytes and fragment.request_id not in self._half_sent:
            return  # aborted or refused already
        try:
            door.check(fragment)
            submit = self._half_sent.add(fragment, self._engine.max_submit_bytes)
        except RequestError as error:
            self._half_sent.drop([fragment.request_id])
            self._engine.refuse(self._number, fragment.request_id, error)
        else:
            if submit is not None:
                self._engine.submit(self._number, submit)

    def _check_hello(self, hello: engine_pb2.FrontendHello) -> None:
        door.check(hello)
        if not hello.min_version <= PROTOCOL_VERSION <= hello.max_version:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "VERSION_MISMATCH",
                f"the frontend speaks versions {hello.min_version} to {hello.max_version}, this scheduler "
                f"{PROTOCOL_VERSION}; upgrade the older one",
            )
        mine = self._engine.model.tokenizer_hash
        if hello.tokenizer_hash != mine:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "TOKENIZER_MISMATCH",
                f"the frontend's tokenizer.json has hash {hello.tokenizer_hash or 'none'}, the scheduler's {mine}; "
                "give both the same --model",
            )


async def _first(messages: AsyncIterator[engine_pb2.AttachRequest]) -> engine_pb2.FrontendHello:
    async for message in messages:
        if message.WhichOneof("message") != "hello":
            break
        return message.hello
    raise invalid("hello", "must be the first message of an Attach stream", "PROTOCOL")
