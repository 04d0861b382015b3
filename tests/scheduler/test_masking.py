"""When which mask is sent, and what becomes of a job that goes wrong; states and ids are real, the stream is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from triptych.executor.v1 import executor_pb2

from services.common.grammar import Grammar, Regex
from services.common.grammar_compiler import Compiler
from services.scheduler.core.request import Failure, FailureKind, RequestKey
from services.scheduler.core.step import MaskedRow, StepPlan, Updates
from services.scheduler.executor_run import ExecutorLostError, ExecutorRun
from services.scheduler.grammar_state import Bans, GrammarState
from services.scheduler.masking import Masking, Said
from tests.support.attached import until
from tests.support.checkpoints import EOS_ID, tiny_tokenizer

VOCAB = 512
ONE, TWO = RequestKey(1, 1), RequestKey(1, 2)


@dataclass
class Run:
    """Keeps what is sent; loses it while `lost`."""

    sent: list[tuple[int, int, bool]] = field(default_factory=list)
    """(step, slot, whether the mask forbids anything)"""
    lost: bool = False

    async def send_masks(self, masks: executor_pb2.Masks) -> None:
        if self.lost:
            raise ExecutorLostError("gone")
        self.sent += [(masks.step, mask.slot, mask.HasField("bitmap")) for mask in masks.masks]


@dataclass
class Rig:
    compiler: Compiler
    said: list[Said] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    failing: bool = False

    def __post_init__(self) -> None:
        self.masking = Masking(self.settle, lambda: None)

    def settle(self, said: Said) -> int:
        if self.failing:
            raise RuntimeError("a fault of ours")
        self.said.append(said)
        return 0

    def admit(self, key: RequestKey, pattern: str = "[ab]{3}", output: Sequence[int] = (), **more: Any) -> None:
        state = GrammarState(self.compiler.compile(Grammar(Regex(pattern))).deep_copy(), VOCAB, Bans())
        state.take(output)
        self.masking.admit(key, state, num_known=len(output), **more)

    def plan(self, step: int, *rows: tuple[RequestKey, int, int]) -> None:
        masked = [MaskedRow(*row) for row in rows]
        plan = StepPlan(step, [], [], [], [row.slot for row in masked], [1] * len(masked), 0, masked=masked)
        self.masking.planned(plan, cast(ExecutorRun, self.run))

    def apply(self, step: int, *ids: tuple[RequestKey, int], failed: tuple[RequestKey, ...] = ()) -> None:
        updates = Updates(step, keys=[key for key, _ in ids])
        updates.take_ids([token_id for _, token_id in ids], set())
        updates.failed += [Failure(key, FailureKind.ROW_FAILED, "it failed") for key in failed]
        self.masking.applied(updates, cast(ExecutorRun, self.run))

    async def sent(self, count: int) -> list[tuple[int, int, bool]]:
        await until(lambda: len(self.run.sent) == count and not self.masking.is_busy)
        return self.run.sent

    def id(self, text: str) -> int:
        (token_id,) = self.compiler.tokenizer.tokenize_str(text)
        return int(token_id)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tiny_tokenizer(tmp_path_factory.mktemp("masking") / "tiny"), [EOS_ID])


@pytest.fixture
async def rig(compiler: Compiler) -> AsyncIterator[Rig]:
    made = Rig(compiler)
    yield made
    made.masking.close()


async def test_a_mask_waits_for_the_id_before_it_and_no_longer(rig: Rig) -> None:
    rig.admit(ONE)
    rig.admit(TWO)
    rig.plan(7, (ONE, 0, 0))
    rig.plan(8, (ONE, 0, 1), (TWO, 3, 0))
    assert await rig.sent(2) == [(7, 0, True), (8, 3, True)]
    rig.apply(7, (ONE, rig.id("a")))
    assert (await rig.sent(3))[2] == (8, 0, True)
    rig.plan(9, (ONE, 0, 2), (TWO, 3, 1))
    rig.apply(8, (ONE, rig.id("b")), (TWO, rig.id("b")))
    assert sorted((await rig.sent(5))[3:]) == [(9, 0, True), (9, 3, True)]
    assert rig.masking.num_masks == 5 and rig.masking.num_requests == 2


async def test_a_row_whose_request_has_ended_gets_a_mask_that_allows_everything(rig: Rig) -> None:
    for key in (ONE, TWO):
        rig.admit(key)
    rig.plan(1, (ONE, 0, 0), (TWO, 1, 0))
    rig.plan(2, (ONE, 0, 1), (TWO, 1, 1))
    await rig.sent(2)
    rig.masking.forget(ONE)  # aborted
    rig.apply(1, failed=(TWO,))
    assert sorted((await rig.sent(4))[2:]) == [(2, 0, False), (2, 1, False)]
    rig.admit(ONE)
    rig.masking.forget(ONE)
    rig.plan(3, (ONE, 0, 0))
    assert (await rig.sent(5))[4] == (3, 0, False)


async def test_the_end_of_a_language_is_said_and_the_row_behind_it_is_let_go(rig: Rig) -> None:
    rig.admit(ONE, "ab?")
    rig.plan(1, (ONE, 0, 0))
    rig.plan(2, (ONE, 0, 1))
    rig.plan(3, (ONE, 0, 2))
    rig.apply(1, (ONE, rig.id("a")))
    rig.apply(2, (ONE, rig.id("b")))
    assert await rig.sent(3) == [(1, 0, True), (2, 0, True), (3, 0, False)]
    assert rig.said == [Said(ONE, None, True, None)]


async def test_a_request_may_come_with_output(rig: Rig) -> None:
    rig.admit(ONE, output=[rig.id("a"), rig.id("a")])
    rig.plan(1, (ONE, 0, 2))
    await rig.sent(1)
    rig.apply(1, (ONE, rig.id("b")))
    await until(lambda: bool(rig.said))
    assert rig.said[0].ended


async def test_an_epoch_that_is_gone_takes_its_rows_with_it(rig: Rig) -> None:
    rig.admit(ONE)
    rig.plan(1, (ONE, 0, 0))
    rig.plan(2, (ONE, 0, 1))
    await rig.sent(1)
    rig.run.lost = True
    rig.apply(1, (ONE, rig.id("a")))
    await until(lambda: not rig.masking.is_busy)
    rig.masking.new_epoch()
    rig.run = Run()
    rig.plan(1, (ONE, 5, 1))
    assert await rig.sent(1) == [(1, 5, True)]


async def test_a_fault_in_one_job_leaves_the_next_its_masks(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.admit(ONE, "a")
    rig.admit(TWO)
    rig.failing = True
    rig.plan(1, (ONE, 0, 0))
    rig.apply(1, (ONE, rig.id("a")))
    await until(lambda: not rig.masking.is_busy)
    assert "masks of step 2 failed" in caplog.text
    rig.plan(2, (TWO, 1, 0))
    assert (await rig.sent(2))[1] == (2, 1, True)


async def test_a_state_that_breaks_fails_its_request_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.admit(ONE)
    rig.admit(TWO)
    true_mask = GrammarState.mask
    broken = rig.masking._entries[ONE].state

    def mask(self: GrammarState) -> np.ndarray[Any, np.dtype[np.uint32]] | None:
        if self is broken:
            raise ValueError("a bug")
        return true_mask(self)

    monkeypatch.setattr(GrammarState, "mask", mask)
    rig.plan(1, (ONE, 0, 0), (TWO, 1, 0))
    assert await rig.sent(2) == [(1, 0, False), (1, 1, True)]
    (said,) = rig.said
    assert said.key == ONE and said.failure is not None and said.failure[0] is FailureKind.GRAMMAR_FAILED


async def test_nothing_is_started_for_requests_without_a_grammar(rig: Rig) -> None:
    rig.apply(1, (ONE, 5))
    await asyncio.sleep(0)
    assert not rig.masking.is_busy and rig.masking._task is None
