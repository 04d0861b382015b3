"""The line of each request: its accounting, for every way in which a request can end."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import inference_pb2

from loadtest.stub_engine import Faults
from services.common import audit
from services.frontend import request_log
from tests.frontend.harness import Served, scripted, serving, user
from tests.support import vllm_calls
from tests.support.attached import until
from tests.support.calls import by_ids, by_text, generate, greedy
from tests.support.checkpoints import EOS_ID

SERVICE = "triptych.inference.v1.InferenceService"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


NAMES = re.compile(r"`([a-z_]+)`")


class Lines:
    """The fields of the lines so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog

    @property
    def all(self) -> list[dict[str, Any]]:
        records = [record for record in self._caplog.records if record.name == request_log.__name__]
        assert {record.levelno for record in records} <= {logging.INFO}
        return [record.fields for record in records]  # type: ignore[attr-defined]

    @property
    def one(self) -> dict[str, Any]:
        (line,) = self.all
        return line

    async def come(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(self.all) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return Lines(caplog)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_a_finished_request_is_accounted_for_as_its_client_was_told(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50, 51, 52, EOS_ID])) as served:
        prompt = list(range(10, 50))
        for _ in range(2):  # the second finds two blocks of 16 in the engine's cache
            request = by_ids(prompt, greedy(label="batch 7", seed=1))
            metadata = (("triptych-tenant", "acme"), ("traceparent", f"00-{TRACE}-{SPAN}-01"))
            answer = await generate(served.channel, request, metadata=metadata)
        line = lines.all[1]
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (
            answer.usage.prompt_tokens,
            answer.usage.cached_tokens,
            answer.usage.completion_tokens,
        )
        assert answer.usage.cached_tokens == 32
        assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["duration_s"] < 60
        assert line["request_id"] != lines.all[0]["request_id"]
        told = {key: value for key, value in line.items() if not key.endswith(("_s", "_tokens"))}
        assert told == {
            "request_id": line["request_id"],
            "trace_id": TRACE,
            "span_id": SPAN,
            "method": f"{SERVICE}/Generate",
            "model": served.frontend.model.name,
            "peer": line["peer"],
            "tenant": "acme",
            "label": "batch 7",
            "status": "OK",
            "engine_id": served.frontend.engine.facts and served.frontend.engine.facts.engine_id,
            "choices": 1,
            "finish_reasons": {"stop": 1},
        }
        assert line["peer"].startswith("ipv4:127.0.0.1:")


def test_the_documentation_names_each_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    table = page.split("### One line a request")[1].split("###")[0]
    named = {
        name for line in table.splitlines() if line.startswith("| `") for name in NAMES.findall(line.split("|")[1])
    }
    source = Path(request_log.__file__).read_text()
    told = set(re.findall(r'"([a-z_]+)":', source))
    assert named == told - {"fields"} and {"request_id", "ttft_s"} <= named


async def test_the_id_of_the_line_is_the_one_the_client_was_told(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50, EOS_ID])) as served:
        call = served.stub.Generate(by_ids([10], greedy()))
        assert (await call.initial_metadata())["triptych-request-id"]
        async for _ in call:
            pass
        assert lines.one["request_id"] == (await call.initial_metadata())["triptych-request-id"]


async def test_each_choice_is_counted_with_what_ended_it(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50, 51, EOS_ID])) as served:  # choice 1 draws ids one higher: no EOS
        answer = await generate(served.channel, by_ids([10], greedy(n=2, max_tokens=5)))
        assert lines.one["finish_reasons"] == {"stop": 1, "length": 1}
        assert lines.one["choices"] == 2
        assert lines.one["output_tokens"] == answer.usage.completion_tokens == 8


@pytest.mark.parametrize("method", ["GenerateUnary", "Chat", "ChatUnary", "Tokenize", "Detokenize"])
async def test_every_method_that_works_has_its_line(text_model: Path, lines: Lines, method: str) -> None:
    options = greedy(max_tokens=1, label="mine")
    chat = inference_pb2.ChatRequest(messages=[user("hi")], options=options)
    requests = {
        "GenerateUnary": inference_pb2.GenerateUnaryRequest(request=by_ids([10], options)),
        "Chat": chat,
        "ChatUnary": inference_pb2.ChatUnaryRequest(request=chat),
        "Tokenize": inference_pb2.TokenizeRequest(text="hello"),
        "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[50]),
    }
    async with serving(text_model, scripted([50, EOS_ID])) as served:
        call = getattr(served.stub, method)(requests[method])
        if method == "Chat":
            async for _ in call:
                pass
        else:
            await call
        assert (lines.one["method"], lines.one["status"]) == (f"{SERVICE}/{method}", "OK")
        if "okenize" not in method:
            assert (lines.one["label"], lines.one["output_tokens"]) == ("mine", 1)


async def test_calls_that_only_ask_have_none(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, vllm_adapter=True) as served:
        await served.stub.GetModel(inference_pb2.GetModelRequest())
        await served.stub.ListModels(inference_pb2.ListModelsRequest())
        await vllm_calls.stub(served.channel).HealthCheck(pb.HealthCheckRequest())
        assert lines.all == []


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (greedy(adapter="a"), "UNIMPLEMENTED", "FIELD_NOT_SERVED"),
        (greedy(max_tokens=10**6), "INVALID_ARGUMENT", "CONTEXT_EXCEEDED"),
        (greedy(label="x" * 100_000), "INVALID_ARGUMENT", "INVALID_FIELD"),
    ],
)
async def test_a_refusal_at_the_door_says_why(
    text_model: Path, lines: Lines, options: inference_pb2.Options, code: str, reason: str
) -> None:
    async with serving(text_model) as served:
        await code_of(generate(served.channel, by_ids([10], options)))
        line = lines.one
        assert (line["status"], line["reason"]) == (code, reason)
        assert line["error"] and line["request_id"]
        assert "output_tokens" not in line
        assert len(line.get("label", "")) <= request_log.LABEL_CHARS


async def test_a_call_while_the_frontend_drains_is_told(text_model: Path, lines: Lines) -> None:
    async with serving(text_model) as served:
        served.frontend.calls.close()
        await code_of(generate(served.channel, by_ids([10], greedy())))
        assert (lines.one["status"], lines.one["reason"]) == ("UNAVAILABLE", "DRAINING")


async def test_an_answer_that_fits_no_message_is_no_ok(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50]), max_message_bytes=4096, max_prompt_bytes=1024) as served:
        request = inference_pb2.GenerateUnaryRequest(request=by_ids([10], greedy(max_tokens=900, logprobs=0)))
        assert await code_of(served.stub.GenerateUnary(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        line = lines.one
        assert (line["status"], line["reason"]) == ("RESOURCE_EXHAUSTED", "ANSWER_TOO_LARGE")
        assert line["output_tokens"] == 900


async def test_what_the_engine_says_of_a_failure_is_told_with_what_came_before_it(
    text_model: Path, lines: Lines
) -> None:
    failed = engine_pb2.Failed(code=14, reason="EXECUTOR_LOST", message="it is gone")
    async with serving(text_model, scripted([50], faults=Faults(failed=failed, failed_at=3))) as served:
        await code_of(generate(served.channel, by_ids([10], greedy())))
        line = lines.one
        assert (line["status"], line["reason"], line["error"]) == ("UNAVAILABLE", "EXECUTOR_LOST", "it is gone")
        assert (line["output_tokens"], line["finish_reasons"]) == (3, {})


async def test_an_exception_nobody_expects_is_internal(
    text_model: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(text_model) as served:
        monkeypatch.setattr(served.frontend.engine, "require", lambda: 1 / 0)
        await code_of(generate(served.channel, by_ids([10], greedy())))
        assert lines.one["status"] == "INTERNAL"


async def test_a_cancelled_request_is_told_once_with_what_it_had(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50], context_tokens=2**30, step_s=0.01)) as served:
        stream = served.stub.Generate(by_ids([10], greedy(label="left")))
        for _ in range(4):
            await stream.read()
        stream.cancel()
        await lines.come()
        await asyncio.wait_for(served.frontend.drain(), 5)
        line = lines.one
        assert (line["status"], line["label"]) == ("CANCELLED", "left")
        assert line["output_tokens"] >= 2 and line["finish_reasons"] == {} and "error" not in line


async def test_a_client_that_left_without_reading_is_told_at_once(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50], context_tokens=2**30)) as served:
        stream = served.stub.Generate(by_ids([10], greedy(logprobs=0)))
        await stream.read()
        await asyncio.sleep(1.0)  # the stream's window is full: the handler waits to write
        stream.cancel()
        await lines.come()
        assert lines.one["status"] == "CANCELLED"


async def test_a_deadline_is_told_apart_from_a_cancel(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50], faults=Faults(silent=True))) as served:
        code = await code_of(generate(served.channel, by_ids([10], greedy()), timeout_s=0.3))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await lines.come()
        line = lines.one
        assert line["status"] == "DEADLINE_EXCEEDED"
        assert (line["output_tokens"], line["ttft_s"], line["queue_s"]) == (0, None, None)


async def test_a_resumed_request_counts_all_its_ids(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50, 51, 52, EOS_ID])) as served:
        first = await generate(served.channel, by_ids([10], greedy(seed=1)))
        received = inference_pb2.Resume.Received(index=0, token_ids=[50, 51], text_bytes=len(served.decode([50, 51])))
        resume = inference_pb2.Resume(seed=1, fingerprint=first.prompt.fingerprint, choices=[received])
        await generate(served.channel, by_ids([10], greedy(seed=1, resume=resume)))
        assert [line["output_tokens"] for line in lines.all] == [4, 4]


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("by_adapter", [False, True])
async def test_of_two_engines_the_line_names_the_one_that_had_the_request_last(
    text_model: Path, lines: Lines, is_lost: bool, by_adapter: bool
) -> None:
    engines = [scripted([50], context_tokens=2**20, step_s=0.005) for _ in range(2)]
    async with (
        engines[1],
        serving(
            text_model, engines[0], more_engines=(engines[1].address,), failover_s=20.0, vllm_adapter=by_adapter
        ) as served,
    ):
        members = {member.client.target: member.client for member in served.frontend.engine._members}
        await until(lambda: all(client.can_generate() for client in members.values()))
        calls = [ask(served, by_adapter, prompt) for prompt in range(10, 14)]
        await until(lambda: sum(engine.num_running for engine in engines) == 4)
        begun = {engine: engine.num_running for engine in engines}
        assert min(begun.values()) > 0, "each has some of them"
        if is_lost:
            await engines[0].stop()
            begun = {engines[0]: 0, engines[1]: 4}
        await asyncio.gather(*calls)
        ids = [line["engine_id"] for line in lines.all]
        assert [ids.count(engine.engine_id) for engine in engines] == [*begun.values()]


def ask(served: Served, by_adapter: bool, prompt: int) -> asyncio.Future[Any]:
    """A request that takes a second or more."""
    if by_adapter:
        return asyncio.ensure_future(
            vllm_calls.generate(served.channel, vllm_calls.by_ids([prompt], stream=True, max_tokens=200))
        )
    return asyncio.ensure_future(generate(served.channel, by_ids([prompt], greedy(max_tokens=200))))


async def test_a_request_that_no_engine_was_asked_for_names_none(text_model: Path, lines: Lines) -> None:
    async with serving(text_model) as served:
        await generate(served.channel, by_ids([10], greedy(max_tokens=0)))
        assert lines.one["prompt_tokens"] == 1 and "engine_id" not in lines.one


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_of_the_adapter_has_the_same_line(text_model: Path, lines: Lines, stream: bool) -> None:
    async with serving(text_model, scripted([50, 51, EOS_ID]), vllm_adapter=True) as served:
        request = vllm_calls.by_ids([10, 11], stream=stream, request_id="chatcmpl-7")
        await vllm_calls.generate(served.channel, request)
        line = lines.one
        assert (line["method"], line["label"], line["status"]) == (
            "vllm.grpc.engine.VllmEngine/Generate",
            "chatcmpl-7",
            "OK",
        )
        assert (line["prompt_tokens"], line["output_tokens"], line["finish_reasons"]) == (2, 3, {"stop": 1})


async def test_a_refusal_and_an_abort_of_the_adapter_are_told(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50], step_s=0.01, context_tokens=2**30), vllm_adapter=True) as served:
        await code_of(vllm_calls.generate(served.channel, vllm_calls.by_ids([10], top_p=7.0)))
        assert (lines.all[0]["status"], "sampling_params" in lines.all[0]["error"]) == ("INVALID_ARGUMENT", True)
        running = asyncio.ensure_future(
            vllm_calls.generate(served.channel, vllm_calls.by_ids([10], stream=True, request_id="a"))
        )
        await served.engine.wait_until(lambda engine: engine.num_running == 1)
        await vllm_calls.stub(served.channel).Abort(pb.AbortRequest(request_ids=["a"]))
        await running
        assert (lines.all[1]["status"], lines.all[1]["finish_reasons"]) == ("OK", {"abort": 1})


async def test_without_log_requests_there_is_no_line(text_model: Path, lines: Lines) -> None:
    async with serving(text_model, scripted([50, EOS_ID]), log_requests=False) as served:
        await generate(served.channel, by_text("hi", greedy()))
        await code_of(generate(served.channel, by_ids([10], greedy(adapter="a"))))
        assert lines.all == []


async def test_a_flush_by_the_adapter_is_told_as_an_admin_call(
    text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stub engine has no AdminService: the call fails, and is told all the same."""
    caplog.handler.setLevel(logging.NOTSET)
    async with serving(text_model, vllm_adapter=True) as served:
        await code_of(vllm_calls.stub(served.channel).FlushCache(common_pb2.FlushCacheRequest(timeout_s=0)))
    (told,) = [record.fields for record in caplog.records if record.name == audit.__name__]  # type: ignore[attr-defined]
    assert (told["method"], told["reason"]) == ("FlushCache", "ENGINE_ADMIN")
    assert told["peer"].startswith("ipv4:127.0.0.1:")
