"""Requests of several choices, and what makes a request share blocks and its place: tenant, salt, priority."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import inference_pb2

from loadtest.stub_engine import Faults, StubEngine
from services.common.digests import prompt_digests, root_digest
from tests.frontend.harness import VOCAB_SIZE, fields_at_fault, reason, retry_after_s, scripted, serving, user
from tests.support.calls import Answer, by_ids, by_text, chat, generate, greedy
from tests.support.checkpoints import EOS_ID

Options = inference_pb2.Options


def by_choice(answer: Answer) -> dict[int, list[inference_pb2.Choice]]:
    """The deltas of each choice."""
    deltas: dict[int, list[inference_pb2.Choice]] = defaultdict(list)
    for message in answer.messages:
        assert len({choice.index for choice in message.choices}) == len(message.choices), "a choice twice in a message"
        for choice in message.choices:
            deltas[choice.index].append(choice)
    return deltas


def ids(deltas: list[inference_pb2.Choice]) -> list[int]:
    return [i for delta in deltas for i in delta.token_ids]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_each_choice_has_its_ids_its_text_and_one_finish_and_usage_counts_all(text_model: Path) -> None:
    async with serving(text_model, scripted([50, 51, 52])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(n=3, max_tokens=2, logprobs=0)))
        deltas = by_choice(answer)
        assert {index: ids(own) for index, own in deltas.items()} == {0: [50, 51], 1: [51, 52], 2: [52, 53]}
        for own in deltas.values():
            assert "".join(delta.text for delta in own) == served.decode(ids(own))
            assert [delta.HasField("finish") for delta in own] == [False] * (len(own) - 1) + [True]
            assert own[-1].cumulative_logprob == -3 / 8
        assert answer.messages[-1].HasField("usage") and answer.usage.completion_tokens == 6
        assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (1, 0)
        (submit,) = served.engine.submits
        assert submit.num_choices == 3 and served.engine.aborts == []


async def test_the_choices_of_a_step_come_in_one_message(text_model: Path) -> None:
    async with serving(text_model, scripted([50])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(n=4, max_tokens=1)))
        assert [len(m.choices) for m in answer.messages] == [0, 4, 0]


async def test_a_stop_string_ends_its_choice_alone(text_model: Path) -> None:
    async with serving(text_model, scripted([60, 50], step_s=0.01)) as served:
        # 61 is the first id of choice 1 alone: choice 0 begins with 60, choice 2 with 62.
        options = greedy(n=3, max_tokens=20, stop=[served.decode([61])])
        answer = await generate(served.channel, by_ids([10], options))
        deltas = by_choice(answer)
        assert ids(deltas[1]) == [61] and deltas[1][-1].finish.stop_string
        assert ids(deltas[0]) == [60, 50] * 10 and ids(deltas[2]) == [62, 52] * 10
        assert answer.usage.completion_tokens == 41
        assert served.engine.aborts == [served.engine.submits[0].request_id + 1]


async def test_a_cancel_names_every_choice_that_runs(text_model: Path) -> None:
    async with serving(text_model, scripted([50], step_s=0.01)) as served:
        stream = served.stub.Generate(by_ids([10], greedy(n=3)))
        async for message in stream:
            if message.choices:
                break
        stream.cancel()
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 3 and engine.num_running == 0)
        first = served.engine.submits[0].request_id
        assert served.engine.aborts == [first, first + 1, first + 2]
        await generate(served.channel, by_ids([10], greedy(max_tokens=1)))
        assert served.engine.submits[1].request_id == first + 3


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        (Faults(failed=engine_pb2.Failed(code=14, reason="GONE", message="gone"), failed_at=2), "UNAVAILABLE"),
        (Faults(bad_id_at=2), "INTERNAL"),
        (Faults(cut_at=2), "UNAVAILABLE"),
    ],
)
async def test_a_choice_that_fails_ends_the_call_after_what_came_before(
    text_model: Path, faults: Faults, code: str
) -> None:
    for hold in ({}, {"min_delta_tokens": 100}):
        async with serving(text_model, scripted([50], faults=faults, step_s=0.01)) as served:
            answer = Answer()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for message in served.stub.Generate(by_ids([10], greedy(n=2, **hold))):
                    answer.messages.append(message)
            assert caught.value.code().name == code and not answer.finishes
            assert {index: ids(own) for index, own in by_choice(answer).items()} == {0: [50, 50], 1: [51, 51]}


async def test_no_tokens_are_a_finish_a_choice_and_ask_no_engine(text_model: Path) -> None:
    async with serving(text_model, scripted([50])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(n=3, max_tokens=0)))
        assert sorted(by_choice(answer)) == [0, 1, 2] and len(answer.finishes) == 3 and answer.ids == []
        assert answer.usage.completion_tokens == 0 and served.engine.submits == []


@pytest.mark.parametrize("kind", ["generate", "chat"])
async def test_a_unary_twin_holds_the_choices_in_order(text_model: Path, kind: str) -> None:
    # Choice 2 meets EOS first, choice 0 never.
    async with serving(text_model, scripted([50, EOS_ID - 2, 50, EOS_ID - 1])) as served:
        options = greedy(n=3, max_tokens=5)
        if kind == "generate":
            request = by_text("the town", options)
            stream = await generate(served.channel, request)
            asked = inference_pb2.GenerateUnaryRequest(request=request)
            response = (await served.stub.GenerateUnary(asked)).response
        else:
            conversation = inference_pb2.ChatRequest(messages=[user("the town")], options=options)
            stream = await chat(served.channel, conversation)
            response = (await served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=conversation))).response
        assert [choice.index for choice in response.choices] == [0, 1, 2]
        assert [len(choice.token_ids) for choice in response.choices] == [5, 4, 2]
        deltas = by_choice(stream)
        for choice in response.choices:
            assert list(choice.token_ids) == ids(deltas[choice.index])
            assert choice.finish == deltas[choice.index][-1].finish
        assert response.usage.completion_tokens == 11


async def test_n_is_bounded_by_the_engine_and_told(text_model: Path) -> None:
    async with serving(text_model, scripted([50], max_choices=2)) as served:
        limits = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model.limits
        assert limits["max_choices"] == 2
        error = await failure(generate(served.channel, by_ids([10], greedy(n=3))))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == ["options.n"]
        assert served.engine.submits == []


async def test_priority_and_seed_go_to_the_engine_as_they_are(text_model: Path) -> None:
    async with serving(text_model, scripted([50])) as served:
        await generate(served.channel, by_ids([10], greedy(n=2, seed=9, priority=-1000, max_tokens=1)))
        (submit,) = served.engine.submits
        assert (submit.priority, submit.seed) == (-1000, 9)
        error = await failure(generate(served.channel, by_ids([10], greedy(priority=1001))))
        assert fields_at_fault(error) == ["options.priority"]
        error = await failure(generate(served.channel, by_ids([10], greedy(priority=-(2**31)))))
        assert "is -2147483648; it must be in [-1000, 1000]" in (error.details() or "")


@pytest.mark.parametrize("length", [15, 16, 17, 5000])
async def test_prompt_blocks_are_named_by_tenant_and_salt(text_model: Path, length: int) -> None:
    prompt = [3 + i % 400 for i in range(length)]
    async with serving(text_model, scripted([50], context_tokens=8192)) as served:
        stream = served.stub.Generate(
            by_ids(prompt, greedy(cache_salt="pepper", max_tokens=1)), metadata=[("triptych-tenant", "acme")]
        )
        async for _ in stream:
            pass
        (submit,) = served.engine.submits
        root = root_digest(tenant="acme", salt="pepper", adapter="")
        assert (submit.tenant, submit.root_digest) == ("acme", root)
        assert submit.block_digests == prompt_digests(root, np.array(prompt, np.uint32), 16)
        assert len(submit.block_digests) == length // 16 * 32


async def test_an_engine_without_blocks_is_sent_no_digests(text_model: Path) -> None:
    async with serving(text_model, scripted([50], block_tokens=0)) as served:
        await generate(served.channel, by_ids([10] * 40, greedy(cache_salt="s", max_tokens=1)))
        (submit,) = served.engine.submits
        assert submit.root_digest == submit.block_digests == b""


async def test_usage_tells_the_first_choices_cached_tokens_once(text_model: Path) -> None:
    async with serving(text_model, scripted([50])) as served:
        request = by_ids([10] * 40, greedy(n=3, max_tokens=1))
        assert (await generate(served.channel, request)).usage.cached_tokens == 0
        assert (await generate(served.channel, request)).usage.cached_tokens == 32
        salted = by_ids([10] * 40, greedy(cache_salt="s", max_tokens=1))
        assert (await generate(served.channel, salted)).usage.cached_tokens == 0


@pytest.mark.parametrize("tenant", ["", "t", "a b~!", "x" * 128])
async def test_a_tenant_is_a_label_in_the_metadata(text_model: Path, tenant: str) -> None:
    async with serving(text_model, scripted([50])) as served:
        request = by_ids([10], greedy(max_tokens=1))
        async for _ in served.stub.Generate(request, metadata=[("triptych-tenant", tenant)]):
            pass
        unary = inference_pb2.GenerateUnaryRequest(request=request)
        await served.stub.GenerateUnary(unary, metadata=[("triptych-tenant", tenant)])
        assert [submit.tenant for submit in served.engine.submits] == [tenant, tenant]


@pytest.mark.parametrize(
    "metadata",
    [
        [("triptych-tenant", "x" * 129)],
        [("triptych-tenant", "a"), ("triptych-tenant", "b")],
        [("triptych-tenant-bin", b"acme")],
    ],
)
async def test_a_tenant_that_cannot_be_is_refused_by_its_key(
    text_model: Path, metadata: list[tuple[str, str | bytes]]
) -> None:
    async with serving(text_model, scripted([50])) as served:
        error = await failure(
            served.stub.GenerateUnary(
                inference_pb2.GenerateUnaryRequest(request=by_ids([10], greedy())), metadata=metadata
            )
        )
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [metadata[0][0]]
        assert served.engine.submits == []


@pytest.mark.parametrize(
    ("failed", "told_s"),
    [
        (engine_pb2.Failed(code=8, reason="QUEUE_FULL", message="full", retry_after_ms=2750), 2.75),
        (engine_pb2.Failed(code=8, reason="QUEUE_FULL", message="full"), 1.0),
        (engine_pb2.Failed(code=14, reason="DRAINING", message="leaving", retry_after_ms=40), 0.04),
        (engine_pb2.Failed(code=14, reason="DRAINING", message="leaving"), 1.0),
    ],
)
async def test_the_engines_retry_hint_reaches_the_client(
    text_model: Path, failed: engine_pb2.Failed, told_s: float
) -> None:
    async with serving(text_model, scripted([50], faults=Faults(failed=failed))) as served:
        error = await failure(generate(served.channel, by_ids([10], greedy(n=2))))
        assert error.code().value[0] == failed.code and reason(error) == failed.reason
        assert retry_after_s(error) == told_s


async def test_held_deltas_are_sent_by_number_and_all_at_the_finish(text_model: Path) -> None:
    async with serving(text_model, scripted([50, 51, 52, 53, 54])) as served:
        plain = await generate(served.channel, by_ids([10], greedy(n=2, max_tokens=23, logprobs=0)))
        held = await generate(served.channel, by_ids([10], greedy(n=2, max_tokens=23, logprobs=0, min_delta_tokens=10)))
        assert held.usage == plain.usage
        for index, own in by_choice(held).items():
            sizes = [len(delta.token_ids) for delta in own]
            assert sum(sizes) == 23 and all(size >= 10 for size in sizes[:-1])
            reference = by_choice(plain)[index]
            assert ids(own) == ids(reference)
            assert "".join(delta.text for delta in own) == "".join(delta.text for delta in reference)
            assert [e for d in own for e in d.logprobs] == [e for d in reference for e in d.logprobs]
            assert own[-1].cumulative_logprob == reference[-1].cumulative_logprob


async def test_an_interval_sends_what_is_held_though_nothing_more_comes(text_model: Path) -> None:
    made: list[int] = []

    def next_id(_: tuple[int, ...], position: int) -> int:
        made.append(position)
        return 50

    engine = StubEngine(next_id=next_id, vocab_size=VOCAB_SIZE, context_tokens=1024, step_s=0.02)
    async with serving(text_model, engine) as served:
        options = greedy(max_tokens=30, min_delta_tokens=1000, min_delta_interval_ms=200)
        stream = served.stub.Generate(by_ids([10], options))
        await stream.read()
        got = len((await stream.read()).choices[0].token_ids)
        assert got >= 1  # the first is not held back
        await engine.wait_until(lambda _: len(made) >= 3)
        engine.pause()  # what was made before that is held, and nothing pushes it out
        async with asyncio.timeout(10):
            while got < len(made):
                choice = (await stream.read()).choices[0]
                got += len(choice.token_ids)
                assert not choice.HasField("finish")
        assert len(made) < 30
        engine.resume()
        while (message := await stream.read()) is not grpc.aio.EOF:
            last = message
        assert last.usage.completion_tokens == 30
