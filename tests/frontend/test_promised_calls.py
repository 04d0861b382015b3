"""Calls that a request promises: a frontend, a real scheduler, an executor that draws at random what masks allow."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.stub_executor import StubExecutor
from services.common.grammar_compiler import Compiler
from services.frontend import served_model, tool_grammar
from services.frontend.config import FrontendConfig
from services.frontend.conversation import Calling, Tool, ToolUse
from services.frontend.server import Frontend
from services.frontend.tool_calls.formats import FORMATS
from tests.frontend.harness import attached, fields_at_fault, scripted, serving
from tests.frontend.tool_models import Chat, asked, tool, tool_checkpoint
from tests.support.attached import scheduler_for
from tests.support.calls import chat
from tests.support.checkpoints import EOS_ID

Choice = inference_pb2.ToolChoice
REQUIRED = Choice(mode=Choice.MODE_REQUIRED)
CALLS = generation_pb2.FINISH_REASON_TOOL_CALLS
COLOUR = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
)
TOOLS = [tool("paint", COLOUR), tool("stop_now", "")]
SCHEMAS = {"paint": json.loads(COLOUR), "stop_now": {"type": "object", "maxProperties": 0}}


@asynccontextmanager
async def engine(model: Path, **config: Any) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """A whole engine but for the model."""
    async with StubExecutor(max_in_flight=2) as executor, scheduler_for(executor, model) as scheduler:
        address = f"127.0.0.1:{scheduler.server.port}"
        frontend = Frontend(FrontendConfig(port=0, engine=address, model=str(model), **config))
        await frontend.start()
        try:
            await attached(frontend)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
                yield inference_pb2_grpc.InferenceServiceStub(channel)
        finally:
            await frontend.close()


async def answers(stub: inference_pb2_grpc.InferenceServiceAsyncStub, **fields: Any) -> list[inference_pb2.Choice]:
    """Of several seeds."""
    found = []
    for seed in range(2):
        options = inference_pb2.Options(seed=seed, n=2, max_tokens=300)
        request = Chat(**{"messages": [asked()], "tools": TOOLS, "options": options} | fields)
        answer = await stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=request), timeout=120)
        found += answer.response.choices
    return found


def check(choice: inference_pb2.Choice) -> None:
    """Every whole call keeps to its tool's schema; whoever draws at random may go on calling to the length."""
    if choice.finish.reason == generation_pb2.FINISH_REASON_LENGTH:
        choice.text = ""
        del choice.tool_calls[-1:]
    else:
        assert choice.finish.reason == CALLS, choice
    for made in choice.tool_calls:
        jsonschema.validate(json.loads(made.arguments), SCHEMAS[made.name])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_checkpoint(tmp_path_factory.mktemp("promised") / "tiny-tools", plain=("<tool_call>", "</tool_call>"))


FAST = ("hermes", "llama3_json", "mistral_v11", "deepseek_v3")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in FAST else pytest.mark.slow) for form in sorted(FORMATS)]
)
async def test_required_calls_are_calls_whatever_the_model_would_write(tmp_path: Path, form: str) -> None:
    special = FORMATS[form].marks
    model = tool_checkpoint(tmp_path / "m", special=special)
    async with engine(model, tool_call_format=form, reasoning_format="none") as stub:
        found = await answers(stub, tool_choice=REQUIRED)
        for choice in found:
            check(choice)
            assert choice.tool_calls and not choice.text.strip()
        assert {made.name for choice in found for made in choice.tool_calls} == {"paint", "stop_now"}
        for choice in await answers(stub, tool_choice=Choice(name="paint")):
            check(choice)
            assert [made.name for made in choice.tool_calls] == ["paint"]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_strict_tool_that_the_model_chooses_to_call_is_called_by_its_schema(tmp_path: Path, form: str) -> None:
    """Free text, the model's own way of a call, and from there on its schema and nothing else."""
    model = tool_checkpoint(tmp_path / "m", special=FORMATS[form].marks)
    use = ToolUse((Tool("paint", "", json.loads(COLOUR), strict=True),), Calling.AUTO)
    matcher = Compiler(model, (EOS_ID,)).compile(tool_grammar.make(use, FORMATS[form]))
    encode = served_model.load(str(model), None).tokenizer.backend.encode
    span = FORMATS[form].span("paint")

    def allowed(text: str) -> bool:
        ids = encode(text, add_special_tokens=False).ids
        return bool(matcher.deep_copy().validate_tokens(ids) == len(ids))

    right = '{"colour": "red", "n": 7}'
    assert allowed("I paint.") and allowed(f"{span.begin}{right}{span.end}")
    assert allowed(f"I paint. {span.begin}{right}{span.end}{span.begin}{right}{span.end}")
    for wrong in ('{"colour": "green"', '{"n": 700', '{"colour": "red"}', '{"what"'):
        assert not allowed(f"I paint. {span.begin}{wrong}")


async def test_without_parallel_calls_there_is_exactly_one_where_one_is_required(path: Path) -> None:
    async with engine(path, reasoning_format="none") as stub:
        for choice in await answers(stub, tool_choice=REQUIRED, parallel_tool_calls=False):
            check(choice)
            assert len(choice.tool_calls) == 1


async def test_reasoning_comes_first_where_the_prompt_has_opened_it(tmp_path: Path) -> None:
    model = tool_checkpoint(tmp_path / "m", special=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    async with engine(model) as stub:
        found = await answers(stub, tool_choice=REQUIRED, template_args={"thinking": "open"})
        thought = [choice for choice in found if choice.tool_calls]
        assert thought, "some ended their reasoning before the length"
        for choice in thought:
            check(choice)
            assert choice.reasoning and not choice.text.strip()
        for choice in await answers(stub, tool_choice=REQUIRED, template_args={"thinking": "off"}):
            check(choice)
            assert not choice.reasoning


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": REQUIRED, "tools": [tool(), tool("t", '{"not": {"type": "null"}}')]}, None),
        ({"tools": [tool(), tool("t", '{"type": "object", "properties": {"a": {"type": "x"}}}', strict=True)]}, None),
    ],
)
async def test_a_schema_that_cannot_be_held_is_refused_by_its_own_name(
    path: Path, fields: dict[str, Any], field: str | None
) -> None:
    async with serving(path, scripted([50, EOS_ID])) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat(served.channel, Chat(messages=[asked()], **fields))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_at_fault(caught.value) == ["tools[1].parameters_json_schema"]
        assert served.engine.submits == []


async def test_what_a_promise_contradicts_is_refused(path: Path) -> None:
    grammar = generation_pb2.Grammar(regex="a")
    async with serving(path, scripted([50, EOS_ID])) as served:
        for options, field in (({"grammar": grammar}, "options.grammar"), ({"ignore_eos": True}, "options.ignore_eos")):
            request = Chat(messages=[asked()], tools=[tool()], tool_choice=REQUIRED)
            request.options.MergeFrom(inference_pb2.Options(**options))
            with pytest.raises(grpc.aio.AioRpcError, match="tool_choice") as caught:
                await chat(served.channel, request)
            assert fields_at_fault(caught.value) == [field]
        beside = Chat(messages=[asked()], tools=[tool()], options=inference_pb2.Options(grammar=grammar, max_tokens=1))
        await chat(served.channel, beside)
        assert served.engine.submits[-1].grammar == grammar


async def test_the_engine_is_told_the_grammar_of_the_format(path: Path) -> None:
    async with serving(path, scripted([50, EOS_ID])) as served:
        request = Chat(messages=[asked()], tools=[tool(), tool("now", "", strict=True)])
        await chat(served.channel, request)
        tags = served.engine.submits[-1].grammar.structural_tags
        assert not tags.required and not tags.single and [tag.trigger for tag in tags.tags] == ["<tool_call>"] * 2
        assert json.loads(tags.tags[0].json_schema) == {"type": "object"}
        request = Chat(messages=[asked()], tools=[tool()])
        await chat(served.channel, request)
        assert not served.engine.submits[-1].HasField("grammar")
