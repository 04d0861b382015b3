"""The OpenAI API through the real SMG gateway, before a frontend with the adapter and a stub engine, with the `openai`
package as its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import common_pb2
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import inference_pb2

from loadtest.stub_engine import Faults, StubEngine
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import VOCAB_SIZE, Served, attached, serving, text_checkpoint, user
from tests.support.checkpoints import EOS_ID
from tests.support.smg import Gateway, gateway
from tests.support.vllm_calls import stub

MODEL = "tiny-text"
QUESTION = "Why is the sky blue?"
pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass
class Stack:
    """`script` is what the engine says next, again and again."""

    served: Served
    gateway: Gateway
    script: list[int]

    @property
    def engine(self) -> StubEngine:
        return self.served.engine

    def says(self, text: str, end: Sequence[int] = (EOS_ID,)) -> list[int]:
        """Makes every answer this text; its ids."""
        self.script[:] = [*self.served.ids(text), *end]
        return self.script

    async def chat(self, **options: Any) -> Any:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        return await self.gateway.client.chat.completions.create(**asked | options)

    async def complete(self, **options: Any) -> Any:
        asked = {"model": MODEL, "prompt": QUESTION, "temperature": 0}
        return await self.gateway.client.completions.create(**asked | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("gateway") / MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    script = [EOS_ID]
    engine = StubEngine(
        next_id=lambda prompt, position: script[position % len(script)],
        vocab_size=VOCAB_SIZE,
        context_tokens=1024,
        step_s=0.01,
    )
    log = tmp_path_factory.mktemp("smg") / "smg.log"
    # SMG forwards a trace context where it traces; nobody takes its own spans here.
    smg = ["--tool-call-parser", "qwen", "--enable-trace", "--otlp-traces-endpoint", "127.0.0.1:9"]
    smg += ["--disable-retries", "--disable-circuit-breaker"]
    async with serving(model, engine, vllm_adapter=True) as served:
        frontend = f"127.0.0.1:{served.frontend.server.port}"
        async with gateway(frontend, log, *smg) as found:
            await found.ready(MODEL)
            yield Stack(served, found, script)


async def test_the_model_is_listed_by_the_name_it_is_served_under(stack: Stack) -> None:
    assert [model.id for model in (await stack.gateway.client.models.list()).data] == [MODEL]


@pytest.mark.parametrize("max_tokens", [5, 100])
async def test_a_completion_is_the_same_streamed_and_not(stack: Stack, max_tokens: int) -> None:
    ids = stack.says("It scatters light, the short waves more than the long ones.")
    kept = ids[:max_tokens]
    whole = await stack.complete(max_tokens=max_tokens)
    (choice,) = whole.choices
    assert choice.text == stack.served.decode(kept)
    assert choice.finish_reason == ("stop" if max_tokens == 100 else "length")
    prompt = stack.served.ids(QUESTION)
    assert list(stack.engine.prompts[-1]) == prompt
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), len(kept))
    stream = await stack.complete(max_tokens=max_tokens, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(each.text for chunk in chunks for each in chunk.choices) == choice.text
    reasons = [each.finish_reason for chunk in chunks for each in chunk.choices if each.finish_reason]
    assert reasons == [choice.finish_reason]
    assert chunks[-1].usage.completion_tokens == len(kept) and len(chunks) > 3


async def test_a_chat_is_rendered_by_the_checkpoints_template_and_is_the_same_streamed_and_not(stack: Stack) -> None:
    ids = stack.says("Because of Rayleigh scattering 😀.")
    whole = await stack.chat()
    (choice,) = whole.choices
    assert choice.message.content == "Because of Rayleigh scattering 😀." and choice.finish_reason == "stop"
    asked = inference_pb2.TokenizeRequest(chat=inference_pb2.ChatRequest(messages=[user(QUESTION)]))
    own = (await stack.served.stub.Tokenize(asked)).token_ids
    assert list(stack.engine.prompts[-1]) == list(own)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(own), len(ids))
    stream = await stack.chat(stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices)
    assert text == choice.message.content
    assert [e.finish_reason for chunk in chunks for e in chunk.choices if e.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it_and_the_engines_work(stack: Stack, stream: bool) -> None:
    ids = stack.says("one two three four five six seven", end=())
    answer = await stack.chat(stop=["four"], stream=stream, max_tokens=500)
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices)
        reasons = [each.finish_reason for chunk in chunks for each in chunk.choices if each.finish_reason]
    else:
        text, reasons = answer.choices[0].message.content, [answer.choices[0].finish_reason]
        needed = next(n for n in range(len(ids)) if "four" in stack.served.decode(ids[:n]))
        assert answer.usage.completion_tokens == needed
    assert text == "one two three " and reasons == ["stop"]
    await stack.engine.wait_until(lambda engine: engine.num_running == 0)


async def test_choices_and_logprobs_reach_the_client(stack: Stack) -> None:
    ids = stack.says("abc", end=(60, 61))[:2]
    answer = await stack.chat(n=2, logprobs=True, top_logprobs=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 4
    told = answer.choices[0].logprobs.content
    # What the stub engine makes up: -(position + 1) / 8.
    assert [entry.logprob for entry in told] == [-1 / 8, -2 / 8]
    assert "".join(entry.token for entry in told) == stack.served.decode(ids)
    assert all(len(entry.top_logprobs) == 2 for entry in told)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateway_reads_tool_calls_out_of_the_text(stack: Stack, stream: bool) -> None:
    stack.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    answer = await stack.chat(tools=[WEATHER], stream=stream)
    if stream:
        deltas = [each for chunk in [chunk async for chunk in answer] for each in chunk.choices]
        calls = [call for each in deltas for call in each.delta.tool_calls or ()]
        names = [call.function.name for call in calls if call.function.name]
        arguments = "".join(call.function.arguments or "" for call in calls)
        reasons = [each.finish_reason for each in deltas if each.finish_reason]
    else:
        (choice,) = answer.choices
        names = [call.function.name for call in choice.message.tool_calls]
        arguments, reasons = choice.message.tool_calls[0].function.arguments, [choice.finish_reason]
    assert names == ["get_weather"] and json.loads(arguments) == {"city": "Paris"} and reasons == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_our_door_is_an_http_status_with_our_words(stack: Stack, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.complete(max_tokens=5000, stream=stream)
    assert "sampling_params.max_tokens: is 5000" in str(caught.value) and "the context holds 1024" in str(caught.value)
    asked = len(stack.engine.submits)
    with pytest.raises(openai.BadRequestError):
        await stack.complete(prompt="1" * 2000, stream=stream)
    assert len(stack.engine.submits) == asked


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_engine_is_an_http_status(
    stack: Stack, code: grpc.StatusCode, status: int, stream: bool
) -> None:
    failed = engine_pb2.Failed(code=code.value[0], reason="QUEUE_FULL", message="the engine's own words")
    stack.engine.faults = Faults(failed=failed)
    try:
        with pytest.raises(openai.APIStatusError) as caught:
            await stack.chat(stream=stream)
    finally:
        stack.engine.faults = Faults()
    assert caught.value.status_code == status and "the engine's own words" in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_what_its_request_held(stack: Stack, stream: bool) -> None:
    stack.says("on and on ", end=())
    asked = len(stack.engine.submits)
    call = asyncio.create_task(stack.chat(stream=stream, max_tokens=900))
    await stack.engine.wait_until(lambda engine: len(engine.submits) == asked + 1 and engine.num_running == 1)
    if stream:
        answer = await call
        await anext(aiter(answer))
        await answer.close()
    else:
        call.cancel()
    await stack.engine.wait_until(lambda engine: engine.num_running == 0)
    assert stack.engine.submits[-1].max_tokens == 900


async def test_one_trace_id_from_the_gateway_on(stack: Stack) -> None:
    stack.says("ok")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    await stack.chat(extra_headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"})
    version, told, parent, flags = stack.engine.submits[-1].traceparent.split("-")
    assert (version, told, flags) == ("00", trace_id, "01")
    assert parent != "00f067aa0ba902b7", "the parent is the gateway's own span"


async def test_a_gateway_elsewhere_that_starts_first_gets_model_and_tokenizer_from_the_frontend(tmp_path: Path) -> None:
    """The checkpoint's folder is not there for the gateway, and the engine not there yet for the frontend."""
    model = text_checkpoint(tmp_path / MODEL)
    engine = StubEngine(script=[50, EOS_ID], vocab_size=VOCAB_SIZE, context_tokens=1024)
    async with engine:  # for its port
        pass
    frontend = Frontend(FrontendConfig(port=0, engine=engine.address, model=str(model), vllm_adapter=True))
    await frontend.start()
    try:
        address = f"127.0.0.1:{frontend.server.port}"
        async with gateway(address, tmp_path / "smg.log", "--worker-startup-check-interval", "1") as found:
            async with grpc.aio.insecure_channel(address) as channel:  # it is made once, from now on
                assert [c async for c in stub(channel).GetTokenizer(common_pb2.GetTokenizerRequest())]
            model.rename(model.with_name("gone"))
            await asyncio.sleep(2)
            assert found.process.returncode is None
            await engine.start()
            await attached(frontend)
            await found.ready(MODEL)
            answer = await found.client.completions.create(model=MODEL, prompt="hi", temperature=0)
            assert answer.choices[0].text == frontend.model.tokenizer.decode([50], skip_special_tokens=True)
    finally:
        await frontend.close()
        await engine.stop()
