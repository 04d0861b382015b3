"""Prompt logprobs through core and scheduler: each position once, in order, before the first id, whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.executor.v1 import executor_pb2
from triptych.inference.v1 import generation_pb2

from loadtest.stub_batch import expected_ids, own_logprob
from loadtest.stub_executor import Faults, StubExecutor
from loadtest.stub_logprobs import alternatives
from loadtest.stub_logprobs import columns as stub_columns
from services.common.server import MAX_MESSAGE_BYTES
from services.scheduler.config import MAX_SCORES_BYTES, SchedulerConfig
from services.scheduler.core.request import FailureKind, FinishReason
from services.scheduler.core.step import ResultError, Scores, StepResult
from services.scheduler.outbox import Outbox, pending_limit_bytes
from services.scheduler.outputs import Outputs, cut, encode, merge
from services.scheduler.plan_codec import decode_result, encode_plan
from tests.support.attached import Frontend, bench, finished
from tests.support.core_driver import CoreDriver


def scores(start: int, count: int) -> Scores:
    return Scores.plain(
        start, -np.arange(start, start + count, dtype=np.float32), np.arange(count, dtype=np.uint32) + 1
    )


def positions(spans: list[tuple[int, Scores]], request_id: int) -> list[int]:
    """What one request is told, position by position: the made-up logprob of `scores` is minus the position."""
    return [round(-value) for told, entry in spans if told == request_id for value in entry.logprobs.tolist()]


# -- the core (the driver checks order, values and completeness of all that is told)


@pytest.mark.parametrize("budget", [1, 3, 4, 8, 15, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17])
def test_every_prompt_position_but_the_first_is_scored_once_however_the_prompt_is_cut(budget: int, length: int) -> None:
    driver = CoreDriver(max_step_tokens=budget)
    key = driver.submit(length, max_tokens=3, prompt_logprobs=0)
    beside = driver.submit(5)
    driver.run()
    assert len(driver.seen[key].scores) == length - 1
    assert driver.seen[beside].scores == []


@pytest.mark.parametrize("length", [2, 3, 4, 5, 16, 17, 64])
def test_a_prompt_that_is_only_scored_ends_with_its_last_position_and_samples_nothing(length: int) -> None:
    driver = CoreDriver(max_step_tokens=8)  # a context of 64: there is no room for an id beside the longest
    key = driver.submit(length, max_tokens=0, prompt_logprobs=0)
    driver.run()
    seen = driver.seen[key]
    assert seen.finished is not None and seen.finished.reason is FinishReason.LENGTH and seen.started is None
    assert len(seen.scores) == length - 1
    # The last token foretells no prompt id, so it is not computed.
    assert sum(plan.num_tokens for plan in driver.plans) == length - 1


def test_without_a_prompt_to_score_max_tokens_0_is_refused() -> None:
    driver = CoreDriver()
    for prompt, wish in ((5, None), (1, 0)):
        failure = driver.seen[driver.submit(prompt, max_tokens=0, prompt_logprobs=wish)].failure
        assert failure is not None and failure.kind is FailureKind.INVALID and "at least 1 of each" in failure.message


def test_preempted_in_its_prompt_it_is_told_the_rest_and_preempted_later_nothing_again() -> None:
    driver = CoreDriver(num_blocks=9, context_tokens=32, block_tokens=4, max_step_tokens=6)
    old = driver.submit(4, max_tokens=24, prompt_logprobs=0)
    young = driver.submit(20, max_tokens=0, prompt_logprobs=0)
    later = driver.submit(6, max_tokens=20, prompt_logprobs=0)
    driver.run()
    assert driver.core.counters.preemptions > 0
    assert [len(driver.seen[key].scores) for key in (old, young, later)] == [3, 19, 5]
    again = [start for plan in driver.plans for start in plan.started if start.submission.key == later][1:]
    assert again and not any(start.is_scored for start in again)  # the executor is not asked for what was told


def test_a_new_epoch_scores_what_was_lost_and_nothing_else() -> None:
    driver = CoreDriver(max_step_tokens=6)
    key = driver.submit(20, max_tokens=2, prompt_logprobs=0)
    driver.step()
    assert len(driver.seen[key].scores) == 6
    driver.plan()
    driver.lose_executor()
    driver.run()
    assert len(driver.seen[key].scores) == 19 and driver.seen[key].finished


def test_two_steps_in_flight_score_each_position_once() -> None:
    driver = CoreDriver(max_in_flight=2, max_step_tokens=4, num_blocks=7, context_tokens=24)
    keys = [driver.submit(n, max_tokens=m, prompt_logprobs=0) for n, m in ((9, 9), (17, 0), (8, 5), (2, 0))]
    driver.run()
    assert [len(driver.seen[key].scores) for key in keys] == [8, 16, 7, 1]


def test_a_request_aborted_in_its_prompt_is_told_nothing_more() -> None:
    driver = CoreDriver(max_step_tokens=4)
    key = driver.submit(20, prompt_logprobs=0)
    driver.step()
    driver.plan()
    driver.abort(key)
    assert driver.apply().scores == []
    driver.run()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {0: scores(1, 3)},
        {0: scores(2, 4)},
        {0: scores(1, 5)},
        {0: scores(1, 4), 1: scores(1, 1)},
        {1: scores(1, 4)},
    ],
)
def test_a_result_with_other_positions_than_the_plan_asks_for_is_refused(wrong: dict[int, Scores]) -> None:
    driver = CoreDriver(max_step_tokens=4)
    driver.submit(20, prompt_logprobs=0)
    driver.plan()
    with pytest.raises(ResultError, match="prompt logprobs"):
        driver.core.apply(StepResult(1, [0], [], scores=wrong), driver.now_ns)
    assert driver.core.num_in_flight == 1
    driver.core.apply(StepResult(1, [0], [], scores={0: scores(1, 4)}), driver.now_ns)


# -- messages


def test_a_plan_asks_the_executor_and_its_answer_is_read_by_slot() -> None:
    driver = CoreDriver()
    driver.submit(4, prompt_logprobs=0)
    driver.submit(4)
    plan = driver.plan()
    assert plan is not None
    asked = encode_plan(plan).plan.started
    assert [request.HasField("prompt_logprobs") for request in asked] == [True, False]
    columns = generation_pb2.LogprobColumns(logprobs=np.float32([-1, -2]).tobytes(), ranks=np.uint32([3, 4]).tobytes())
    entry = executor_pb2.PromptLogprobs(slot=7, start=1, logprobs=columns)
    result, _ = decode_result(executor_pb2.StepResult(step=1, prompt_logprobs=[entry]), 2)
    assert (result.scores[7].start, result.scores[7].stop) == (1, 3)
    assert result.scores[7].logprobs.tolist() == [-1, -2] and result.scores[7].ranks.tolist() == [3, 4]
    columns.ranks += b"\0\0\0\0"
    uneven = executor_pb2.PromptLogprobs(slot=8, start=1, logprobs=columns)
    for bad in ([entry, entry], [uneven]):
        with pytest.raises(ResultError):
            decode_result(executor_pb2.StepResult(step=1, prompt_logprobs=bad), 2)


def test_merged_outputs_are_cut_into_messages_whose_prompt_logprobs_come_before_the_ids() -> None:
    first = Outputs(1, scores=[(1, scores(1, 5)), (2, scores(1, 2))])
    second = Outputs(2, [1], [1], [50], scores=[(1, scores(6, 4))])
    merged = merge([first, second])
    assert merged.size_bytes > 8 * 11
    told: list[Outputs] = []
    rest: Outputs | None = merged
    while rest is not None:
        taken, rest = cut(rest, max_ids=3)
        told.append(taken)
    assert [sum(len(entry.logprobs) for _, entry in part.scores) for part in told] == [3, 3, 3, 2]
    assert [part.token_ids for part in told] == [[], [], [], [50]]
    spans = [span for part in told for span in part.scores]
    assert positions(spans, 1) == list(range(1, 10)) and positions(spans, 2) == [1, 2]
    message = encode(told[1]).outputs.prompt_logprobs
    assert [(entry.request_id, entry.start) for entry in message] == [(1, 4), (2, 1)]


async def test_one_step_with_more_than_may_wait_does_not_cut_the_frontend_off() -> None:
    outbox = Outbox(max_pending_bytes=1000)
    outbox.put_outputs(Outputs(1, [1], [1], [5], scores=[(1, scores(1, 50_000))]))
    assert not outbox.is_closed
    sizes = []
    while len(sizes) < 2:
        message = await outbox.take()
        assert message is not None
        sizes.append(message.ByteSize())
    assert max(sizes) < 300_000 and message.outputs.token_ids
    outbox.put_outputs(Outputs(2, [1], [1], [5]))
    outbox.put_outputs(Outputs(3, scores=[(1, scores(1, 500))]))
    assert outbox.is_closed  # what was put on top of what waits counts


# -- through a real scheduler


@pytest.mark.parametrize("budget", [3, 16, 256])
async def test_prompt_logprobs_reach_those_who_asked_and_nobody_else(model: Path, budget: int) -> None:
    async with bench(model, max_num_batched_tokens=budget) as b, Frontend(b.server) as other:
        prompts = [[n + 1] * 3 + list(range(n, n + length)) for n, length in enumerate((1, 14, 30, 61))]
        told = [await b.frontend.submit(prompt, prompt_logprobs=0, max_tokens=4, seed=9) for prompt in prompts]
        alone = await other.submit(prompts[-1], request_id=1, prompt_logprobs=0, max_tokens=0)
        silent = await other.submit(prompts[0], request_id=2)
        await finished(*told, alone, silent)
        for prompt, mine in zip(prompts, told, strict=True):
            assert mine.scores == [own_logprob(token_id) for token_id in prompt[1:]]
            assert mine.ids == expected_ids(prompt, 9, 4, 512)
        assert alone.scores == told[-1].scores and alone.ids == [] and alone.started is None
        assert alone.finished is not None and alone.finished.reason == generation_pb2.FINISH_REASON_LENGTH
        assert silent.scores == []
        await b.idle()


async def test_a_row_that_fails_is_told_no_further_position(model: Path) -> None:
    stub = StubExecutor(faults=Faults(failed_rows=frozenset({(7, 0)})))
    async with bench(model, stub=stub, max_num_batched_tokens=8) as b:
        told = await b.frontend.run([5] * 20, prompt_logprobs=0, seed=7)
        assert told.code is grpc.StatusCode.INTERNAL and len(told.scores) == 16  # of two chunks
        assert len((await b.frontend.run([5] * 20, prompt_logprobs=0)).scores) == 19


async def test_a_row_that_no_id_is_left_for_is_its_callers_to_mend(model: Path) -> None:
    stub = StubExecutor(faults=Faults(idless_rows=frozenset({(7, 1)})))
    async with bench(model, stub=stub) as b:
        told = await b.frontend.run([5] * 20, seed=7)
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT and told.failed is not None
        assert told.failed.reason == "NO_ID_LEFT" and "leave no id that may come next" in told.failed.message
        assert len(told.ids) == 1


async def test_prompt_logprobs_of_two_large_steps_may_wait(model: Path) -> None:
    """8,192 positions with 100 alternatives each are 6.6 MB a step; what waits is told as it is taken."""
    config = SchedulerConfig(model=str(model), max_num_batched_tokens=8192, max_logprobs=100)
    assert config.most_scores_bytes > 6_000_000
    outbox = Outbox(pending_limit_bytes(config.most_scores_bytes))
    for step in range(2):
        top = np.zeros((8192, 100))
        step_scores = Scores(1 + 8192 * step, *np.zeros((2, 8192), np.float32), top, top)
        outbox.put_outputs(Outputs(step, scores=[(1, step_scores)]))
    outbox.put_outputs(Outputs(2, [1], [1], [5]))
    told = 0
    while told < 2 * 8192:
        message = await outbox.take()
        assert message is not None and message.ByteSize() < 1 << 20
        told += sum(len(one.logprobs.logprobs) // 4 for one in message.outputs.prompt_logprobs)
    assert message.outputs.token_ids


async def test_a_slow_frontend_gets_every_position_in_messages_of_bounded_size(tmp_path: Path, model: Path) -> None:
    async with bench(model, max_num_batched_tokens=64) as b, Frontend(b.server, window_bytes=4096) as slow:
        await slow.greeted()
        slow.pause()
        told = [await slow.submit(list(range(300)), max_tokens=300, prompt_logprobs=0, seed=n) for n in range(6)]
        await asyncio.sleep(0.3)
        slow.resume()
        await finished(*told)
        assert all(mine.scores == [own_logprob(i) for i in range(1, 300)] for mine in told)
        assert all(mine.ids == expected_ids(range(300), n, 300, 512) for n, mine in enumerate(told))


@pytest.mark.parametrize("budget", [5, 256])
async def test_alternatives_to_prompt_ids_and_output_ids_reach_those_who_asked(model: Path, budget: int) -> None:
    async with bench(model, max_num_batched_tokens=budget, max_num_seqs=8) as b:
        prompts = [list(range(n, n + length)) for n, length in enumerate((2, 16, 33))]
        told = [
            await b.frontend.submit(prompt, prompt_logprobs=5 * n, logprobs=20 - 10 * n, max_tokens=6)
            for n, prompt in enumerate(prompts)
        ]
        await finished(*told)
        for n, (prompt, mine) in enumerate(zip(prompts, told, strict=True)):
            assert mine.scores == [own_logprob(token_id) for token_id in prompt[1:]]
            assert mine.score_tops == [alternatives(token_id, 5 * n) for token_id in prompt[1:]]
            assert len(mine.ids) == 6 and mine.tops == [alternatives(token_id, 20 - 10 * n) for token_id in mine.ids]


def test_alternatives_that_do_not_fit_their_counts_are_an_impossible_result() -> None:
    good = stub_columns([(-1.0, 1), (-2.0, 2)], [[(5, -0.5)], [(6, -0.25)]])
    result, _ = decode_result(
        executor_pb2.StepResult(step=1, prompt_logprobs=[executor_pb2.PromptLogprobs(slot=7, start=1, logprobs=good)]),
        2,
    )
    assert result.scores[7].top_ids.tolist() == [[5], [6]] and result.scores[7].since(2).top_ids.tolist() == [[6]]
    token_ids = np.uint32([3, 4]).tobytes()
    _, own = decode_result(executor_pb2.StepResult(step=1, token_ids=token_ids, logprobs=good), 2)
    assert own[1].top_ids == np.uint32([6]).tobytes() and own[0].top_logprobs == np.float32([-0.5]).tobytes()
    for name, value in (
        ("top_ids", b""),
        ("top_logprobs", b"\0" * 12),
        ("top_counts", np.uint32([2, 0, 0]).tobytes()),
        ("top_counts", np.uint32([2**32 - 1, 2**32 - 1]).tobytes()),
        ("top_counts", b""),
    ):
        bad = generation_pb2.LogprobColumns()
        bad.CopyFrom(good)
        setattr(bad, name, value)
        entry = executor_pb2.PromptLogprobs(slot=7, start=1, logprobs=bad)
        for message in (
            executor_pb2.StepResult(step=1, prompt_logprobs=[entry]),
            executor_pb2.StepResult(step=1, token_ids=token_ids, logprobs=bad),
        ):
            with pytest.raises(ResultError, match="do not fit"):
                decode_result(message, 2)
    uneven = stub_columns([(-1.0, 1), (-2.0, 2)], [[(5, -0.5)], []])
    with pytest.raises(ResultError, match="more alternatives to one position"):
        entry = executor_pb2.PromptLogprobs(slot=7, start=1, logprobs=uneven)
        decode_result(executor_pb2.StepResult(step=1, prompt_logprobs=[entry]), 2)


def test_messages_count_alternatives_too_and_a_position_with_more_than_one_may_hold_goes_alone() -> None:
    wide = replace(scores(1, 5), top_ids=np.zeros((5, 3), np.uint32), top_logprobs=np.zeros((5, 3), np.float32))
    for limit, expected in ((3, [1, 1, 1, 1, 1]), (8, [2, 2, 1]), (19, [4, 1]), (20, [5])):
        told, rest = [], Outputs(1, scores=[(1, wide)])
        while rest is not None:
            taken, rest = cut(rest, max_ids=limit)
            told.append(taken)
        assert [sum(len(entry.logprobs) for _, entry in part.scores) for part in told] == expected
        assert positions([span for part in told for span in part.scores], 1) == [1, 2, 3, 4, 5]


def test_a_step_whose_prompt_logprobs_pass_a_message_is_refused_at_the_start() -> None:
    assert MAX_SCORES_BYTES <= MAX_MESSAGE_BYTES // 2
    # 12 + 8 k bytes a position: 172 for 20, of which 195,083 fit 32 MB, and 20 for 1.
    for tokens, expected in ((256, 20), (195_083, 20), (195_084, 19), (1_677_721, 1), (1_677_722, 0), (2**21, 0)):
        assert SchedulerConfig(max_num_batched_tokens=tokens, model="m").most_logprobs == expected
    assert SchedulerConfig(max_num_batched_tokens=8192, max_logprobs=500, model="m").max_logprobs == 500
    with pytest.raises(ValueError, match="prompt logprobs of a step may take 65634304 bytes, more than 33554432"):
        SchedulerConfig(max_num_batched_tokens=8192, max_logprobs=1000, model="m")


def test_the_contract_counts_positions_from_1() -> None:
    entry = encode(Outputs(1, scores=[(3, scores(1, 1))])).outputs.prompt_logprobs[0]
    assert entry == engine_pb2.PromptLogprobs(
        request_id=3,
        start=1,
        logprobs=generation_pb2.LogprobColumns(logprobs=np.float32([-1]).tobytes(), ranks=np.uint32([1]).tobytes()),
    )
