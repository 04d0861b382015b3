"""Prompt logprobs and echo as a client sees them, from a stub engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from triptych.inference.v1 import inference_pb2

from loadtest.stub_logprobs import alternatives
from loadtest.stub_steps import prompt_score
from services.common.errors import RequestError
from services.frontend import responses
from services.frontend.engine import EngineFinish, Outputs, Scores
from services.frontend.request import EngineFacts, Job, Options, Sampling
from services.frontend.scores import PromptScores
from tests.frontend.harness import Served, scripted, serving, user
from tests.support.calls import Answer, by_ids, by_text, chat, generate, greedy

PROMPT = [10, 11, 12, 13, 14, 15, 16]


@pytest.fixture
async def served(text_model: Path) -> AsyncIterator[Served]:
    """Three prompt positions a step, two ids a step."""
    async with serving(text_model, scripted([50, 51], scores_per_step=3, ids_per_step=2)) as served:
        yield served


def check_told(answer: Answer, prompt: list[int], served: Served) -> None:
    """Every position once, in order, the first without a token, and all before any choice."""
    kinds = [
        next(name for name in ("prompt_logprobs", "choices", "usage", "prompt") if has(m, name))
        for m in answer.messages
    ]
    assert kinds == sorted(kinds, key=["prompt", "prompt_logprobs", "choices", "usage"].index)
    positions = []
    for message in answer.messages:
        if message.HasField("prompt_logprobs"):
            assert message.prompt_logprobs.start == len(positions) and message.prompt_logprobs.positions
            positions += message.prompt_logprobs.positions
    assert len(positions) == len(prompt)
    assert positions[0] == inference_pb2.PositionLogprobs()
    for at, (token_id, entry) in enumerate(zip(prompt, positions, strict=True)):
        if at:
            token = entry.token
            assert (token.token_id, token.logprob, token.rank) == (token_id, *prompt_score(at)) and not entry.top
            assert token.raw == served.frontend.model.tokenizer.token_bytes(token_id)


def has(message: Any, name: str) -> bool:
    return bool(message.choices) if name == "choices" else bool(message.HasField(name))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_every_prompt_id_is_scored_once_before_any_choice(served: Served, length: int, max_tokens: int) -> None:
    prompt = PROMPT[:length]
    answer = await generate(served.channel, by_ids(prompt, greedy(prompt_logprobs=0, max_tokens=max_tokens)))
    check_told(answer, prompt, served)
    assert answer.ids == [50, 51, 50, 51, 50][:max_tokens] and answer.reason == "LENGTH"
    assert answer.usage.prompt_tokens == length and answer.usage.completion_tokens == max_tokens
    # Without an id to make and one to score there is nothing to ask an engine.
    assert len(served.engine.submits) == (0 if length == 1 and max_tokens == 0 else 1)


@pytest.mark.parametrize("count", [1, 20])
async def test_alternatives_to_prompt_ids_stand_at_their_positions(served: Served, count: int) -> None:
    answer = await generate(served.channel, by_ids(PROMPT, greedy(prompt_logprobs=count, logprobs=1, max_tokens=2)))
    positions = [p for m in answer.messages if m.HasField("prompt_logprobs") for p in m.prompt_logprobs.positions]
    assert len(positions) == len(PROMPT) and positions[0] == inference_pb2.PositionLogprobs()
    for at, position in enumerate(positions[1:], start=1):
        assert position.token.token_id == PROMPT[at]
        assert [(one.token_id, one.logprob) for one in position.top] == alternatives(at, count)
        assert [one.rank for one in position.top] == list(range(1, count + 1))
    assert [len(p.top) for m in answer.messages for c in m.choices for p in c.logprobs] == [1, 1]


async def test_nobody_is_told_logprobs_that_were_not_asked_for(served: Served) -> None:
    answer = await generate(served.channel, by_ids(PROMPT, greedy(max_tokens=2)))
    assert not any(message.HasField("prompt_logprobs") for message in answer.messages)
    assert not served.engine.submits[0].HasField("prompt_logprobs")


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_several_choices_share_one_scored_prompt(text_model: Path, max_tokens: int) -> None:
    async with serving(text_model, scripted([50, 51], scores_per_step=2, max_choices=3)) as served:
        answer = await generate(served.channel, by_ids(PROMPT, greedy(n=3, prompt_logprobs=0, max_tokens=max_tokens)))
        check_told(answer, PROMPT, served)
        assert len(answer.finishes) == 3
        assert answer.usage.completion_tokens == 3 * max_tokens
        assert served.engine.submits[0].num_choices == (3 if max_tokens else 1)


async def test_a_chat_and_the_unary_twins_are_scored_alike(served: Served) -> None:
    options = greedy(prompt_logprobs=0, max_tokens=3, echo=True)
    asked = inference_pb2.ChatRequest(messages=[user("a small town")], options=options)
    streamed = await chat(served.channel, asked)
    ids = list(streamed.prompt.token_ids)
    check_told(streamed, ids, served)
    whole = (await served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=asked))).response
    assert whole.prompt_logprobs.start == 0
    told = [p for m in streamed.messages for p in m.prompt_logprobs.positions]
    assert list(whole.prompt_logprobs.positions) == told and len(told) == len(ids)
    request = inference_pb2.GenerateUnaryRequest(request=by_ids(ids, options))
    generated = (await served.stub.GenerateUnary(request)).response
    assert generated.prompt_logprobs == whole.prompt_logprobs


async def test_an_echo_holds_the_prompt_and_deltas_none_of_it(served: Served) -> None:
    text = "The capital of France"
    answer = await generate(served.channel, by_text(text, greedy(echo=True, max_tokens=2, logprobs=0)))
    assert answer.prompt.text == text and list(answer.prompt.token_ids) == served.ids(text)
    plain = await generate(served.channel, by_text(text, greedy(max_tokens=2, logprobs=0)))
    assert plain.prompt.text == "" and not plain.prompt.token_ids
    assert (answer.ids, answer.text) == (plain.ids, plain.text) == ([50, 51], served.decode([50, 51]))


async def test_ids_and_chats_are_echoed_as_detokenize_reads_them(served: Served) -> None:
    ids = [1, *served.ids("in the town")]
    for skip in (True, False):
        options = greedy(echo=True, max_tokens=1, skip_special_tokens=skip)
        answer = await generate(served.channel, by_ids(ids, options))
        read = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip)
        assert answer.prompt.text == (await served.stub.Detokenize(read)).text
        assert list(answer.prompt.token_ids) == ids
    turn = await chat(served.channel, inference_pb2.ChatRequest(messages=[user("hello")], options=options))
    assert turn.prompt.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_a_client_that_leaves_while_its_prompt_is_scored_frees_the_engine(text_model: Path) -> None:
    async with serving(text_model, scripted([50], scores_per_step=1, step_s=0.01)) as served:
        stream = served.stub.Generate(by_ids([10] * 1000, greedy(prompt_logprobs=0, max_tokens=0)))
        async for message in stream:
            if message.HasField("prompt_logprobs"):
                break
        stream.cancel()
        await served.engine.wait_until(lambda engine: engine.num_running == 0)
        assert served.engine.aborts


async def test_a_failure_in_the_middle_of_the_prompt_comes_after_what_was_scored(text_model: Path) -> None:
    from triptych.engine.v1 import engine_pb2

    from loadtest.stub_engine import Faults

    lost = engine_pb2.Failed(code=14, reason="EXECUTOR_LOST", message="lost")
    faults = Faults(failed=lost, failed_at=1)
    async with serving(text_model, scripted([50, 51], scores_per_step=3, faults=faults)) as served:
        answer = Answer()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in served.stub.Generate(by_ids(PROMPT, greedy(prompt_logprobs=0, max_tokens=4))):
                answer.messages.append(message)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        check_told(answer, PROMPT, served)


# -- parts


def job(length: int, **options: Any) -> Job:
    facts = EngineFacts("e", "m", "f", 512, 1024)
    return Job(tuple(range(length)), Options(Sampling(), seed=0, **options), 4, frozenset(), facts)


def scores(start: int, count: int, logprob: float = -1.0) -> Outputs:
    return Outputs(scores=(Scores.plain(start, np.full(count, logprob, np.float32), np.ones(count, np.uint32)),))


def topped(start: int, ids: list[list[int]], logprob: float) -> Outputs:
    """With alternatives."""
    top_ids = np.array(ids, np.uint32)
    told = np.full(len(ids), -1.0, np.float32), np.ones(len(ids), np.uint32)
    return Outputs(scores=(Scores(start, *told, top_ids, np.full(top_ids.shape, logprob, np.float32)),))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (scores(1, 1), "0 alternatives to a prompt id, 2 are wanted"),
        (topped(1, [[3]], -1.0), "1 alternatives to a prompt id, 2 are wanted"),
        (topped(1, [[3, 512]], -1.0), "id 512 as an alternative, the vocabulary has 512"),
        (topped(1, [[3, 4]], float("nan")), "not a number"),
    ],
)
def test_alternatives_that_the_engine_cannot_mean_end_the_request_alone(told: Outputs, words: str) -> None:
    progress = PromptScores(job(5, prompt_logprobs=2))
    progress.push(topped(1, [[3, 4]], -1.0))
    with pytest.raises(RequestError, match=words) as caught:
        PromptScores(job(5, prompt_logprobs=2)).push(told)
    assert caught.value.code is grpc.StatusCode.INTERNAL and caught.value.reason == "BAD_LOGPROBS"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([scores(2, 1)], r"\[2, 3\), where \[1, 5\)"),
        ([scores(1, 2), scores(2, 1)], r"\[2, 3\), where \[3, 5\)"),
        ([scores(1, 5)], r"\[1, 6\), where \[1, 5\)"),
        ([scores(1, 1, float("nan"))], "not a number"),
        ([scores(1, 2), Outputs(token_ids=(7,))], "before prompt position 3 of 5 was scored"),
        ([scores(1, 3), Outputs(finish=EngineFinish("length", None))], "before prompt position 4 of 5"),
        ([Outputs(token_ids=(7,))], "before prompt position 1 of 5"),
        ([topped(1, [[3, 4]], -1.0)], "2 alternatives to a prompt id, 0 are wanted"),
    ],
)
def test_what_the_engine_cannot_mean_ends_the_request_alone(told: list[Outputs], words: str) -> None:
    progress = PromptScores(job(5, prompt_logprobs=0))
    *good, last = told
    for outputs in good:
        progress.push(outputs)
    with pytest.raises(RequestError, match=words) as caught:
        progress.push(last)
    assert caught.value.code is grpc.StatusCode.INTERNAL and caught.value.reason == "BAD_LOGPROBS"


def test_without_the_wish_nothing_is_passed_on() -> None:
    for progress, outputs in (
        (PromptScores(job(5)), scores(1, 2)),
        (PromptScores(job(1, prompt_logprobs=0)), Outputs(token_ids=(7,))),
    ):
        assert not progress.push(outputs) and not progress.any_waiting and progress.take() == []


@pytest.mark.parametrize("message_bytes", [2048, 65_536])
def test_messages_of_alternatives_are_bounded_too(message_bytes: int) -> None:
    length, count = 500, 20
    ids = np.full((length - 1, count), 511, np.uint32)
    worst = Scores(
        1,
        np.full(length - 1, -9999, np.float32),
        np.full(length - 1, 2**32 - 1, np.uint32),
        ids,
        np.full(ids.shape, -9999, np.float32),
    )
    asked = job(length, prompt_logprobs=count)
    pieces = list(responses.prompt_logprobs(asked, worst, FewBytes(), message_bytes))  # type: ignore[arg-type]
    assert max(piece.ByteSize() for piece in pieces) <= message_bytes + 16
    assert max(sum(len(p.top) for p in piece.positions) for piece in pieces) <= 1024
    assert sum(len(piece.positions) for piece in pieces) == length


class FewBytes:
    """Ids of a few bytes each."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"x" * (token_id % 40)


class LongTokens:
    """Ids whose bytes are of very different lengths."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"x" * (token_id * 37 % 900)


@pytest.mark.parametrize("message_bytes", [1024, 2048, 65_536])
def test_messages_of_prompt_logprobs_are_bounded_in_bytes_and_positions(message_bytes: int) -> None:
    length = 3000
    asked = job(length, prompt_logprobs=0)
    worst = Scores.plain(1, np.full(length - 1, -9999, np.float32), np.full(length - 1, 2**32 - 1, np.uint32))
    pieces = list(responses.prompt_logprobs(asked, worst, LongTokens(), message_bytes))  # type: ignore[arg-type]
    assert max(piece.ByteSize() for piece in pieces) <= message_bytes + 16  # its own header
    assert max(len(piece.positions) for piece in pieces) <= 1024 + 1
    starts = [piece.start for piece in pieces]
    counts = [len(piece.positions) for piece in pieces]
    assert starts == [sum(counts[:i]) for i in range(len(counts))] and sum(counts) == length
