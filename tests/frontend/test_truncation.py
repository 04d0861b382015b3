"""Prompts that are cut to their last tokens: in every call, and in all that is told of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import inference_pb2

from tests.frontend.harness import Served, fields_at_fault, scripted, serving, text_checkpoint, user
from tests.support.calls import EVERY_CALL, STREAM_AND_UNARY, by_ids, by_text, call, generate, greedy, place

CONTEXT = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("truncation") / "tiny-text")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    async with serving(model, scripted([50], context_tokens=CONTEXT)) as served:
        yield served


def request(rpc: str, text: str, options: inference_pb2.Options) -> Any:
    if rpc.startswith("Chat"):
        return inference_pb2.ChatRequest(messages=[user(text)], options=options)
    return by_text(text, options)


@EVERY_CALL
async def test_a_longer_prompt_keeps_its_last_tokens_and_a_shorter_one_all(served: Served, rpc: str) -> None:
    await call(served.channel, rpc, request(rpc, "12345", greedy(max_tokens=1)))
    whole = served.engine.prompts[-1]
    for kept in (1, 3, len(whole), CONTEXT):
        options = greedy(max_tokens=1, truncate_prompt_tokens=kept)
        answer = await call(served.channel, rpc, request(rpc, "12345", options))
        assert served.engine.prompts[-1] == whole[-kept:]
        assert answer.usage.prompt_tokens == answer.prompt.prompt_tokens == min(kept, len(whole))


@EVERY_CALL
async def test_a_prompt_past_the_context_is_served_where_it_is_cut(served: Served, rpc: str) -> None:
    options = greedy(max_tokens=2, truncate_prompt_tokens=CONTEXT - 2)
    assert (await call(served.channel, rpc, request(rpc, "1" * 100, options))).ids == [50, 50]
    assert len(served.engine.prompts[-1]) == CONTEXT - 2


@STREAM_AND_UNARY
async def test_ids_are_cut_too_and_each_is_still_looked_at(served: Served, rpc: str) -> None:
    options = greedy(max_tokens=1, truncate_prompt_tokens=2)
    await generate(served.channel, by_ids([7] * 100 + [8, 9], options), rpc=rpc)
    assert served.engine.prompts[-1] == (8, 9)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(served.channel, by_ids([2**31, 8, 9], options), rpc=rpc)
    assert fields_at_fault(caught.value) == [place(rpc, "token_ids.ids[0]")]


@STREAM_AND_UNARY
async def test_what_is_echoed_and_scored_is_what_is_left(served: Served, rpc: str) -> None:
    options = greedy(max_tokens=0, truncate_prompt_tokens=3, echo=True, prompt_logprobs=0)
    answer = await generate(served.channel, by_text("12345", options), rpc=rpc)
    assert answer.prompt.text == "345" and list(answer.prompt.token_ids) == served.ids("345")
    told = [piece for message in answer.messages for piece in message.prompt_logprobs.positions]
    assert len(told) == 3


@EVERY_CALL
@pytest.mark.parametrize(("kept", "says"), [(0, "one token or more"), (CONTEXT + 1, f"the context holds {CONTEXT}")])
async def test_a_length_that_no_prompt_can_have_is_refused(served: Served, rpc: str, kept: int, says: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
        await call(served.channel, rpc, request(rpc, "1", greedy(truncate_prompt_tokens=kept)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields_at_fault(caught.value) == [place(rpc, "options.truncate_prompt_tokens")]
