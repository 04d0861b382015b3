"""Row G7: one channel to a name whose frontends come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from loadtest.stub_engine import Faults, StubEngine
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import attached, scripted, text_checkpoint
from tests.support.attached import until
from tests.support.checkpoints import EOS_ID
from tests.support.names import Names, naming
from triptych_client import Client, Delta, SyncClient, TriptychError
from triptych_client.client import DEFAULT_RETRY

SHORT_AGE = {"max_connection_age_s": 0.3, "max_connection_age_grace_s": 60.0}
SCRIPT = [*range(50, 90), EOS_ID]
A, B, C, D = (f"127.0.0.{last}" for last in range(2, 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("names") / "tiny-text")


class Fleet:
    """Frontends on one port of several loopback addresses, each with an engine of its own, under one name."""

    def __init__(self, model: Path, names: Names, stack: AsyncExitStack) -> None:
        self.names = names
        self.engines: dict[str, StubEngine] = {}
        self._model = model
        self._stack = stack
        self._frontends: dict[str, Frontend] = {}
        self._port = 0

    @property
    def target(self) -> str:
        return f"dns://{self.names.authority}/frontends.test:{self._port}"

    async def start(self, host: str, engine: StubEngine, **config: Any) -> None:
        await self._stack.enter_async_context(engine)
        frontend = Frontend(
            FrontendConfig(host=host, port=self._port, engine=engine.address, model=str(self._model), **config)
        )
        await frontend.start()
        await attached(frontend)
        self._port = frontend.server.port
        self.engines[host], self._frontends[host] = engine, frontend

    async def stop(self, host: str) -> None:
        await self._frontends.pop(host).close()

    async def close(self) -> None:
        for host in list(self._frontends):
            await self.stop(host)

    def served(self) -> dict[str, int]:
        """Calls that each address has had."""
        return {host: len(engine.submits) for host, engine in self.engines.items()}


@asynccontextmanager
async def fleet_of(model: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack, naming(A) as names:
        fleet = Fleet(model, names, stack)
        try:
            yield fleet
        finally:
            await fleet.close()


async def asked_until(fleet: Fleet, client: Client | SyncClient, hosts: set[str]) -> None:
    """Calls, one after another, until each of these addresses has had five more."""
    before = fleet.served()
    async with asyncio.timeout(12):
        while any(fleet.served()[host] < before[host] + 5 for host in hosts):
            if isinstance(client, Client):
                await client.generate([10], max_tokens=2).collect()
            else:
                await asyncio.to_thread(lambda: client.generate([10], max_tokens=2).collect())
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [Client, SyncClient])
async def test_G7_one_channel_spreads_over_new_servers_and_finds_one_that_moved(
    model: Path, kind: type[Client | SyncClient]
) -> None:
    async with fleet_of(model) as fleet:
        await fleet.start(A, scripted([50]), **SHORT_AGE)
        client = kind(fleet.target, retry=None)  # no error is hidden by another try
        await asked_until(fleet, client, {A})
        await fleet.start(B, scripted([50]), **SHORT_AGE)
        await fleet.start(C, scripted([50]), **SHORT_AGE)
        fleet.names.addresses = [A, B, C]
        await asked_until(fleet, client, {A, B, C})

        await fleet.stop(B)
        await asked_until(fleet, client, {A, C})
        await fleet.start(D, scripted([50]), **SHORT_AGE)
        fleet.names.addresses = [A, C, D]
        await asked_until(fleet, client, {A, C, D})
        closing = client.close()
        if closing is not None:
            await closing


async def read(client: Client, fleet: Fleet, *, leave_after: int | None = None) -> list[Delta]:
    """A stream's deltas; after so many of them its frontend is gone, and the name stands for another."""
    seen: list[Delta] = []
    async for delta in client.generate([10], max_tokens=60, seed=5):
        seen.append(delta)
        if len(seen) == leave_after:
            fleet.names.addresses = [B]
            await fleet.stop(A)
    return seen


def ids(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_G7_a_stream_that_had_a_token_is_never_begun_again_elsewhere(model: Path) -> None:
    async with fleet_of(model) as fleet:
        for host in (A, B):
            await fleet.start(host, scripted(SCRIPT, step_s=0.03))
        async with Client(fleet.target, retry=None) as client:
            with pytest.raises(TriptychError) as caught:
                await read(client, fleet, leave_after=3)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert fleet.served() == {A: 1, B: 0}


async def test_G7_a_stream_whose_server_left_is_resumed_at_the_new_address(model: Path) -> None:
    async with fleet_of(model) as fleet:
        for host in (A, B):
            await fleet.start(host, scripted(SCRIPT, step_s=0.03))
        async with Client(fleet.target) as client:
            deltas = await read(client, fleet, leave_after=3)
        assert ids(deltas) == SCRIPT
        assert fleet.served() == {A: 1, B: 1} and fleet.engines[B].submits[0].resumed


@pytest.mark.parametrize("retry", [None, DEFAULT_RETRY])
async def test_G7_a_call_is_made_again_before_its_first_token_where_retries_are_on(model: Path, retry: Any) -> None:
    async with fleet_of(model) as fleet:
        await fleet.start(A, scripted(SCRIPT, faults=Faults(silent=True)))
        await fleet.start(B, scripted(SCRIPT))
        async with Client(fleet.target, retry=retry) as client:
            reading = asyncio.create_task(read(client, fleet))
            await until(lambda: fleet.served()[A] > 0, 5)
            fleet.names.addresses = [B]
            await fleet.stop(A)
            if retry is None:
                with pytest.raises(TriptychError, match="UNAVAILABLE"):
                    await reading
                assert fleet.served() == {A: 1, B: 0}
                return
            assert ids(await reading) == SCRIPT
        assert fleet.served() == {A: 1, B: 1} and not fleet.engines[B].submits[0].resumed


async def test_G7_a_stream_outlives_its_connections_age_up_to_the_grace(model: Path) -> None:
    async with fleet_of(model) as fleet:
        await fleet.start(A, scripted(SCRIPT, step_s=0.03), **SHORT_AGE)
        async with Client(fleet.target, retry=None) as client:
            assert ids(await read(client, fleet)) == SCRIPT


async def test_G7_a_stream_longer_than_the_grace_is_cut(model: Path) -> None:
    async with fleet_of(model) as fleet:
        await fleet.start(A, scripted(SCRIPT, step_s=0.03), max_connection_age_s=0.2, max_connection_age_grace_s=0.2)
        async with Client(fleet.target, retry=None) as client:
            with pytest.raises(TriptychError) as caught:
                await read(client, fleet)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
