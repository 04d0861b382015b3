"""Several engines behind one frontend: which one a request goes to, and how it goes on when that is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest.stub_engine import Faults, StubEngine
from services.common.digests import prompt_digests, root_digest
from services.common.grammar import Grammar, Regex
from services.frontend import fleet as fleet_module
from services.frontend.engine import BlockDigests, Submission
from services.frontend.engine_choice import Expectation, Load
from services.frontend.fleet import Fleet
from services.frontend.journey import MAX_LOSSES, Journey
from tests.frontend.test_engine_client import Box, submission

LONG = 400
STEP_S = 0.003


def expected(engine: StubEngine, prompt: tuple[int, ...], count: int, choice: int = 0) -> tuple[int, ...]:
    """What any stub makes of it."""
    return tuple((engine._next_id(prompt, position) + choice) % 49_152 for position in range(count))


@asynccontextmanager
async def pair(
    first: StubEngine | None = None, second: StubEngine | None = None
) -> AsyncIterator[tuple[StubEngine, StubEngine, Fleet]]:
    """Two engines and their fleet."""
    first, second = first or StubEngine(step_s=STEP_S), second or StubEngine(step_s=STEP_S)
    async with first, second, fleet_of(first, second) as fleet:
        yield first, second, fleet


@asynccontextmanager
async def fleet_of(*engines: StubEngine, failover_s: float = 20.0) -> AsyncIterator[Fleet]:
    fleet = Fleet([engine.address for engine in engines], "t" * 64, failover_s=failover_s)
    await fleet.start()
    try:
        await until(lambda: all(member.client.can_generate() for member in fleet._members))
        yield fleet
        assert fleet.is_idle, "a request is left"
    finally:
        await fleet.close()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def done(journey: Journey, box: Box, choices: int = 1) -> None:
    """Every choice has its finish, or the request its error; then it is closed, as its call would."""
    await box.until(
        lambda box: (
            box.error is not None or sum(outputs.finish is not None for outputs in box.outputs.values()) == choices
        )
    )
    journey.close()


def ask(fleet: Fleet, wanted: Submission) -> tuple[Journey, Box]:
    box = Box()
    return fleet.submit(wanted, box), box


# -- a request whose engine is lost


async def test_requests_of_a_lost_engine_go_on_at_another_and_receive_each_id_once() -> None:
    async with pair() as (first, second, fleet):
        asked = [ask(fleet, submission(n, n + 1, max_tokens=LONG)) for n in range(12)]
        for _, box in asked:
            await box.until_ids()
        assert first.num_running and second.num_running
        await first.stop()
        for n, (journey, box) in enumerate(asked):
            await done(journey, box)
            assert box.error is None
            assert box.outputs[0].token_ids == expected(second, (n, n + 1), LONG)
        assert second.num_running == 0


async def test_choices_that_had_finished_are_not_run_again() -> None:
    async with pair() as (first, second, fleet):
        wanted = replace(submission(5, 6, max_tokens=LONG, num_choices=3), stop_ids=(expected(first, (5, 6), 4)[3],))
        journey, box = ask(fleet, wanted)  # choice 0 stops at its fourth id, the others run on
        await box.until(lambda box: 0 in box.outputs and box.outputs[0].finish is not None)
        there, other = (first, second) if first.num_running else (second, first)
        await there.stop()
        await done(journey, box, choices=3)
        assert [resumed.choice for resumed in other.submits[0].resumed] == [1, 2]
        for choice in (1, 2):
            assert box.outputs[choice].token_ids == expected(other, (5, 6), LONG, choice)


async def test_an_only_engine_is_waited_for_and_goes_on_where_it_was() -> None:
    async with StubEngine(step_s=STEP_S) as engine, fleet_of(engine) as fleet:
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        await engine.stop()
        await until(lambda: bool(fleet._stranded))
        with pytest.raises(Exception, match="no engine is attached"):
            fleet.submit(submission(1), Box())
        await engine.start()
        await done(journey, box)
        assert box.outputs[0].token_ids == expected(engine, (8, 9), LONG)
        assert len(np.frombuffer(engine.submits[-1].resumed[0].token_ids, "<u4")) > 0


async def test_a_request_that_no_engine_takes_up_ends_unavailable_in_time() -> None:
    async with StubEngine(step_s=STEP_S) as engine, fleet_of(engine, failover_s=0.6) as fleet:
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        began_s = time.monotonic()
        await engine.stop()
        error = await box.until_error()
        journey.close()
        assert error.code is grpc.StatusCode.UNAVAILABLE and error.reason == "ENGINE_LOST" and error.retry_after_s
        assert time.monotonic() - began_s >= 0.6


async def test_the_callers_deadline_ends_a_stranded_request() -> None:
    async with StubEngine(step_s=STEP_S) as engine, fleet_of(engine) as fleet:
        journey, box = ask(fleet, replace(submission(8, 9, max_tokens=LONG), timeout_ms=700))
        await box.until_ids()
        await engine.stop()
        error = await box.until_error()
        journey.close()
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_what_is_left_of_the_deadline_goes_to_the_next_engine() -> None:
    async with pair() as (first, second, fleet):
        journey, box = ask(fleet, replace(submission(8, 9, max_tokens=LONG), timeout_ms=60_000))
        await box.until_ids()
        await asyncio.sleep(0.2)
        there, other = (first, second) if first.num_running else (second, first)
        await there.stop()
        await done(journey, box)
        assert other.submits[0].timeout_ms <= 59_800


async def test_a_stranded_request_that_its_client_leaves_is_forgotten() -> None:
    async with StubEngine(step_s=STEP_S) as engine, fleet_of(engine) as fleet:
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        await engine.stop()
        await until(lambda: bool(fleet._stranded))
        journey.close()
        await until(lambda: not fleet._stranded)
        await engine.start()
        await until(fleet.can_generate)
        assert len(engine.submits) == 1


async def test_a_request_that_every_engine_dies_of_ends_after_so_many() -> None:
    gone = Faults(failed=engine_pb2.Failed(code=14, reason="ENGINE_LOST", message="gone"))
    async with pair(StubEngine(faults=gone), StubEngine(faults=gone)) as (first, second, fleet):
        journey, box = ask(fleet, submission(8, 9))
        error = await box.until_error()
        journey.close()
        assert error.code is grpc.StatusCode.UNAVAILABLE and error.reason == "ENGINE_LOST"
        assert len(first.submits) + len(second.submits) == MAX_LOSSES + 1


async def test_a_request_that_every_engine_drops_at_once_ends_when_all_have() -> None:
    lost = engine_pb2.Failed(code=14, reason="EXECUTOR_LOST", message="gone")
    faults = Faults(failed=lost, failed_at=0)
    async with pair(StubEngine(faults=faults), StubEngine(faults=faults)) as (first, second, fleet):
        journey, box = ask(fleet, submission(8, 9))
        error = await box.until_error()
        journey.close()
        assert error.code is grpc.StatusCode.UNAVAILABLE and error.message == "gone"
        assert len(first.submits) + len(second.submits) == 2


async def test_what_is_refused_where_there_is_no_other_engine_is_refused_at_once() -> None:
    full = engine_pb2.Failed(code=8, reason="QUEUE_FULL", message="full")
    async with StubEngine(faults=Faults(failed=full)) as engine, fleet_of(engine) as fleet:
        journey, box = ask(fleet, submission(8, 9))
        assert (await box.until_error()).reason == "QUEUE_FULL"
        journey.close()
        assert len(engine.submits) == 1


async def test_what_one_engine_refuses_for_want_of_room_goes_to_another() -> None:
    full = engine_pb2.Failed(code=8, reason="QUEUE_WAIT", message="too long", retry_after_ms=500)
    async with pair(StubEngine(faults=Faults(failed=full)), StubEngine()) as (first, second, fleet):
        fleet._members[1].expectation.told(Load(waiting_tokens=10**9))  # so that the first is chosen
        journey, box = ask(fleet, submission(8, 9))
        await done(journey, box)
        assert box.error is None and len(first.submits) == len(second.submits) == 1


async def test_what_all_refuse_is_told_when_the_first_of_them_may_take_it() -> None:
    def engine(retry_after_ms: int) -> StubEngine:
        told = engine_pb2.Failed(code=8, reason="QUEUE_WAIT", message="too long", retry_after_ms=retry_after_ms)
        return StubEngine(faults=Faults(failed=told))

    engines = [engine(retry_after_ms) for retry_after_ms in (900, 300, 600)]
    async with engines[0], engines[1], engines[2], fleet_of(*engines) as fleet:
        for _ in range(3):
            journey, box = ask(fleet, submission(8, 9))
            error = await box.until_error()
            journey.close()
            assert error.reason == "QUEUE_WAIT" and error.retry_after_s == 0.3
        assert [len(engine.submits) for engine in engines] == [3, 3, 3], "each is asked once"


async def test_a_request_that_had_begun_waits_out_a_full_queue() -> None:
    full = engine_pb2.Failed(code=8, reason="QUEUE_FULL", message="full")
    async with pair(StubEngine(step_s=STEP_S), StubEngine(faults=Faults(failed=full), step_s=STEP_S)) as (
        first,
        second,
        fleet,
    ):
        fleet._members[1].expectation.told(Load(waiting_tokens=10**9))  # so that the first is chosen
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        await first.stop()
        await second.wait_until(lambda engine: len(engine.submits) >= 1)
        second.faults = Faults()
        await done(journey, box)
        assert box.error is None and box.outputs[0].token_ids == expected(second, (8, 9), LONG)


async def test_an_error_of_the_request_itself_moves_nothing() -> None:
    poison = engine_pb2.Failed(code=13, reason="POISON", message="the executor was lost 3 times with this request")
    faults = Faults(failed=poison, failed_at=2)
    async with pair(StubEngine(faults=faults), StubEngine(faults=faults)) as (first, second, fleet):
        journey, box = ask(fleet, submission(8, 9))
        assert (await box.until_error()).reason == "POISON"
        journey.close()
        assert len(first.submits) + len(second.submits) == 1


# -- engines that are there and make no tokens


async def test_a_silent_engine_is_left_for_one_that_speaks_and_what_it_says_later_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.frontend.engine_client.HEARTBEAT_LIMIT_S", 0.5)
    async with (
        StubEngine(step_s=STEP_S, heartbeat_s=0.1) as first,
        StubEngine(step_s=STEP_S, heartbeat_s=0.1) as second,
        fleet_of(first, second) as fleet,
    ):
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        there, other = (first, second) if first.num_running else (second, first)
        there.pause()
        await other.wait_until(lambda engine: len(engine.submits) == 1)
        there.resume()
        await done(journey, box)
        assert box.outputs[0].token_ids == expected(other, (8, 9), LONG)
        await until(lambda: there.num_running == 0)  # aborted there


async def test_an_only_engine_that_stays_silent_is_given_up_as_a_lost_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.engine_client.HEARTBEAT_LIMIT_S", 0.5)
    monkeypatch.setattr("services.frontend.fleet.LOOK_INTERVAL_S", 0.1)
    async with StubEngine(step_s=STEP_S, heartbeat_s=0.1) as engine, fleet_of(engine, failover_s=1.0) as fleet:
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        engine.pause()
        await asyncio.sleep(0.9)
        assert box.error is None, "it may speak again, and the request is whole then"
        error = await box.until_error()
        assert error.code is grpc.StatusCode.UNAVAILABLE and error.reason == "ENGINE_SILENT"
        assert error.retry_after_s is not None
        journey.close()
        engine.resume()
        await until(lambda: engine.num_running == 0)  # aborted there


async def test_an_only_engine_that_was_silent_for_a_while_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.engine_client.HEARTBEAT_LIMIT_S", 0.3)
    monkeypatch.setattr("services.frontend.fleet.LOOK_INTERVAL_S", 0.1)
    async with StubEngine(step_s=STEP_S, heartbeat_s=0.1) as engine, fleet_of(engine) as fleet:
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        engine.pause()
        await until(lambda: fleet._members[0].is_silent)
        engine.resume()
        await done(journey, box)
        assert box.outputs[0].token_ids == expected(engine, (8, 9), LONG) and len(engine.submits) == 1


async def test_requests_leave_an_engine_that_recovers_and_stay_with_one_that_drains() -> None:
    async with pair() as (first, second, fleet):
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        there, other = (first, second) if first.num_running else (second, first)
        there.set_state(engine_pb2.ENGINE_STATE_DRAINING)
        await asyncio.sleep(0.3)
        assert there.num_running == 1 and not other.submits
        there.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
        await other.wait_until(lambda engine: len(engine.submits) == 1)
        await done(journey, box)
        assert box.outputs[0].token_ids == expected(other, (8, 9), LONG)


async def test_an_only_engine_that_recovers_keeps_its_requests() -> None:
    async with StubEngine(step_s=STEP_S) as engine, fleet_of(engine) as fleet:
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        engine.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
        await asyncio.sleep(0.2)
        await done(journey, box)
        assert len(engine.submits) == 1 and box.outputs[0].token_ids == expected(engine, (8, 9), LONG)


async def test_nothing_begins_or_goes_on_with_other_weights_while_the_first_are_there() -> None:
    async with pair(second=StubEngine(step_s=STEP_S, fingerprint="e" * 64)) as (first, second, fleet):
        facts = fleet.require()
        own, odd = (first, second) if facts.fingerprint == "f" * 64 else (second, first)
        asked = [ask(fleet, submission(n, max_tokens=LONG)) for n in range(4)]
        for _, box in asked:
            await box.until_ids()
        assert not odd.submits
        await own.stop()
        await until(
            lambda: fleet.can_generate() and fleet.require().fingerprint != facts.fingerprint
        )  # for what is new
        fresh, fresh_box = ask(fleet, submission(77))
        await done(fresh, fresh_box)
        assert len(odd.submits) == 1 and fresh_box.error is None
        await own.start()
        for n, (journey, box) in enumerate(asked):
            await done(journey, box)
            assert box.outputs[0].token_ids == expected(own, (n,), LONG)
        assert len(odd.submits) == 1


async def test_a_request_that_executors_die_of_does_not_visit_one_engine_after_the_other() -> None:
    """It stays where it came to from an engine that recovered, so that one scheduler sees it kill twice."""
    async with pair() as (first, second, fleet):
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        there, other = (first, second) if first.num_running else (second, first)
        other.pause()
        there.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
        await other.wait_until(lambda engine: len(engine.submits) == 1)
        there.set_state(engine_pb2.ENGINE_STATE_SERVING)
        other.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
        await asyncio.sleep(0.3)
        assert (len(there.submits), len(other.submits)) == (1, 1)
        other.set_state(engine_pb2.ENGINE_STATE_SERVING)
        other.resume()
        await done(journey, box)
        assert box.outputs[0].token_ids == expected(other, (8, 9), LONG)


async def test_a_frontend_that_was_stopped_itself_takes_no_engine_for_silent() -> None:
    async with pair() as (first, second, fleet):
        asked = [ask(fleet, submission(n, max_tokens=LONG)) for n in range(6)]
        for _, box in asked:
            await box.until_ids()
        before = (len(first.submits), len(second.submits))
        for member in fleet._members:
            member.client._heard_s -= 3600  # as after a stop of this process
        fleet._look()
        await asyncio.sleep(0.2)
        assert (len(first.submits), len(second.submits)) == before
        for journey, box in asked:
            await done(journey, box)


async def test_an_engine_is_left_only_where_another_can_take_the_request() -> None:
    async with pair(second=StubEngine(step_s=STEP_S, context_tokens=64)) as (first, second, fleet):
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        first.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
        await asyncio.sleep(0.2)
        first.set_state(engine_pb2.ENGINE_STATE_SERVING)
        await done(journey, box)
        assert not second.submits and len(first.submits) == 1


async def test_what_any_engine_takes_is_taken_and_goes_there() -> None:
    small = StubEngine(context_tokens=64, max_choices=1, features=("resume",))
    async with pair(small, StubEngine(context_tokens=512, max_choices=4)) as (first, second, fleet):
        for facts in (fleet.require(), fleet.facts):
            assert facts is not None
            assert (facts.context_tokens, facts.max_choices) == (512, 4) and "grammar" in facts.features
        journey, box = ask(fleet, submission(8, 9, max_tokens=100))
        await done(journey, box)
        assert (len(first.submits), len(second.submits)) == (0, 1)
        await second.stop()
        await until(lambda: fleet.require().context_tokens == 64)


async def test_a_grammar_goes_to_an_engine_that_serves_grammars() -> None:
    async with pair(StubEngine(features=("resume",)), StubEngine()) as (first, second, fleet):
        for n in range(6):
            journey, box = ask(fleet, replace(submission(n), grammar=Grammar(Regex("a"))))
            await done(journey, box)
        assert not first.submits and len(second.submits) == 6


async def test_a_moved_request_waits_out_two_full_queues() -> None:
    full = Faults(failed=engine_pb2.Failed(code=8, reason="QUEUE_FULL", message="full"))
    engines = [
        StubEngine(step_s=STEP_S),
        StubEngine(step_s=STEP_S, faults=full),
        StubEngine(step_s=STEP_S, faults=full),
    ]
    async with engines[0], engines[1], engines[2], fleet_of(*engines) as fleet:
        for member in fleet._members[1:]:
            member.expectation.told(Load(waiting_tokens=10**9))  # so that the first is chosen
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        await engines[0].stop()
        for engine in engines[1:]:
            await engine.wait_until(lambda engine: len(engine.submits) >= 1)
        await asyncio.sleep(0.3)
        assert sum(len(engine.submits) for engine in engines[1:]) <= 4, "it asks again and again"
        for engine in engines[1:]:
            engine.faults = Faults()
        await done(journey, box)
        assert box.error is None and box.outputs[0].token_ids == expected(engines[1], (8, 9), LONG)


async def test_drained_without_an_engine_a_frontend_waits_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "DRAIN_FAILOVER_S", 0.2)
    async with StubEngine(step_s=STEP_S) as engine, fleet_of(engine, failover_s=3600) as fleet:
        journey, box = ask(fleet, submission(8, 9, max_tokens=LONG))
        await box.until_ids()
        await engine.stop()
        fleet.drain()
        assert (await box.until_error()).reason == "ENGINE_LOST"
        journey.close()


async def test_random_losses_change_no_id() -> None:
    """Two engines that are stopped and started in turn, 40 streams of 1 to 3 choices."""
    async with pair() as (first, second, fleet):
        asked = [(n, *ask(fleet, submission(n, 3, max_tokens=150 + 7 * n, num_choices=1 + n % 3))) for n in range(40)]
        for turn in range(6):
            engine = (first, second)[turn % 2]
            await asyncio.sleep(0.15)
            await engine.stop()
            await asyncio.sleep(0.1)
            await engine.start()
        for n, journey, box in asked:
            await done(journey, box, choices=1 + n % 3)
            for choice in range(1 + n % 3):
                assert box.outputs[choice].token_ids == expected(first, (n, 3), 150 + 7 * n, choice)
                assert box.outputs[choice].finish is not None and box.outputs[choice].finish.reason == "length"


# -- which engine


def prompt_of(num_blocks: int, first: int = 0) -> Submission:
    ids = tuple(range(first, first + 16 * num_blocks))
    root = root_digest(tenant="", salt="", adapter="")
    digests = BlockDigests(root, prompt_digests(root, np.array(ids, np.uint32), 16))
    return replace(submission(*ids), digests=digests)


def blocks(wanted: Submission) -> tuple[list[bytes], int]:
    assert wanted.digests is not None
    column = wanted.digests.blocks
    return [column[start : start + 32] for start in range(0, len(column), 32)], 16


def test_the_engine_with_the_shorter_wait_is_expected_to_begin_first() -> None:
    quick, slow = Expectation(), Expectation()
    quick.told(Load(requests=9, waiting_tokens=5_000, prompt_tokens_per_s=10_000))
    slow.told(Load(requests=1, waiting_tokens=2_000, prompt_tokens_per_s=1_000))
    wanted = prompt_of(2)
    assert quick.cost(wanted, *blocks(wanted))[0] == pytest.approx((5_000 + 32) / 10_000)
    assert quick.cost(wanted, *blocks(wanted)) < slow.cost(wanted, *blocks(wanted))


def test_what_was_sent_counts_until_the_engine_has_told_of_it() -> None:
    expectation = Expectation()
    expectation.told(Load(prompt_tokens_per_s=100))
    expectation.sent(prompt_of(4), *blocks(prompt_of(4)))
    assert expectation.cost(prompt_of(1, first=1000), *blocks(prompt_of(1, first=1000))) == ((64 + 16) / 100, 1, 4)
    expectation.told(Load(requests=1, prompt_tokens_per_s=100))
    assert expectation.cost(prompt_of(1, first=1000), *blocks(prompt_of(1, first=1000))) == (16 / 100, 1, 4)


def test_a_prompt_goes_where_its_beginning_is_cached_unless_the_wait_is_longer() -> None:
    warm, cold = Expectation(), Expectation()
    warm.sent(prompt_of(8), *blocks(prompt_of(8)))
    for expectation in (warm, cold):
        expectation.told(Load(prompt_tokens_per_s=100))
    longer = prompt_of(10)
    assert warm.cost(longer, *blocks(longer))[0] == pytest.approx(32 / 100)  # 8 of its 10 blocks are there
    assert cold.cost(longer, *blocks(longer))[0] == pytest.approx(160 / 100)
    warm.told(Load(waiting_tokens=129, prompt_tokens_per_s=100))
    assert warm.cost(longer, *blocks(longer)) > cold.cost(longer, *blocks(longer))
    warm.forget()
    assert warm.cost(longer, *blocks(longer))[0] == pytest.approx(160 / 1000)


def test_no_more_blocks_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.engine_choice.MAX_DIGESTS", 8)
    expectation = Expectation()
    expectation.sent(prompt_of(6), *blocks(prompt_of(6)))
    expectation.sent(prompt_of(6, first=5000), *blocks(prompt_of(6, first=5000)))
    assert len(expectation._blocks) == 8
    assert expectation._missing_tokens(prompt_of(6, first=5000), *blocks(prompt_of(6, first=5000))) == 1


async def test_requests_spread_over_equal_engines_and_prompts_in_common_meet() -> None:
    engines = [StubEngine(step_s=STEP_S, heartbeat_s=0.02) for _ in range(2)]
    async with pair(*engines) as (_, _, fleet):
        families = [replace(prompt_of(8, first=1000 * n), max_tokens=2) for n in range(6)]
        where: dict[int, set[str]] = {}
        for _ in range(3):
            for n, wanted in enumerate(families):
                journey, box = ask(fleet, wanted)
                where.setdefault(n, set()).add(journey.last_engine)
                await done(journey, box)
                await until(lambda: all(not member.expectation._sent_tokens for member in fleet._members))
        assert all(len(engines) == 1 for engines in where.values())
        assert len(set.union(*where.values())) == 2
