"""best_of: choices compete by their cumulative logprob, and the winners come at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import inference_pb2

from loadtest.stub_engine import Faults
from tests.frontend.harness import fields_at_fault, scripted, serving
from tests.support.calls import Answer, by_ids, generate, greedy
from tests.support.checkpoints import EOS_ID


def choices(answer: Answer) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for m in answer.messages:
        for choice in m.choices:
            found.setdefault(choice.index, []).extend(choice.token_ids)
    return found


def logprobs(answer: Answer) -> dict[int, float]:
    return {c.index: c.cumulative_logprob for m in answer.messages for c in m.choices if c.HasField("finish")}


@pytest.mark.parametrize("hold", [{}, {"min_delta_tokens": 2}])
async def test_the_likeliest_come_at_the_end_and_all_are_counted(text_model: Path, hold: dict[str, int]) -> None:
    # The stub's logprobs fall with the position, and choice i, whose ids are i higher, meets the stop id i earlier.
    options = {"stop_token_ids": [56], "max_tokens": 9} | hold
    async with serving(text_model, scripted(list(range(50, 60)))) as served:
        every = await generate(served.channel, by_ids([10], greedy(n=4, logprobs=2, **options)))
        ranked = sorted(logprobs(every).items(), key=lambda item: -item[1])
        assert [choice for choice, _ in ranked] == [3, 2, 1, 0]
        best = await generate(served.channel, by_ids([10], greedy(n=2, best_of=4, **options)))
        assert choices(best) == {place: choices(every)[choice] for place, (choice, _) in enumerate(ranked[:2])}
        assert logprobs(best) == {place: value for place, (_, value) in enumerate(ranked[:2])}
        assert best.usage.completion_tokens == every.usage.completion_tokens == 4 + 5 + 6 + 7
        with_choices = [m for m in best.messages if m.choices]
        assert len(with_choices) == 1 and not any(c.logprobs for c in with_choices[0].choices)
        assert served.engine.submits[-1].num_choices == 4 and served.engine.submits[-1].logprobs == 0
        unary = await served.stub.GenerateUnary(
            inference_pb2.GenerateUnaryRequest(request=by_ids([10], greedy(n=2, best_of=4, **options)))
        )
        assert [list(choice.token_ids) for choice in unary.response.choices] == list(choices(best).values())


async def test_logprobs_are_told_where_they_are_asked_for_too(text_model: Path) -> None:
    async with serving(text_model, scripted([50, 60, 70])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(best_of=3, logprobs=1, max_tokens=4)))
        (choice,) = [c for m in answer.messages for c in m.choices]
        assert len(choice.logprobs) == 4 and all(len(entry.top) == 1 for entry in choice.logprobs)
        summed = sum(entry.token.logprob for entry in choice.logprobs)
        assert choice.cumulative_logprob == pytest.approx(summed)


async def test_one_choice_that_competes_with_nobody_comes_at_the_end_as_well(text_model: Path) -> None:
    async with serving(text_model, scripted([50, 60, EOS_ID])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(best_of=1)))
        assert [len(m.choices) for m in answer.messages] == [0, 1, 0]
        assert choices(answer) == {0: [50, 60, EOS_ID]} and 0 in logprobs(answer)


async def test_ids_behind_a_stop_string_do_not_count(text_model: Path) -> None:
    async with serving(text_model, scripted([50, 60, 70], ids_per_step=3)) as served:
        stop = [served.decode([60])]
        answer = await generate(served.channel, by_ids([10], greedy(best_of=2, stop=stop, max_tokens=9, logprobs=0)))
        (choice,) = [c for m in answer.messages for c in m.choices]
        assert choice.cumulative_logprob == pytest.approx(sum(entry.token.logprob for entry in choice.logprobs))


async def test_nothing_is_run_for_no_tokens(text_model: Path) -> None:
    async with serving(text_model, scripted([50])) as served:
        answer = await generate(served.channel, by_ids([10], greedy(n=2, best_of=3, max_tokens=0)))
        assert logprobs(answer) == {0: 0.0, 1: 0.0} and answer.usage.completion_tokens == 0
        scored = await generate(served.channel, by_ids([10, 11], greedy(best_of=3, max_tokens=0, prompt_logprobs=0)))
        assert len(scored.finishes) == 1 and served.engine.submits[-1].num_choices == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"best_of": 0}, "is 0, n is 1"),
        ({"n": 3, "best_of": 2}, "is 2, n is 3"),
        ({"best_of": 17}, "at most 16 are taken (max_choices)"),
        ({"best_of": 2**31}, "at most 16 are taken (max_choices)"),
    ],
)
async def test_S8_best_of_is_in_range(text_model: Path, options: dict[str, Any], said: str) -> None:
    async with serving(text_model, scripted([50])) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, by_ids([10], greedy(**options)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and said in (caught.value.details() or "")
        assert fields_at_fault(caught.value) == ["options.best_of"] and served.engine.submits == []


async def test_an_engine_may_run_fewer(text_model: Path) -> None:
    async with serving(text_model, scripted([50], max_choices=2)) as served:
        with pytest.raises(grpc.aio.AioRpcError, match="the engine takes at most 2"):
            await generate(served.channel, by_ids([10], greedy(best_of=3)))


async def test_a_choice_that_fails_ends_the_call_without_winners(text_model: Path) -> None:
    async with serving(text_model, scripted([50, 60], faults=Faults(bad_id_at=3))) as served:
        answer = Answer()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for m in served.stub.Generate(by_ids([10], greedy(best_of=2, max_tokens=9))):
                answer.messages.append(m)
        assert caught.value.code() is grpc.StatusCode.INTERNAL and not answer.ids
        await served.engine.wait_until(lambda engine: engine.num_running == 0)
