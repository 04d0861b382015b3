"""Rows S6, S7 and the frontend's side of X4: lengths and stops, at their edges."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format
from triptych.inference.v1 import inference_pb2

from tests.frontend.harness import Served, fields_at_fault, reason, scripted, serving, text_checkpoint, user
from tests.support.calls import (
    EVERY_CALL,
    STREAM_AND_UNARY,
    Answer,
    by_ids,
    by_text,
    call,
    generate,
    greedy,
    is_unary,
    place,
)

CONTEXT = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("limits") / "tiny-text")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    """A context of 32 tokens, and an engine that never stops by itself."""
    async with serving(model, scripted([50], context_tokens=CONTEXT)) as served:
        yield served


async def failure(running: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    return caught.value


@STREAM_AND_UNARY
async def test_S6_max_tokens_zero_is_answered_without_the_engine(served: Served, rpc: str) -> None:
    answer = await generate(served.channel, by_ids([10, 11], greedy(max_tokens=0, logprobs=0)), rpc=rpc)
    assert answer.reason == "LENGTH" and answer.ids == [] and answer.text == ""
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)
    assert answer.messages[0].HasField("prompt") and len(answer.messages) == (1 if is_unary(rpc) else 3)
    (choice,) = [choice for message in answer.messages for choice in message.choices]
    assert choice.cumulative_logprob == 0
    assert served.engine.submits == []
    assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)), rpc=rpc)).ids == [50]


def test_S6_a_negative_max_tokens_cannot_be_said() -> None:
    with pytest.raises(ValueError):
        inference_pb2.Options(max_tokens=-1)
    with pytest.raises(json_format.ParseError):
        json_format.Parse('{"max_tokens": -1}', inference_pb2.Options())


@STREAM_AND_UNARY
async def test_S6_an_empty_prompt_is_refused_and_the_server_serves_on(served: Served, rpc: str) -> None:
    empty = [
        (by_text("", greedy()), "text"),
        (by_ids([], greedy()), "token_ids"),
        (inference_pb2.GenerateRequest(options=greedy()), "prompt"),
    ]
    for request, field in empty:
        error = await failure(generate(served.channel, request, rpc=rpc))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [place(rpc, field)]
    for request in (by_text(" ", greedy(max_tokens=2)), by_ids([1], greedy(max_tokens=2))):  # the latter BOS alone
        assert len((await generate(served.channel, request, rpc=rpc)).ids) == 2


@STREAM_AND_UNARY
@pytest.mark.parametrize("max_tokens", [0, 1, None])
@pytest.mark.parametrize("prompt_tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
async def test_S7_prompt_and_max_tokens_fit_the_context_by_one_rule(
    served: Served, prompt_tokens: int, max_tokens: int | None, rpc: str
) -> None:
    options = greedy() if max_tokens is None else greedy(max_tokens=max_tokens)
    running = generate(served.channel, by_ids([10] * prompt_tokens, options), rpc=rpc)
    if prompt_tokens + (max_tokens or 0) <= CONTEXT:
        answer = await running
        expected = CONTEXT - prompt_tokens if max_tokens is None else max_tokens
        assert answer.reason == "LENGTH" and len(answer.ids) == expected
        assert answer.prompt.max_tokens == expected
    else:
        error = await failure(running)
        text = error.details() or ""
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"holds {CONTEXT}" in text and f"{prompt_tokens} tokens" in text
        wanted = "unset" if max_tokens is None else str(max_tokens)
        assert f"max_tokens {wanted}" in text or f"max_tokens: is {wanted}" in text
        too_long = prompt_tokens > CONTEXT
        assert fields_at_fault(error) == [place(rpc, "token_ids" if too_long else "options.max_tokens")]
        assert reason(error) == ("PROMPT_TOO_LONG" if too_long else "CONTEXT_EXCEEDED")
    assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]


async def sized(served: Served, rpc: str, count: int, options: inference_pb2.Options) -> Answer:
    """A call whose prompt, text or a chat, comes to `count` tokens; each digit is one."""
    if not rpc.startswith("Chat"):
        return await call(served.channel, rpc, by_text("1" * count, options))
    empty = await served.stub.Tokenize(
        inference_pb2.TokenizeRequest(chat=inference_pb2.ChatRequest(messages=[user("")]))
    )
    digits = count - len(empty.token_ids)
    return await call(served.channel, rpc, inference_pb2.ChatRequest(messages=[user("1" * digits)], options=options))


@EVERY_CALL
async def test_S7_the_rule_is_the_same_for_text_and_chat_streamed_or_not(served: Served, rpc: str) -> None:
    prompt_field = "messages" if rpc.startswith("Chat") else "text"
    for count in (CONTEXT - 1, CONTEXT, CONTEXT + 1):
        for max_tokens in (0, 1, None):
            options = greedy() if max_tokens is None else greedy(max_tokens=max_tokens)
            if count + (max_tokens or 0) <= CONTEXT:
                answer = await sized(served, rpc, count, options)
                expected = CONTEXT - count if max_tokens is None else max_tokens
                assert answer.reason == "LENGTH" and len(answer.ids) == expected
                assert answer.messages[-1].usage.prompt_tokens == count
                continue
            error = await failure(sized(served, rpc, count, options))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            too_long = count > CONTEXT
            assert fields_at_fault(error) == [place(rpc, prompt_field if too_long else "options.max_tokens")]
            assert f"{count} tokens" in (error.details() or "") and f"holds {CONTEXT}" in (error.details() or "")
    assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]


@EVERY_CALL
async def test_S6_max_tokens_zero_and_one_in_every_call(served: Served, rpc: str) -> None:
    for max_tokens in (0, 1):
        answer = await sized(served, rpc, CONTEXT - 4, greedy(max_tokens=max_tokens))
        assert answer.ids == [50] * max_tokens and answer.reason == "LENGTH"
        assert answer.messages[-1].usage.completion_tokens == max_tokens


@EVERY_CALL
async def test_S6_prompts_that_are_empty_blank_or_bos_alone_in_every_call(served: Served, rpc: str) -> None:
    options = greedy(max_tokens=2)
    chats = rpc.startswith("Chat")
    refused: list[tuple[Any, str]] = [
        (by_text("", options), "text"),
        (by_ids([], options), "token_ids"),
        (inference_pb2.GenerateRequest(), "prompt"),
    ]
    if chats:
        refused = [(inference_pb2.ChatRequest(options=options), "messages"), (inference_pb2.ChatRequest(), "messages")]
    for request, field in refused:
        error = await failure(call(served.channel, rpc, request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [place(rpc, field)]
    served_all: list[Any] = [by_text(" ", options), by_ids([1], options), by_text("<|im_start|>", options)]
    if chats:  # a turn without text is a turn all the same
        served_all = [inference_pb2.ChatRequest(messages=[user(text)], options=options) for text in ("", " ")]
    for request in served_all:
        answer = await call(served.channel, rpc, request)
        assert answer.ids == [50, 50] and (chats or answer.usage.prompt_tokens == 1)


async def test_an_empty_text_is_no_tokens_and_nothing_to_tokenize_is_refused(served: Served) -> None:
    tokenize = inference_pb2.TokenizeRequest
    for request, field in ((tokenize(chat=inference_pb2.ChatRequest()), "chat.messages"), (tokenize(), "input")):
        error = await failure(served.stub.Tokenize(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]
    assert not (await served.stub.Tokenize(tokenize(text=""))).token_ids


EOS = [2, 7, 9]


@pytest.fixture
def several_eos(tmp_path: Path) -> Path:
    path = text_checkpoint(tmp_path / "several")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return path


@STREAM_AND_UNARY
@pytest.mark.parametrize("eos", EOS)
async def test_X4_every_eos_id_stops(several_eos: Path, eos: int, rpc: str) -> None:
    async with serving(several_eos, scripted([50, eos, 60, 61])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(max_tokens=4)), rpc=rpc)
        assert answer.ids == [50, eos] and answer.finishes[0].eos_token_id == eos
        assert answer.usage.completion_tokens == 2
        described = await served.stub.GetModel(inference_pb2.GetModelRequest())
        assert list(described.model.eos_token_ids) == EOS


async def test_X4_ignore_eos_ignores_all_of_them_but_not_the_users_own_stops(several_eos: Path) -> None:
    script = [*EOS, 60, 61]
    async with serving(several_eos, scripted(script)) as served:
        ignoring = greedy(ignore_eos=True, max_tokens=5)
        assert (await generate(served.channel, by_ids([10], ignoring))).ids == script
        assert served.engine.submits[-1].stop_ids == b""
        stopping = greedy(ignore_eos=True, max_tokens=5, stop_token_ids=[60])
        answer = await generate(served.channel, by_ids([10], stopping))
        assert answer.ids == [*EOS, 60] and answer.finishes[0].stop_token_id == 60
        text = served.decode([60])
        answer = await generate(served.channel, by_ids([10], greedy(ignore_eos=True, max_tokens=5, stop=[text])))
        assert answer.finishes[0].stop_string == text and answer.ids == [*EOS, 60]


async def test_X4_the_users_own_stop_may_be_an_eos_id(several_eos: Path) -> None:
    async with serving(several_eos, scripted([50, 7, 60])) as served:
        options = greedy(ignore_eos=True, stop_token_ids=[7], max_tokens=3)
        assert (await generate(served.channel, by_ids([10], options))).finishes[0].stop_token_id == 7
        options = greedy(stop_token_ids=[60], max_tokens=3)
        await generate(served.channel, by_ids([10], options))
        sent = np.frombuffer(served.engine.submits[-1].stop_ids, "<u4").tolist()
        assert sent == sorted([*EOS, 60])
