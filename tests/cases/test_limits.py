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
from tests.support.calls import Answer, by_ids, by_text, chat, generate, greedy

CONTEXT = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("limits") / "tiny-text")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    """A context of 32 tokens, and an engine that never stops by itself."""
    async with serving(model, scripted([50], context_tokens=CONTEXT)) as served:
        yield served


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_S6_max_tokens_zero_is_answered_without_the_engine(served: Served) -> None:
    answer = await generate(served.channel, by_ids([10, 11], greedy(max_tokens=0, logprobs=0)))
    assert answer.reason == "LENGTH" and answer.ids == [] and answer.text == ""
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)
    assert len(answer.messages) == 3 and answer.messages[0].HasField("prompt")
    assert answer.messages[1].choices[0].cumulative_logprob == 0
    assert served.engine.submits == []
    assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]


def test_S6_a_negative_max_tokens_cannot_be_said() -> None:
    with pytest.raises(ValueError):
        inference_pb2.Options(max_tokens=-1)
    with pytest.raises(json_format.ParseError):
        json_format.Parse('{"max_tokens": -1}', inference_pb2.Options())


async def test_S6_an_empty_prompt_is_refused_and_the_server_serves_on(served: Served) -> None:
    empty = [
        (by_text("", greedy()), "text"),
        (by_ids([], greedy()), "token_ids"),
        (inference_pb2.GenerateRequest(options=greedy()), "prompt"),
    ]
    for request, field in empty:
        error = await failure(generate(served.channel, request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]
    assert len((await generate(served.channel, by_text(" ", greedy(max_tokens=2)))).ids) == 2
    assert len((await generate(served.channel, by_ids([1], greedy(max_tokens=2)))).ids) == 2  # BOS alone


@pytest.mark.parametrize("max_tokens", [0, 1, None])
@pytest.mark.parametrize("prompt_tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
async def test_S7_prompt_and_max_tokens_fit_the_context_by_one_rule(
    served: Served, prompt_tokens: int, max_tokens: int | None
) -> None:
    options = greedy() if max_tokens is None else greedy(max_tokens=max_tokens)
    call = generate(served.channel, by_ids([10] * prompt_tokens, options))
    if prompt_tokens + (max_tokens or 0) <= CONTEXT:
        answer = await call
        expected = CONTEXT - prompt_tokens if max_tokens is None else max_tokens
        assert answer.reason == "LENGTH" and len(answer.ids) == expected
        assert answer.prompt.max_tokens == expected
    else:
        error = await failure(call)
        text = error.details() or ""
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"holds {CONTEXT}" in text and f"{prompt_tokens} tokens" in text
        wanted = "unset" if max_tokens is None else str(max_tokens)
        assert f"max_tokens {wanted}" in text or f"max_tokens: is {wanted}" in text
        too_long = prompt_tokens > CONTEXT
        assert fields_at_fault(error) == ["token_ids" if too_long else "options.max_tokens"]
        assert reason(error) == ("PROMPT_TOO_LONG" if too_long else "CONTEXT_EXCEEDED")
    assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]


async def ask(served: Served, kind: str, count: int, options: inference_pb2.Options) -> Answer:
    """A prompt of `count` tokens by text or chat, streamed or not; each digit is one token."""
    if kind.startswith("text"):
        request = by_text("1" * count, options)
        if kind == "text":
            return await generate(served.channel, request)
        wrapped = inference_pb2.GenerateUnaryRequest(request=request)
        return Answer([(await served.stub.GenerateUnary(wrapped)).response])
    empty = await served.stub.Tokenize(
        inference_pb2.TokenizeRequest(chat=inference_pb2.ChatRequest(messages=[user("")]))
    )
    digits = count - len(empty.token_ids)
    asked = inference_pb2.ChatRequest(messages=[user("1" * digits)], options=options)
    if kind == "chat":
        return await chat(served.channel, asked)
    return Answer([(await served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=asked))).response])


KINDS = {
    "text": ("text", "options"),
    "text unary": ("request.text", "request.options"),
    "chat": ("messages", "options"),
    "chat unary": ("request.messages", "request.options"),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_S7_the_rule_is_the_same_for_text_and_chat_streamed_or_not(served: Served, kind: str) -> None:
    prompt_field, options_field = KINDS[kind]
    for count in (CONTEXT - 1, CONTEXT, CONTEXT + 1):
        for max_tokens in (0, 1, None):
            options = greedy() if max_tokens is None else greedy(max_tokens=max_tokens)
            if count + (max_tokens or 0) <= CONTEXT:
                answer = await ask(served, kind, count, options)
                expected = CONTEXT - count if max_tokens is None else max_tokens
                assert answer.reason == "LENGTH" and len(answer.ids) == expected
                assert answer.messages[-1].usage.prompt_tokens == count
                continue
            error = await failure(ask(served, kind, count, options))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            too_long = count > CONTEXT
            assert fields_at_fault(error) == [prompt_field if too_long else f"{options_field}.max_tokens"]
            assert f"{count} tokens" in (error.details() or "") and f"holds {CONTEXT}" in (error.details() or "")
    assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]


@pytest.mark.parametrize("kind", KINDS)
async def test_S6_max_tokens_zero_and_one_in_every_call(served: Served, kind: str) -> None:
    for max_tokens in (0, 1):
        answer = await ask(served, kind, CONTEXT - 4, greedy(max_tokens=max_tokens))
        assert answer.ids == [50] * max_tokens and answer.reason == "LENGTH"
        assert answer.messages[-1].usage.completion_tokens == max_tokens


async def test_S6_prompts_that_are_empty_blank_or_bos_alone_in_every_call(served: Served) -> None:
    unary, chat_unary = inference_pb2.GenerateUnaryRequest, inference_pb2.ChatUnaryRequest
    chat_request, tokenize = inference_pb2.ChatRequest, inference_pb2.TokenizeRequest
    options = greedy(max_tokens=2)
    refused = [
        (served.stub.GenerateUnary(unary(request=by_text("", options))), "request.text"),
        (served.stub.GenerateUnary(unary(request=by_ids([], options))), "request.token_ids"),
        (served.stub.GenerateUnary(unary()), "request.prompt"),
        (chat(served.channel, chat_request(options=options)), "messages"),
        (served.stub.ChatUnary(chat_unary()), "request.messages"),
        (served.stub.Tokenize(tokenize(chat=chat_request())), "chat.messages"),
        (served.stub.Tokenize(tokenize()), "input"),
    ]
    for call, field in refused:
        error = await failure(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]
    assert not (await served.stub.Tokenize(tokenize(text=""))).token_ids
    for text in ("", " "):  # a turn without text is a turn all the same
        assert (await chat(served.channel, chat_request(messages=[user(text)], options=options))).ids == [50, 50]
    for request in (by_text(" ", options), by_ids([1], options), by_text("<|im_start|>", options)):
        answer = (await served.stub.GenerateUnary(unary(request=request))).response
        assert list(answer.choices[0].token_ids) == [50, 50] and answer.usage.prompt_tokens == 1


EOS = [2, 7, 9]


@pytest.fixture
def several_eos(tmp_path: Path) -> Path:
    path = text_checkpoint(tmp_path / "several")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return path


@pytest.mark.parametrize("eos", EOS)
async def test_X4_every_eos_id_stops(several_eos: Path, eos: int) -> None:
    async with serving(several_eos, scripted([50, eos, 60, 61])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(max_tokens=4)))
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
