"""The adapter's Abort, health, reflection and facts, against a stub engine."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer
from triptych.engine.v1 import engine_pb2

from loadtest.stub_engine import Faults
from services.common.errors import StartError
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import Served, attached, reason, scripted, serving, text_checkpoint
from tests.support.checkpoints import EOS_ID
from tests.support.vllm_calls import by_ids, failure, generate, stub
from tests.support.vllm_stack import until

NAME = "vllm.grpc.engine.VllmEngine"


@pytest.fixture
async def served(text_model: Path) -> AsyncIterator[Served]:
    async with serving(text_model, scripted([50], step_s=0.005), vllm_adapter=True) as served:
        yield served


# -- abort


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_call_ends_with_what_it_has_and_frees_the_engine(served: Served, stream: bool) -> None:
    call = asyncio.create_task(generate(served.channel, by_ids([10], stream=stream, request_id="a", n=2)))
    await served.engine.wait_until(lambda engine: engine.num_running == 2)
    await asyncio.sleep(0.05)
    await stub(served.channel).Abort(pb.AbortRequest(request_ids=["a"]))
    reply = await asyncio.wait_for(call, 5)
    assert [complete.finish_reason for complete in reply.completes] == ["abort", "abort"]
    for complete in reply.completes:
        ids = list(complete.output_ids)
        assert ids and set(ids) == {50 + complete.index}
        assert reply.streamed(complete.index) == (ids if stream else [])
    await served.engine.wait_until(lambda engine: engine.num_running == 0)


async def test_an_abort_tells_the_engine_though_a_slow_client_holds_up_the_answer(text_model: Path) -> None:
    engine = scripted([50], context_tokens=200_000, ids_per_step=512)
    async with serving(text_model, engine, vllm_adapter=True) as served:
        call = stub(served.channel).Generate(by_ids([10], stream=True, request_id="slow", ignore_eos=True))
        await call.read()  # and never again
        await asyncio.sleep(0.3)
        await stub(served.channel).Abort(pb.AbortRequest(request_ids=["slow"]))
        await served.engine.wait_until(lambda engine: engine.num_running == 0 and len(engine.aborts) == 1)
        call.cancel()


async def test_a_call_that_is_aborted_before_the_engine_has_it_never_gets_there(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.frontend.adapters.vllm.aborts import RunningCalls

    entered = RunningCalls.entered

    def aborted_at_once(self: RunningCalls, request_id: str, owner: str) -> Any:
        found = entered(self, request_id, owner)

        class Entered:
            def __enter__(self) -> Any:
                call = found.__enter__()
                call.abort()
                return call

            def __exit__(self, *exit: Any) -> Any:
                return found.__exit__(*exit)

        return Entered()

    monkeypatch.setattr(RunningCalls, "entered", aborted_at_once)
    reply = await generate(served.channel, by_ids([10], request_id="a"))
    assert reply.complete.finish_reason == "abort" and reply.ids == [] and served.engine.submits == []


# -- health and reflection


async def test_health_says_whether_a_token_can_be_made_and_why_not(served: Served) -> None:
    async def health() -> pb.HealthCheckResponse:
        answer: pb.HealthCheckResponse = await stub(served.channel).HealthCheck(pb.HealthCheckRequest())
        return answer

    assert (await health()).healthy
    for state, words in (
        (engine_pb2.ENGINE_STATE_RECOVERING, "recovering"),
        (engine_pb2.ENGINE_STATE_DRAINING, "draining"),
    ):
        served.engine.set_state(state)
        answer = await until(health, lambda answer: not answer.healthy)
        assert words in answer.message
        served.engine.set_state(engine_pb2.ENGINE_STATE_SERVING)
        await attached(served.frontend)
    served.frontend.calls.close()
    assert not (await health()).healthy and "shutting down" in (await health()).message


async def test_stock_health_and_reflection_know_the_adapters_service(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    served.engine.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
    async for change in health.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=10):
        if change.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            break
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for told in reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(iter([ask])):
        assert NAME in [service.name for service in told.list_services_response.service]


# -- facts


async def test_model_info_tells_what_a_gateway_needs(tmp_path: Path) -> None:
    model = text_checkpoint(tmp_path / "m", generation={"temperature": 0.5, "top_k": 20, "top_p": 1.0})
    config = json.loads((model / "config.json").read_text())
    extra = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "pad_token_id": None}
    (model / "config.json").write_text(json.dumps(config | extra))
    async with serving(model, vllm_adapter=True, served_model_name="the-name") as served:
        info = await stub(served.channel).GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model_path=str(model),
        tokenizer_path=str(model),
        is_generation=True,
        max_context_length=1024,
        max_req_input_len=1024,
        vocab_size=512,
        served_model_name="the-name",
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[EOS_ID],
        bos_token_id=1,
        default_sampling_params_json='{"temperature":0.5,"top_k":20}',
    )


async def test_facts_are_unavailable_until_an_engine_has_told_them(text_model: Path) -> None:
    frontend = Frontend(FrontendConfig(port=0, engine="127.0.0.1:9", model=str(text_model), vllm_adapter=True))
    await frontend.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
            for call in (
                stub(channel).GetModelInfo(pb.GetModelInfoRequest()),
                stub(channel).HealthCheck(pb.HealthCheckRequest()),  # so that a gateway waits, and then asks the others
                stub(channel).GetLoads(pb.GetLoadsRequest()),
                stub(channel).FlushCache(common_pb2.FlushCacheRequest()),
                stub(channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
                generate(channel, by_ids([10])),
            ):
                error = await failure(call)
                assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "NO_ENGINE"
                assert "127.0.0.1:9" not in (error.details() or "")
    finally:
        await frontend.close()


async def test_server_info_counts_the_calls_that_run(served: Served) -> None:
    async def info() -> pb.GetServerInfoResponse:
        answer: pb.GetServerInfoResponse = await stub(served.channel).GetServerInfo(pb.GetServerInfoRequest())
        return answer

    before = await info()
    assert (before.active_requests, before.last_receive_timestamp, before.server_type) == (0, 0, "vllm-grpc")
    assert (before.data_parallel_size, before.block_size, before.is_paused) == (1, 16, False)
    call = asyncio.create_task(generate(served.channel, by_ids([10])))
    await served.engine.wait_until(lambda engine: engine.num_running == 1)
    during = await info()
    assert during.active_requests == 1 and during.last_receive_timestamp > 0
    assert during.uptime_seconds > before.uptime_seconds > 0
    call.cancel()


async def test_the_tokenizers_files_come_as_an_archive_that_works(served: Served, text_model: Path) -> None:
    archives = []
    for _ in range(2):
        chunks = [c async for c in stub(served.channel).GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        archives.append(b"".join(chunk.data for chunk in chunks))
        assert hashlib.sha256(archives[-1]).hexdigest() == chunks[-1].sha256
    assert archives[0] == archives[1]
    with zipfile.ZipFile(io.BytesIO(archives[0])) as archive:
        names = set(archive.namelist())
        assert {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"} <= names
        assert not [name for name in names if name.endswith((".safetensors", ".bin"))]
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
        assert archive.read("tokenizer_config.json") == (text_model / "tokenizer_config.json").read_bytes()
    assert tokenizer.encode("hello there", add_special_tokens=False).ids == served.ids("hello there")


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", pb.EmbedRequest(request_id="a")),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_what_is_not_served_says_so_by_its_name(served: Served, method: str, request_: Any) -> None:
    error = await failure(getattr(stub(served.channel), method)(request_))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED and method in (error.details() or "")


def test_without_the_package_the_start_names_the_extra(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("services.frontend.adapters")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    config = FrontendConfig(port=0, model=str(text_model), vllm_adapter=True)

    async def make() -> None:
        Frontend(config)

    with pytest.raises(StartError, match=r"vllm_adapter is on.*pip install 'triptych\[vllm-adapter\]'.*smg_grpc_proto"):
        asyncio.run(make())


def test_a_frontend_without_the_switch_imports_nothing_of_the_adapter() -> None:
    code = (
        "import sys, services.frontend.main; print([n for n in sys.modules if 'frontend.adapters' in n or 'smg' in n])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


async def test_a_silent_engine_does_not_hold_up_an_abort(text_model: Path) -> None:
    async with serving(text_model, scripted([50], faults=Faults(silent=True)), vllm_adapter=True) as served:
        call = asyncio.create_task(generate(served.channel, by_ids([10], request_id="a")))
        await served.engine.wait_until(lambda engine: len(engine.submits) == 1)
        await stub(served.channel).Abort(pb.AbortRequest(request_ids=["a"]))
        assert (await asyncio.wait_for(call, 5)).complete.finish_reason == "abort"
