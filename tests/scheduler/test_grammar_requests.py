"""Requests with grammars beside the step loop: resumed ones are replayed off it, and each ends in words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest.stub_executor import Faults, StubExecutor
from services.frontend import tokenizer
from services.scheduler.grammar_state import GrammarState
from tests.frontend.harness import text_checkpoint
from tests.scheduler.test_grammars import PROMPT, WIDE, Grammar, choices, run, stopped, submit
from tests.support.attached import Frontend, bench, finished, ids_column, scheduler_for, until

FORCES = "[ab](cdefghij){5}[ab]{3}"
"""The first id is drawn, many follow without an alternative, then some are drawn again."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("grammar-requests") / "tiny-text")


def ids_of(model: Path, text: str) -> tuple[int, ...]:
    return tokenizer.load(tokenizer.load_definition(model), model).encode(text, add_special_tokens=False)


def resumed(*outputs: Sequence[int]) -> list[engine_pb2.Submit.Resumed]:
    """One a choice, from 0 on."""
    return [engine_pb2.Submit.Resumed(choice=i, token_ids=ids_column(ids)) for i, ids in enumerate(outputs)]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("forced", [False, True])
async def test_resumed_ids_are_replayed_beside_the_event_loop(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool, forced: bool
) -> None:
    grammar = Grammar(regex="(ab){4}c{20}", forced_tokens=forced)
    head = ids_of(model, "abab")
    took: list[tuple[threading.Thread, int]] = []
    take, force = GrammarState.take, GrammarState.force
    forced_in: list[threading.Thread] = []

    def watched_take(self: GrammarState, token_ids: Sequence[int]) -> None:
        took.append((threading.current_thread(), len(token_ids)))
        take(self, token_ids)

    def watched_force(self: GrammarState) -> list[int]:
        forced_in.append(threading.current_thread())
        return force(self)

    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        if is_known:
            await run(made.frontend, grammar)
        monkeypatch.setattr(GrammarState, "take", watched_take)
        monkeypatch.setattr(GrammarState, "force", watched_force)
        fields = {"num_choices": 3, "resumed": resumed(head, head, ()), "request_id": 100}
        await submit(made.frontend, grammar, **fields)
        told = [made.frontend.told.setdefault(100 + i, made.frontend.told[100].__class__()) for i in range(3)]
        await finished(*told)
        assert all(stopped(one) for one in told)
    assert [count for _, count in took].count(len(head)) >= 2  # they were replayed
    loop = threading.main_thread()
    assert all(thread is not loop for thread, _ in took)
    assert all(thread is not loop for thread in forced_in) and bool(forced_in) == forced


async def test_others_go_on_while_resumed_ids_are_replayed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(regex="a{200}")
    gate = threading.Event()
    take = GrammarState.take

    def held_take(self: GrammarState, token_ids: Sequence[int]) -> None:
        if len(token_ids) > 1:  # no drawn ids
            assert gate.wait(60)
        take(self, token_ids)

    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        await run(made.frontend, grammar, max_tokens=1)
        monkeypatch.setattr(GrammarState, "take", held_take)
        slow = await submit(made.frontend, grammar, resumed=resumed(ids_of(model, "a" * 40)))
        left = await submit(made.frontend, grammar, resumed=resumed(ids_of(model, "a" * 41)), request_id=90)
        plain = await made.frontend.run(PROMPT, max_tokens=30)
        assert len(plain.ids) == 30 and not slow.done.is_set()
        assert made.server.engine._grammars.num_waiting == 2
        await made.frontend.abort(90)
        await made.frontend.synced()
        assert made.server.engine._grammars.num_waiting == 1 and not left.done.is_set()
        gate.set()
        await finished(slow)
        assert slow.failed is None


async def test_resumed_ids_that_the_grammar_does_not_allow_are_refused(model: Path) -> None:
    async with bench(model) as made:
        told = await run(made.frontend, choices("yes"), resumed=resumed(ids_of(model, "no")))
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT and "does not allow" in told.failed.message


async def test_a_drain_that_is_cut_short_ends_what_is_still_being_compiled(model: Path) -> None:
    async with (
        StubExecutor(max_in_flight=2) as stub,
        scheduler_for(stub, model) as server,
        Frontend(server) as frontend,
    ):
        await frontend.greeted()
        told = [await submit(frontend, Grammar(regex=WIDE + end)) for end in "bcd"]
        resumes = await submit(frontend, Grammar(regex=WIDE + "b"), resumed=resumed(ids_of(model, "aa")))
        await frontend.synced()
        assert server.engine._grammars.num_waiting == 4
        draining = asyncio.ensure_future(server.engine.drain())
        await until(lambda: server.engine.state == engine_pb2.ENGINE_STATE_DRAINING)
        assert not any(one.done.is_set() for one in told)
        draining.cancel()
        await finished(*told, resumes)
        for one in (*told, resumes):
            assert one.code is grpc.StatusCode.UNAVAILABLE and one.failed.reason == "DRAINING"
        assert server.engine._grammars.num_waiting == 0
        with pytest.raises(asyncio.CancelledError):
            await draining


async def test_a_later_epoch_whose_executor_lacks_grammars_refuses_them_and_serves_the_rest(model: Path) -> None:
    stub = StubExecutor(max_in_flight=2, faults=Faults(fault_at_step=5))
    async with bench(model, stub=stub) as made:
        assert "grammar" in (await made.frontend.greeted()).features
        stub._features = ()
        lost = await run(made.frontend, Grammar(regex="[ab]{60}"))
        assert lost.code is grpc.StatusCode.UNAVAILABLE
        await until(lambda: made.server.engine.can_generate)
        told = await run(made.frontend, choices("yes"))
        assert told.code is grpc.StatusCode.UNIMPLEMENTED and "grammar" in told.failed.message
        assert len((await made.frontend.run(PROMPT)).ids) == 8


async def test_what_was_compiled_for_an_executor_that_served_grammars_is_refused_by_one_that_does_not(
    model: Path,
) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        told = await submit(made.frontend, Grammar(regex=WIDE + "b"))
        await made.frontend.synced()
        assert made.server.engine._grammars.num_waiting == 1
        made.stub._features = ()
        await made.stub.stop()
        await until(lambda: not made.server.engine.can_generate)
        await made.stub.start()
        await until(lambda: made.server.engine.can_generate)
        await finished(told)
        assert told.code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE)


async def test_the_hello_lists_resume(model: Path) -> None:
    async with bench(model) as made:
        assert "resume" in (await made.frontend.greeted()).features


async def test_forced_ids_count_as_output_a_second_and_not_as_prompt(model: Path) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        told = await run(made.frontend, Grammar(regex=FORCES, forced_tokens=True))
        assert stopped(told) and any(plan.forced_ids for plan in made.stub.plans)
        await made.idle()
        throughput = made.server.engine._throughput
        assert throughput._output_tokens == len(told.ids)
        assert throughput._prompt_tokens == len(PROMPT)


async def test_a_request_that_computes_forced_ids_decodes(model: Path) -> None:
    stub = StubExecutor(max_in_flight=1)
    async with bench(model, stub=stub) as made:
        stub.hold()
        told = await submit(made.frontend, Grammar(regex=FORCES, forced_tokens=True))
        stub.let(1)
        await told.first.wait()
        await stub.plan_arrived(2)
        await until(lambda: len(told.ids) > 1)
        assert stub.plans[-1].forced_ids
        phases = made.server.engine.core.by_phase()
        assert (phases["prefill"], phases["decode"]) == (0, 1)
        stub.release()
        await finished(told)
