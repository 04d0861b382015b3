"""What is recorded runs again to the same plans, and a core that decides otherwise is found out."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triptych.inference.v1 import generation_pb2

from services.cli.main import main
from services.common.digests import chained_digest
from services.common.errors import StartError
from services.scheduler import recording
from services.scheduler.core.request import FailureKind, RequestKey, Submission
from services.scheduler.core.step import Scores
from services.scheduler.recording import (
    Journal,
    RecordedScheduler,
    result_from_json,
    scores_to_json,
    submission_from_json,
    submission_to_json,
)
from services.scheduler.replay import replay
from tests.support.attached import bench
from tests.support.core_driver import MS, CoreDriver


def recorded_run(path: Path, steps: int = 300) -> CoreDriver:
    """Random requests, with everything that can happen to a core."""
    journal = Journal(path)
    driver = CoreDriver(num_blocks=12, block_tokens=2, context_tokens=20, max_in_flight=2)
    driver.core = RecordedScheduler(driver.limits, chained_digest, journal)
    rng = random.Random(3)
    for _ in range(steps):
        event = rng.random()
        if event < 0.5:
            grammar = rng.choice(["", "masked", "stepwise"])
            driver.submit(
                rng.randint(1, 10),
                is_masked=grammar != "",
                is_stepwise=grammar == "stepwise",
                choices=rng.choice([1, 2]),
                prompt_logprobs=rng.choice([None, 0]),
                deadline_ns=driver.now_ns + rng.randrange(40) * MS if rng.random() < 0.2 else None,
            )
        if event > 0.9:
            driver.abort(rng.choice(list(driver.seen)))
        if live := [key for key, seen in driver.seen.items() if not seen.ended]:
            if 0.8 < event < 0.85:
                driver.finish(rng.choice(live))
            elif 0.85 < event < 0.9:
                driver.take(driver.core.fail(rng.choice(live), FailureKind.GRAMMAR_FAILED, "it cannot go on"))
        if event > 0.98:
            if event > 0.99:
                driver.take(driver.core.fail_all(FailureKind.EXECUTOR_LOST, "lost"))
            driver.lose_executor()
        if 0.5 < event < 0.52:
            driver.core.flush_prefix_cache()
        driver.take(driver.core.expire(driver.now_ns))
        driver.step()
    driver.run()
    journal.close()
    return driver


def test_a_recording_comes_out_as_it_was(tmp_path: Path) -> None:
    driver = recorded_run(tmp_path / "core.jsonl")
    done = replay(tmp_path / "core.jsonl")
    assert done.difference is None
    assert done.plans == len(driver.plans) > 100
    assert driver.core.counters.preemptions and driver.core.counters.prefix_hit_tokens
    calls = {json.loads(line).get("call") for line in (tmp_path / "core.jsonl").read_text().splitlines()}
    assert calls >= {"force", "finish", "fail", "fail_all", "submit", "abort", "expire", "plan", "apply"}
    assert calls >= {"lose_epoch", "new_epoch"}
    assert any(plan.forced_ids for plan in driver.plans) and any(plan.masked for plan in driver.plans)


def test_a_core_that_decides_otherwise_is_found_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "core.jsonl"
    recorded_run(path)
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["limits"]["max_step_tokens"] -= 9
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert main(["replay", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "differs" in shown and "recorded:" in shown and "now:" in shown


def test_the_command_says_that_all_is_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_run(tmp_path / "core.jsonl", steps=20)
    assert main(["replay", str(tmp_path / "core.jsonl")]) == 0
    assert "all as recorded" in capsys.readouterr().out


def test_a_recording_cut_off_in_a_line_runs_to_that_line(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    recorded_run(path, steps=20)
    whole = path.read_text()
    path.write_text(whole[: len(whole) * 2 // 3])
    assert replay(path).difference is None


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is not a recording"), ('{"a": 1}\n', "is not a recording of this version"), ("{\n", "is not a recording")],
)
def test_another_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "f").write_text(content)
    with pytest.raises(StartError, match=words):
        replay(tmp_path / "f")


SUBMIT = {"call": "submit", "now_ns": 1, "submission": {"key": [1, 1], "from_a_later_version": 1}}


@pytest.mark.parametrize(
    ("line", "at", "words"),
    [
        (1, {"format": recording.FORMAT, "prefix_cache": True}, "'limits' is missing"),
        (1, {"format": recording.FORMAT, "limits": {"from_a_later_version": 1}, "prefix_cache": True}, "from_a_later"),
        (2, {}, "'call' is missing"),
        (2, [1], "list"),
        (2, {"call": "dance"}, "the call 'dance' is unknown"),
        (2, {"call": "plan", "now_ns": 1, "plan": "!"}, "base64"),
        (2, SUBMIT, "is missing"),
        (2, {"call": "apply", "now_ns": 1, "result": {"failed": [], "scores": [], "from_a_later_version": 1}}, "later"),
    ],
)
def test_a_line_of_another_version_is_named_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: int, at: Any, words: str
) -> None:
    path = tmp_path / "core.jsonl"
    recorded_run(path, steps=3)
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(at)
    path.write_text("\n".join(lines) + "\n")
    assert main(["replay", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"triptych: error: line {line} of {path} cannot be read: ") and words in err
    assert err.count("\n") == 1 and "another version" in err


def test_a_file_whose_first_line_is_a_list_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("[]\n")
    with pytest.raises(StartError, match="is not a recording of this version"):
        replay(tmp_path / "f")


def test_a_fault_of_the_core_itself_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_run(tmp_path / "core.jsonl", steps=3)

    def broken(core: object, now_ns: int) -> None:
        raise KeyError("a fault of the core")

    monkeypatch.setattr("services.scheduler.core.scheduler.Scheduler.plan", broken)
    with pytest.raises(KeyError, match="a fault of the core"):
        replay(tmp_path / "core.jsonl")


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("triptych: error: cannot read")


def test_a_submission_survives_the_file() -> None:
    submission = Submission(
        key=RequestKey(3, 2**60),
        prompt_ids=np.array([1, 2**32 - 1], dtype=np.uint32),
        max_tokens=5,
        stop_ids=frozenset({9, 2}),
        seed=2**64 - 1,
        more_seeds=(7,),
        resumed=((1, (4, 5)),),
        sampling=generation_pb2.Sampling(temperature=0.5, logit_bias={3: -1.0}),
        deadline_ns=12,
        tenant="é",
        root_digest=b"r" * 32,
        digests=b"d" * 64,
    )
    read = submission_from_json(json.loads(json.dumps(submission_to_json(submission))))
    for name, value in vars(submission).items():
        assert np.array_equal(getattr(read, name), value) if name == "prompt_ids" else getattr(read, name) == value


def test_the_recording_of_a_scheduler_that_died_survives_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    recorded_run(path, steps=20)
    before = path.read_text()
    Journal(path).close()
    assert path.read_text() == "" and (tmp_path / "core.jsonl.old").read_text() == before
    Journal(path).close()  # nothing was recorded between: what is worth keeping stays
    assert (tmp_path / "core.jsonl.old").read_text() == before


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--record cannot write"):
        Journal(tmp_path / "none" / "file")


def test_a_disk_that_is_too_slow_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "MAX_PENDING_BYTES", 1000)
    journal = Journal(tmp_path / "core.jsonl")
    for _ in range(3):
        journal.write({"call": "plan"})
    journal.close()
    assert [record.message for record in caplog.records] == [
        f"recording to {tmp_path / 'core.jsonl'} ends: more than 1000 bytes wait for the disk"
    ]


def test_long_lines_count_for_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_PENDING_BYTES", 100_000)
    journal = Journal(tmp_path / "core.jsonl")
    monkeypatch.setattr(journal._lines, "get", lambda: None)  # from now on nothing is taken
    for _ in range(20):
        journal.write({"call": "abort", "key": [1, 2]})
    assert not journal._ended
    journal.write({"call": "apply", "result": {"token_ids": [1] * 4000}})
    assert journal._ended


async def test_a_scheduler_records_what_its_frontends_ask(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    async with bench(model, record=path) as b:
        sampling: dict[str, Any] = {"sampling": generation_pb2.Sampling(temperature=0.5)}
        await b.frontend.run([1, 2, 3], max_tokens=5, num_choices=1, **sampling)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it holds prompts
    done = replay(path)
    assert done.difference is None and done.plans >= 5


@pytest.mark.parametrize("alternatives", [0, 1, 3])
def test_prompt_logprobs_of_a_result_survive_the_file(alternatives: int) -> None:
    ids = np.arange(2 * alternatives, dtype=np.uint32).reshape(2, alternatives)
    scores = Scores(3, np.float32([-0.1, -9999]), np.uint32([1, 2**32 - 1]), ids, ids.astype(np.float32) / -3)
    values = json.loads(json.dumps([scores_to_json(7, scores)]))
    read = result_from_json({"step": 1, "token_counts": [0], "token_ids": [], "failed": [], "scores": values}).scores
    assert list(read) == [7] and read[7].start == 3
    assert read[7].logprobs.tolist() == scores.logprobs.tolist() and read[7].ranks.tolist() == scores.ranks.tolist()
    assert read[7].top_ids.tolist() == ids.tolist() and read[7].top_logprobs.tolist() == scores.top_logprobs.tolist()
