"""What an executor counts of its steps."""

from __future__ import annotations

import numpy as np
import pytest
from triptych.executor.v1 import executor_pb2 as pb

from services.common.config import load
from services.common.errors import StartError
from services.common.telemetry import names
from services.executor import wire
from services.executor.config import ExecutorConfig
from services.executor.plan import BadPlanError, Plan
from services.executor.tallies import Tallies

COUNTS = (names.EXECUTOR_STEPS, names.EXECUTOR_ROWS, names.EXECUTOR_TOKENS)


def plan(step: int, token_counts: list[int], uncounted: tuple[int, ...] = ()) -> Plan:
    """Row i is slot i's."""
    empty = np.zeros(0, np.int64)
    slots, counts = np.arange(len(token_counts)), np.array(token_counts, np.int64)
    left_out = np.array(uncounted, np.int64)
    return Plan(step, empty, (), empty.reshape(0, 2), slots, counts, None, None, uncounted_slots=left_out)


def told(tallies: Tallies) -> dict[tuple[str, str], float]:
    """Values by metric and its label's value."""
    return {
        (reading.metric.name, *(reading.labels.values() or [""])): reading.value  # type: ignore[misc]
        for reading in tallies.readings()
    }


def test_steps_rows_tokens_and_times_add_up_and_a_plan_without_rows_is_no_step() -> None:
    tallies = Tallies(ranks=2)
    tallies.stepped(plan(1, [1, 1, 30]), pb.StepResult(wait_us=1_000, execute_us=20_000, sample_us=500))
    tallies.stepped(plan(2, [1]), pb.StepResult(wait_us=0, execute_us=10_000, sample_us=500))
    tallies.stepped(plan(3, []), pb.StepResult(execute_us=7))
    values = told(tallies)
    assert values[names.EXECUTOR_STEPS.name, ""] == 2
    assert values[names.EXECUTOR_ROWS.name, ""] == 4
    assert values[names.EXECUTOR_TOKENS.name, ""] == 33
    times = {part: values[names.EXECUTOR_STEP_TIME.name, part] for part in ("wait", "execute", "sample")}
    assert times == pytest.approx({"wait": 0.001, "execute": 0.03, "sample": 0.001})
    assert values[names.RANKS.name, ""] == 2


def test_rows_that_are_nobodys_are_left_out_and_a_step_of_these_alone_is_none() -> None:
    tallies = Tallies(ranks=1)
    tallies.stepped(plan(1, [1], uncounted=(0,)), pb.StepResult(wait_us=1_000, execute_us=20_000, sample_us=500))
    values = told(tallies)
    assert [values[metric.name, ""] for metric in COUNTS] == [0, 0, 0]
    assert values[names.EXECUTOR_STEP_TIME.name, "execute"] == 0
    tallies.stepped(plan(2, [1, 1, 30], uncounted=(1,)), pb.StepResult(execute_us=10_000))
    values = told(tallies)
    assert [values[metric.name, ""] for metric in COUNTS] == [1, 2, 31]
    assert values[names.EXECUTOR_STEP_TIME.name, "execute"] == pytest.approx(0.01)


def test_a_plan_says_at_the_door_which_rows_are_nobodys() -> None:
    column = np.array([3, 5], "<u4").tobytes()
    read = wire.plan(pb.StepPlan(step=1, slots=column, uncounted_slots=column[4:]))
    assert read.uncounted_slots.tolist() == [5]
    with pytest.raises(BadPlanError, match="uncounted_slots"):
        wire.plan(pb.StepPlan(step=1, slots=column, uncounted_slots=b"abc"))


def test_a_fault_is_counted_by_its_kind_and_each_kind_is_told_before_it_happens() -> None:
    tallies = Tallies(ranks=1)
    before = {key: value for key, value in told(tallies).items() if key[0] == names.EXECUTOR_FAULTS.name}
    assert len(before) == len(pb.FaultKind.keys()) - 1 and set(before.values()) == {0}
    tallies.faulted(pb.FAULT_KIND_OUT_OF_MEMORY)
    assert told(tallies)[names.EXECUTOR_FAULTS.name, "out_of_memory"] == 1


def test_a_rank_that_tells_nothing_refuses_a_port_for_metrics() -> None:
    flags = ["--tp-size", "2", "--tp-rank", "1", "--tp-rendezvous", "127.0.0.1:5000", "--metrics-port", "0"]
    with pytest.raises(StartError, match="metrics_port is set, but tp_rank is 1; rank 0 tells"):
        load(ExecutorConfig, flags, {})
