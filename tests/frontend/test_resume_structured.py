"""Streams of tool calls, reasoning and grammars that break anywhere and go on: a frontend, a real scheduler, an
executor that draws at random what masks allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2

from tests.frontend.harness import fields_at_fault
from tests.frontend.test_promised_calls import REQUIRED, TOOLS, engine
from tests.frontend.tool_models import Chat, asked, tool_checkpoint
from tests.support.broken import joined, resume_of

PERSON = '{"type": "object", "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}}, \
"required": ["name", "old"], "additionalProperties": false}'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return tool_checkpoint(tmp_path_factory.mktemp("structured") / "tiny-tools", special=marks)


async def streamed(call: Any, request: Any) -> list[Any]:
    return [message async for message in call(request, timeout=60)]


async def check_every_cut(call: Any, request: Any, every: int = 1) -> None:
    whole = await streamed(call, request)
    for cut in range(1, len(whole), every):
        again = type(request)()
        again.CopyFrom(request)
        again.options.resume.CopyFrom(resume_of(whole[:cut]))
        rest = await streamed(call, again)
        assert joined([*whole[:cut], *rest]) == joined(whole), f"after {cut} of {len(whole)} messages"
        assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens


@pytest.mark.parametrize("every", [20, pytest.param(2, marks=pytest.mark.slow)])
async def test_calls_go_on_in_the_middle_of_a_name_and_of_arguments(path: Path, every: int) -> None:
    async with engine(path) as stub:
        options = inference_pb2.Options(seed=3, max_tokens=300)
        request = Chat(messages=[asked()], tools=TOOLS, tool_choice=REQUIRED, options=options)
        request.template_args.update({"thinking": "off"})
        await check_every_cut(stub.Chat, request, every=every)


async def test_reasoning_goes_on(path: Path) -> None:
    async with engine(path) as stub:
        request = Chat(messages=[asked()], options=inference_pb2.Options(seed=1, max_tokens=24))
        request.template_args.update({"thinking": "open"})
        await check_every_cut(stub.Chat, request)


@pytest.mark.parametrize("thinking", ["open", "off"])
async def test_an_answer_held_to_a_grammar_is_text_though_the_prompt_opened_the_reasoning(
    path: Path, thinking: str
) -> None:
    async with engine(path) as stub:
        options = inference_pb2.Options(seed=5, max_tokens=120, grammar=generation_pb2.Grammar(json_schema=PERSON))
        request = Chat(messages=[asked()], options=options)
        request.template_args.update({"thinking": thinking})
        answer = await stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=request), timeout=60)
        (choice,) = answer.response.choices
        assert not choice.reasoning
        jsonschema.validate(json.loads(choice.text), json.loads(PERSON))
        await check_every_cut(stub.Chat, request, every=3)


@pytest.mark.parametrize(
    "grammar",
    [
        generation_pb2.Grammar(lark='start: "so " </think> "yes"'),
        generation_pb2.Grammar(
            structural_tags=generation_pb2.Grammar.StructuralTags(
                tags=[generation_pb2.Grammar.Tag(begin="<a>", json_schema='{"enum": [1]}', end="</a>")],
                required=True,
                text_until="</think>",
            )
        ),
    ],
    ids=["lark", "structural_tags"],
)
async def test_a_grammar_that_leaves_room_for_reasoning_has_it_told_apart(
    path: Path, grammar: generation_pb2.Grammar
) -> None:
    async with engine(path) as stub:
        options = inference_pb2.Options(seed=1, n=4, max_tokens=300, grammar=grammar)
        request = Chat(messages=[asked()], options=options)
        request.template_args.update({"thinking": "open"})
        answer = await stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=request), timeout=60)
        closed = [choice for choice in answer.response.choices if choice.text]
        assert closed, "some closed their reasoning before the length"
        for choice in closed:
            assert choice.reasoning and choice.text.startswith(("yes", "<a>")), choice


@pytest.mark.parametrize("forced", [False, True])
async def test_a_grammar_goes_on_with_the_ids_that_follow_without_being_drawn(path: Path, forced: bool) -> None:
    async with engine(path) as stub:
        grammar = generation_pb2.Grammar(json_schema=PERSON, forced_tokens=forced)
        options = inference_pb2.Options(seed=5, n=2, max_tokens=120, grammar=grammar)
        await check_every_cut(stub.Generate, inference_pb2.GenerateRequest(text="who?", options=options))


async def test_ids_that_the_grammar_does_not_allow_cannot_have_arrived(path: Path) -> None:
    async with engine(path) as stub:
        grammar = generation_pb2.Grammar(json_schema=PERSON)
        options = inference_pb2.Options(seed=5, max_tokens=120, grammar=grammar)
        request = inference_pb2.GenerateRequest(text="who?", options=options)
        whole = await streamed(stub.Generate, request)
        request.options.resume.CopyFrom(resume_of(whole[:3]))
        request.options.resume.choices[0].token_ids.reverse()
        request.options.resume.choices[0].text_bytes = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await streamed(stub.Generate, request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "has ids that its grammar does not allow" in (caught.value.details() or "")


async def test_the_likeliest_of_several_are_not_resumed_in_part(path: Path) -> None:
    async with engine(path) as stub:
        options = inference_pb2.Options(seed=5, n=2, best_of=3, max_tokens=5)
        request = inference_pb2.GenerateRequest(text="who?", options=options)
        whole = await streamed(stub.Generate, request)
        request.options.resume.CopyFrom(resume_of(whole[:1]))
        assert joined(await streamed(stub.Generate, request)) == joined(whole), "from the start, with its seed"
        request.options.resume.CopyFrom(resume_of(whole[:2]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await streamed(stub.Generate, request)
        assert fields_at_fault(caught.value) == ["options.resume.choices"]
