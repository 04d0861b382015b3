"""A frontend, a scheduler and an executor of the last release with those of this one, each way, and of one to come.

The services are real but for the executor's tensors; between two of them a proxy passes on what the contract of the
last release knows, and says in a hello what that release said.

`python -m tests.e2e.test_version_skew` writes what this version's services say, for the next release's tests.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.stub_executor import StubExecutor
from services.executor.wire import FEATURES as EXECUTOR_FEATURES
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import VOCAB_SIZE, attached, reason, text_checkpoint
from tests.support.attached import Port, scheduler_for, until
from tests.support.calls import by_ids, greedy
from tests.support.old_contract import HELLOS, Change, Contract, Proxy, as_recorded, recorded, told_by, with_fields

PROMPT = [5, 6, 7, 8] * 10
HELLO_NAMES = ("FrontendHello", "EngineHello", "LoadRequest", "Loaded")


def nothing(message: Any) -> None:
    """Changes nothing."""


@dataclass
class Stack:
    """A frontend that has attached through `engine` to a scheduler that is driving `executor`'s."""

    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    engine: Proxy
    executor: Proxy

    async def ids(self, **options: Any) -> list[int]:
        """Of a greedy answer."""
        call = self.stub.Generate(by_ids(PROMPT, greedy(max_tokens=8, ignore_eos=True, seed=7, **options)), timeout=30)
        return [i async for message in call for choice in message.choices for i in choice.token_ids]


@asynccontextmanager
async def stack(
    model: Path, *, engine: Change = nothing, executor: Change = nothing, future: bool = False, attaches: bool = True
) -> AsyncIterator[Stack]:
    contract = Contract()
    async with StubExecutor(vocab_size=VOCAB_SIZE, features=EXECUTOR_FEATURES) as stub:
        to_executor = Proxy(f"127.0.0.1:{stub.port}", contract, change=executor, from_the_future=future)
        async with to_executor.serving() as port, scheduler_for(Port(port), model) as scheduler:
            to_engine = Proxy(f"127.0.0.1:{scheduler.server.port}", contract, change=engine, from_the_future=future)
            async with to_engine.serving() as port:
                frontend = Frontend(FrontendConfig(port=0, engine=f"127.0.0.1:{port}", model=str(model)))
                await frontend.start()
                try:
                    if attaches:
                        await asyncio.wait_for(attached(frontend), 20)
                    async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
                        yield Stack(inference_pb2_grpc.InferenceServiceStub(channel), to_engine, to_executor)
                finally:
                    await frontend.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """Ids of services of one version."""

    async def ask() -> list[int]:
        async with stack(model) as made:
            return await made.ids()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("hop", "old"),
    [
        ("engine", "FrontendHello"),  # the last release's frontend, this scheduler
        ("engine", "EngineHello"),  # this frontend, the last release's scheduler
        ("executor", "LoadRequest"),  # the last release's scheduler, this executor's contract
        ("executor", "Loaded"),  # this scheduler, the last release's executor
    ],
)
async def test_a_service_of_the_last_release_works_with_those_of_this_one(
    hop: str, old: str, model: Path, expected: list[int]
) -> None:
    change = as_recorded(old)
    made_of: dict[str, Any] = {hop: change}
    async with stack(model, **made_of) as made:
        assert await made.ids() == expected
        proxy: Proxy = getattr(made, hop)
        told = [one for message in proxy.seen if (one := told_by(message, old)) is not None]
        assert told
        assert told[0] == recorded()[old]
        if old in ("EngineHello", "Loaded"):
            # An older server is asked nothing that it has not listed: it would not see what it does not do.
            assert [message.DESCRIPTOR.name for message in proxy.unread] == []


async def test_a_request_that_an_older_service_cannot_read_is_seen_by_this_test(model: Path) -> None:
    """Fields of the future, sent on to a second proxy, are what it counts."""
    async with stack(model) as made:
        after = Proxy(made.engine.target, Contract())
        async with after.serving() as port:
            before = Proxy(f"127.0.0.1:{port}", Contract(), from_the_future=True)
            async with before.serving() as port:
                frontend = Frontend(FrontendConfig(port=0, engine=f"127.0.0.1:{port}", model=str(model)))
                await frontend.start()
                try:
                    await asyncio.wait_for(attached(frontend), 20)
                finally:
                    await frontend.close()
        assert [message.DESCRIPTOR.name for message in after.unread] == ["AttachRequest"]


async def test_what_an_engine_has_not_listed_is_not_asked_of_it(model: Path, expected: list[int]) -> None:
    """An engine without any feature: answers come, what needs a feature is refused, and no trace goes along."""
    async with stack(model, engine=with_fields("EngineHello", features=[])) as made:
        trace = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),)
        request = by_ids(PROMPT, greedy(max_tokens=8, ignore_eos=True, seed=7))
        call = made.stub.Generate(request, metadata=trace)
        assert [i async for message in call for choice in message.choices for i in choice.token_ids] == expected
        submits: list[Any] = [m for m in made.engine.seen if m.WhichOneof("message") == "submit"]  # type: ignore[attr-defined]
        assert [one.submit.traceparent for one in submits] == [""]
        grammar = generation_pb2.Grammar(regex="a+")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.stub.GenerateUnary(
                inference_pb2.GenerateUnaryRequest(request=by_ids(PROMPT, greedy(max_tokens=8, grammar=grammar)))
            )
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        model_told = await made.stub.GetModel(inference_pb2.GetModelRequest())
        assert "grammar" not in model_told.model.features


async def test_an_executor_without_a_feature_takes_it_from_the_whole_engine(model: Path, expected: list[int]) -> None:
    async with stack(model, executor=with_fields("Loaded", features=[])) as made:
        assert await made.ids() == expected
        assert "grammar" not in (await made.stub.GetModel(inference_pb2.GetModelRequest())).model.features


async def test_fields_and_features_of_a_version_to_come_change_nothing(model: Path, expected: list[int]) -> None:
    def later(name: str, versions: dict[str, int]) -> Change:
        return with_fields(name, features=["grammar", "resume", "trace_context", "of_the_future"], **versions)

    frontend, engine = later("FrontendHello", {"max_version": 9}), later("EngineHello", {})
    scheduler, executor = later("LoadRequest", {"max_version": 1}), later("Loaded", {})

    def on_engine(message: Any) -> None:
        frontend(message)
        engine(message)

    def on_executor(message: Any) -> None:
        scheduler(message)
        executor(message)

    async with stack(model, engine=on_engine, executor=on_executor, future=True) as made:
        assert await made.ids() == expected
        hello: Any = next(m for m in made.engine.seen if told_by(m, "EngineHello") is not None)
        assert hello.hello.version == 1  # the highest that both speak


async def test_versions_that_do_not_meet_are_told_by_their_numbers(model: Path) -> None:
    ahead = with_fields("FrontendHello", min_version=8, max_version=9)
    async with stack(model, engine=ahead, attaches=False) as made:
        await until(lambda: any(told_by(m, "FrontendHello") for m in made.engine.seen))
        for _ in range(200):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await made.ids()
            if "8" in str(refused.value.details()):
                break
            await asyncio.sleep(0.02)
        assert reason(refused.value) == "NO_ENGINE"
        assert "version" in str(refused.value.details())


async def record() -> None:
    """Writes the hellos of this version's services."""
    with tempfile.TemporaryDirectory() as folder:
        async with stack(text_checkpoint(Path(folder))) as made:
            seen = [*made.engine.seen, *made.executor.seen]
    found = {name: next(one for m in seen if (one := told_by(m, name)) is not None) for name in HELLO_NAMES}
    HELLOS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(record())
