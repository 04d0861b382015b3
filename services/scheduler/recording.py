"""`--record`: everything the core is told, in order, and every plan it made; `triptych replay` runs it again.

The file is JSON lines. The first names the format, the limits and whether there is a prefix cache; each later one is a
call of the core:

    {"call": "submit", "now_ns": 1, "submission": {...}}      {"call": "plan", "now_ns": 2, "plan": "<base64>"}
    {"call": "apply", "now_ns": 3, "result": {...}}           {"call": "abort", "key": [1, 7]}

A plan is the contract's StepPlan, null where none was made. The file holds prompts and outputs as token ids.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from triptych.inference.v1 import generation_pb2

from services.common.errors import StartError
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Failure, FailureKind, RequestKey, Submission
from services.scheduler.core.residents import ChainedDigest
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import Scores, StepPlan, StepResult, Updates
from services.scheduler.plan_codec import encode_plan

log = logging.getLogger(__name__)

FORMAT = "triptych core recording 1"
MAX_PENDING_BYTES = 256 * 1024 * 1024
"""Of what waits for the disk; past it recording ends, rather than the memory or the step loop's time."""

_LINE_BYTES, _ITEM_BYTES = 1024, 32
"""What a line takes in memory, about, and an item of a list in it."""


class RecordedScheduler(Scheduler):
    """The core, each of whose calls is written down before it is made; `journal` outlives it."""

    def __init__(self, limits: Limits, chained_digest: ChainedDigest | None, journal: Journal) -> None:
        super().__init__(limits, chained_digest)
        self._journal = journal
        journal.write({"format": FORMAT, "limits": asdict(limits), "prefix_cache": chained_digest is not None})

    def submit(self, submission: Submission, now_ns: int) -> Failure | None:
        """See Scheduler."""
        self._write("submit", now_ns=now_ns, submission=submission_to_json(submission))
        return super().submit(submission, now_ns)

    def abort(self, key: RequestKey) -> None:
        """See Scheduler."""
        self._write("abort", key=list(key))
        super().abort(key)

    def expire(self, now_ns: int) -> Updates:
        """See Scheduler."""
        self._write("expire", now_ns=now_ns)
        return super().expire(now_ns)

    def fail_all(self, kind: FailureKind, message: str) -> Updates:
        """See Scheduler."""
        self._write("fail_all", kind=kind.value, message=message)
        return super().fail_all(kind, message)

    def force(self, key: RequestKey, token_ids: Sequence[int], now_ns: int) -> Updates:
        """See Scheduler."""
        self._write("force", key=list(key), token_ids=list(token_ids), now_ns=now_ns)
        return super().force(key, token_ids, now_ns)

    def finish(self, key: RequestKey, now_ns: int) -> Updates:
        """See Scheduler."""
        self._write("finish", key=list(key), now_ns=now_ns)
        return super().finish(key, now_ns)

    def fail(self, key: RequestKey, kind: FailureKind, message: str) -> Updates:
        """See Scheduler."""
        self._write("fail", key=list(key), kind=kind.value, message=message)
        return super().fail(key, kind, message)

    def lose_epoch(self, blamed_slots: Collection[int] = ()) -> Updates:
        """See Scheduler."""
        self._write("lose_epoch", blamed_slots=list(blamed_slots))
        return super().lose_epoch(blamed_slots)

    def new_epoch(self, num_blocks: int | None = None, max_in_flight: int | None = None) -> None:
        """See Scheduler."""
        self._write("new_epoch", num_blocks=num_blocks, max_in_flight=max_in_flight)
        super().new_epoch(num_blocks, max_in_flight)

    def flush_prefix_cache(self) -> int:
        """See Scheduler."""
        self._write("flush_prefix_cache")
        return super().flush_prefix_cache()

    def plan(self, now_ns: int) -> StepPlan | None:
        """See Scheduler."""
        plan = super().plan(now_ns)
        self._write("plan", now_ns=now_ns, plan=plan_to_json(plan))
        return plan

    def apply(self, result: StepResult, now_ns: int) -> Updates:
        """See Scheduler."""
        written = {
            "step": result.step,
            "token_counts": result.token_counts,
            "token_ids": result.token_ids,
            "failed": list(result.failed.items()),
            "scores": [scores_to_json(slot, scores) for slot, scores in result.scores.items()],
        }
        self._write("apply", now_ns=now_ns, result=written)
        return super().apply(result, now_ns)

    def _write(self, call: str, **arguments: Any) -> None:
        self._journal.write({"call": call, **arguments})


class Journal:
    """A file that a thread of its own writes, so that no step waits for the disk. Raises StartError without one.

    A file that is there already becomes `path`.old: whoever starts a scheduler again that has died does not lose what
    it was told.
    """

    def __init__(self, path: Path) -> None:
        try:
            if path.is_file() and path.stat().st_size:
                path.replace(path.with_name(f"{path.name}.old"))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise StartError(f"--record cannot write {path}: {error.strerror}") from error
        self._path = path
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lines: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue()
        self._put_bytes = 0  # written by one thread each
        self._taken_bytes = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Returns at once."""
        if self._ended:
            return
        size_bytes = _memory_bytes(line)
        if self._put_bytes + size_bytes - self._taken_bytes > MAX_PENDING_BYTES:
            self._end(f"more than {MAX_PENDING_BYTES} bytes wait for the disk")
            return
        self._put_bytes += size_bytes
        self._lines.put((line, size_bytes))

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self._ended = True
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._file as file:
            while (taken := self._lines.get()) is not None:
                line, size_bytes = taken
                self._taken_bytes += size_bytes
                try:
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    if self._lines.empty():
                        file.flush()
                except OSError as error:
                    self._end(error.strerror or str(error))
                    return

    def _end(self, reason: str) -> None:
        self._ended = True
        log.error("recording to %s ends: %s", self._path, reason)


def _memory_bytes(value: Any) -> int:
    """Of a line, roughly; lists of numbers are long, and looked at as a whole."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple)):
        return _ITEM_BYTES * len(value)
    return _LINE_BYTES + sum(map(_memory_bytes, value.values())) if isinstance(value, dict) else 0


def submission_to_json(submission: Submission) -> dict[str, Any]:
    """Plain values; bytes and columns in base64."""
    values = {field.name: getattr(submission, field.name) for field in fields(submission)}
    values["key"] = list(submission.key)
    values["prompt_ids"] = _text(submission.prompt_ids.astype("<u4").tobytes())
    values["stop_ids"] = sorted(submission.stop_ids)
    values["root_digest"], values["digests"] = _text(submission.root_digest), _text(submission.digests)
    values["sampling"] = None if submission.sampling is None else _text(submission.sampling.SerializeToString())
    return values


def submission_from_json(values: dict[str, Any]) -> Submission:
    """What `submission_to_json` wrote."""
    read = dict(values)
    read["key"] = RequestKey(*values["key"])
    read["prompt_ids"] = np.frombuffer(base64.b64decode(values["prompt_ids"]), dtype="<u4")
    read["stop_ids"] = frozenset(values["stop_ids"])
    read["more_seeds"] = tuple(values["more_seeds"])
    read["resumed"] = tuple((choice, tuple(ids)) for choice, ids in values.get("resumed", ()))
    read["root_digest"], read["digests"] = (base64.b64decode(values[name]) for name in ("root_digest", "digests"))
    if values["sampling"] is not None:
        read["sampling"] = generation_pb2.Sampling.FromString(base64.b64decode(values["sampling"]))
    return Submission(**read)


def result_from_json(values: dict[str, Any]) -> StepResult:
    """What was applied."""
    scores = dict(scores_from_json(entry) for entry in values.get("scores", ()))
    return StepResult(**{**values, "failed": dict(values["failed"]), "scores": scores})


def scores_to_json(slot: int, scores: Scores) -> list[Any]:
    """Columns in base64, to the bit; how many alternatives a position has stands before those."""
    columns = (scores.logprobs.astype("<f4"), scores.ranks.astype("<u4"))
    told: list[Any] = [slot, scores.start, *(_text(column.tobytes()) for column in columns)]
    if alternatives := scores.top_ids.shape[1]:
        tops = (scores.top_ids.astype("<u4"), scores.top_logprobs.astype("<f4"))
        told += [alternatives, *(_text(column.tobytes()) for column in tops)]
    return told


def scores_from_json(values: list[Any]) -> tuple[int, Scores]:
    """What `scores_to_json` wrote."""
    slot, start, logprobs, ranks, *tops = values
    plain = Scores.plain(
        start, np.frombuffer(base64.b64decode(logprobs), "<f4"), np.frombuffer(base64.b64decode(ranks), "<u4")
    )
    if not tops:
        return slot, plain
    alternatives, ids, top = tops
    return slot, replace(
        plain,
        top_ids=np.frombuffer(base64.b64decode(ids), "<u4").reshape(-1, alternatives),
        top_logprobs=np.frombuffer(base64.b64decode(top), "<f4").reshape(-1, alternatives),
    )


def plan_to_json(plan: StepPlan | None) -> str | None:
    """The contract's message in base64; maps in it come in one order."""
    return None if plan is None else _text(encode_plan(plan).plan.SerializeToString(deterministic=True))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
