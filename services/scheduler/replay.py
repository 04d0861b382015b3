"""`triptych replay FILE`: the pure core over what was recorded; every plan must come out as it was."""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from triptych.executor.v1 import executor_pb2

from services.common.digests import chained_digest
from services.common.errors import StartError
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import FailureKind, RequestKey
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import ResultError, StepResult
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
    """Runs it to its end or the first difference. Raises StartError for a file that is no recording of this version."""
    lines = _lines(path)
    core = _core(next(lines, None), path)
    done = Replayed()
    for line in lines:
        done.calls += 1
        try:
            call = _read(line)
        except (KeyError, TypeError, ValueError, AttributeError, DecodeError) as error:
            raise _unreadable(path, done.calls + 1, error) from None
        call(core, done)
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


def _core(header: Any, path: Path) -> Scheduler:
    """The core as it was before the first call."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise StartError(f"{path} is not a recording of this version: its first line does not say {FORMAT!r}")
    try:
        return Scheduler(Limits(**header["limits"]), chained_digest if header["prefix_cache"] else None)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, 1, error) from None


def _read(line: Any) -> Callable[[Scheduler, Replayed], object]:
    """One call, ready to be made. What its line cannot be read for is raised here, what the core raises is not."""
    match line["call"]:
        case "submit":
            submission, now_ns = submission_from_json(line["submission"]), line["now_ns"]
            return lambda core, done: core.submit(submission, now_ns)
        case "abort":
            key = RequestKey(*line["key"])
            return lambda core, done: core.abort(key)
        case "expire":
            now_ns = line["now_ns"]
            return lambda core, done: core.expire(now_ns)
        case "force":
            key, token_ids, now_ns = RequestKey(*line["key"]), [int(i) for i in line["token_ids"]], line["now_ns"]
            return lambda core, done: core.force(key, token_ids, now_ns)
        case "finish":
            key, now_ns = RequestKey(*line["key"]), line["now_ns"]
            return lambda core, done: core.finish(key, now_ns)
        case "fail":
            key, kind, message = RequestKey(*line["key"]), FailureKind(line["kind"]), line["message"]
            return lambda core, done: core.fail(key, kind, message)
        case "fail_all":
            kind, message = FailureKind(line["kind"]), line["message"]
            return lambda core, done: core.fail_all(kind, message)
        case "lose_epoch":
            blamed_slots = [int(slot) for slot in line["blamed_slots"]]
            return lambda core, done: core.lose_epoch(blamed_slots)
        case "new_epoch":
            num_blocks, max_in_flight = line["num_blocks"], line["max_in_flight"]
            return lambda core, done: core.new_epoch(num_blocks, max_in_flight)
        case "flush_prefix_cache":
            return lambda core, done: core.flush_prefix_cache()
        case "plan":
            now_ns, recorded = line["now_ns"], line["plan"]
            _parsed(recorded)
            return lambda core, done: _plan(core, now_ns, recorded, done)
        case "apply":
            result, now_ns = result_from_json(line["result"]), line["now_ns"]
            return lambda core, done: _apply(core, result, now_ns, done)
        case other:
            raise ValueError(f"the call {other!r} is unknown")


def _apply(core: Scheduler, result: StepResult, now_ns: int, done: Replayed) -> None:
    began_s = time.perf_counter()
    try:
        core.apply(result, now_ns)
    except ResultError:
        return  # then it was refused when it was recorded, too; nothing has changed
    done.apply_s.append(time.perf_counter() - began_s)


def _plan(core: Scheduler, now_ns: int, recorded: str | None, done: Replayed) -> None:
    began_s = time.perf_counter()
    plan = core.plan(now_ns)
    took_s = time.perf_counter() - began_s
    core.take_kv_events()
    if plan is not None:
        done.plans += 1
        done.plan_s.append(took_s)
    if (made := plan_to_json(plan)) != recorded:
        done.difference = f"recorded:\n{_readable(recorded)}\nnow:\n{_readable(made)}"


def _readable(plan: str | None) -> str:
    return "  no plan" if plan is None else str(_parsed(plan))


def _parsed(plan: str | None) -> executor_pb2.StepPlan | None:
    return None if plan is None else executor_pb2.StepPlan.FromString(base64.b64decode(plan, validate=True))


def _unreadable(path: Path, line: int, error: Exception) -> StartError:
    what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return StartError(
        f"line {line} of {path} cannot be read: {what}; it is damaged, or another version of triptych wrote it: replay "
        "it with that one"
    )


def _lines(path: Path) -> Iterator[Any]:
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
