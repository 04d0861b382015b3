"""`triptych replay FILE`: the pure core over what was recorded; every plan must come out as it was."""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.executor.v1 import executor_pb2

from services.common.digests import chained_digest
from services.common.errors import StartError
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import FailureKind, RequestKey
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import ResultError
from services.scheduler.recording import FORMAT, plan_to_json, result_from_json, submission_from_json


@dataclass
class Replayed:
    """What became of a recording."""

    calls: int = 0
    plans: int = 0
    plan_s: list[float] = field(default_factory=list)
    """Of the calls of plan that made one."""
    apply_s: list[float] = field(default_factory=list)
    difference: str | None = None
    """The first plan that is not as recorded; what comes after it says nothing."""


def replay(path: Path) -> Replayed:
    """Runs it to its end or the first difference. Raises StartError for a file that is no recording."""
    lines = _lines(path)
    header = next(lines, None)
    if header is None or header.get("format") != FORMAT:
        raise StartError(f"{path} is not a recording of this version: its first line does not say {FORMAT!r}")
    core = Scheduler(Limits(**header["limits"]), chained_digest if header["prefix_cache"] else None)
    done = Replayed()
    for line in lines:
        done.calls += 1
        _call(core, line, done)
        if done.difference is not None:
            break
    return done


def main(argv: Sequence[str]) -> int:
    """Exit code 1 where a plan differs."""
    parser = argparse.ArgumentParser(prog="triptych replay", description="Runs the scheduler's core over a recording.")
    parser.add_argument("file", type=Path, help="what --record wrote")
    done = replay(parser.parse_args(argv).file)
    times = f"median plan {_median_ms(done.plan_s):.3f} ms, apply {_median_ms(done.apply_s):.3f} ms"
    if done.difference is not None:
        print(f"plan {done.plans} (call {done.calls}) differs\n{done.difference}")
        return 1
    print(f"{done.calls} calls, {done.plans} plans, all as recorded; {times}")
    return 0


def _call(core: Scheduler, line: dict[str, Any], done: Replayed) -> None:
    match line["call"]:
        case "submit":
            core.submit(submission_from_json(line["submission"]), line["now_ns"])
        case "abort":
            core.abort(RequestKey(*line["key"]))
        case "expire":
            core.expire(line["now_ns"])
        case "fail_all":
            core.fail_all(FailureKind(line["kind"]), line["message"])
        case "new_epoch":
            core.new_epoch(line["num_blocks"], line["max_in_flight"])
        case "flush_prefix_cache":
            core.flush_prefix_cache()
        case "plan":
            _plan(core, line, done)
        case "apply":
            began_s = time.perf_counter()
            try:
                core.apply(result_from_json(line["result"]), line["now_ns"])
            except ResultError:
                return  # then it was refused when it was recorded, too; nothing has changed
            done.apply_s.append(time.perf_counter() - began_s)
        case other:
            raise StartError(f"line {done.calls + 1} of the recording has the unknown call {other!r}")


def _plan(core: Scheduler, line: dict[str, Any], done: Replayed) -> None:
    began_s = time.perf_counter()
    plan = core.plan(line["now_ns"])
    took_s = time.perf_counter() - began_s
    core.take_kv_events()
    if plan is not None:
        done.plans += 1
        done.plan_s.append(took_s)
    if (made := plan_to_json(plan)) != line["plan"]:
        done.difference = f"recorded:\n{_readable(line['plan'])}\nnow:\n{_readable(made)}"


def _readable(plan: str | None) -> str:
    if plan is None:
        return "  no plan"
    return str(executor_pb2.StepPlan.FromString(base64.b64decode(plan)))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for text in file:
                if text.endswith("\n"):  # else the process was killed while it wrote this one
                    yield json.loads(text)
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{path} is not a recording: {error}") from error


def _median_ms(times_s: list[float]) -> float:
    return 1000 * statistics.median(times_s) if times_s else 0.0
