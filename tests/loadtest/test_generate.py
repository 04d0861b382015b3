"""`python -m loadtest.generate` as a user runs it."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from loadtest.generate import main
from loadtest.report import ROOT
from loadtest.stub_engine import Faults, StubEngine
from tests.frontend.harness import VOCAB_SIZE, Served, serving, text_checkpoint

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny-text")


async def generate(served: Served, *flags: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a process of its own."""
    command = [sys.executable, "-m", "loadtest.generate", "--address", f"127.0.0.1:{served.frontend.server.port}"]
    process = await asyncio.create_subprocess_exec(*command, *flags, stdout=PIPE, stderr=PIPE, cwd=ROOT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_a_run_prints_a_table_and_one_json_object_and_writes_what_was_asked_for(
    model: Path, tmp_path: Path
) -> None:
    flags = ["--rate", "100", "--requests", "30", "--warmup", "0.1", "--prompt-tokens", "5-30", "--output-tokens", "8"]
    flags += ["--slo-ttft-s", "30", "--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg")]
    async with serving(model, StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024)) as served:
        code, out, err = await generate(served, *flags)
    assert code == 0, err
    *shown, last = out.splitlines()
    found = json.loads(last)
    written = json.loads((tmp_path / "run.json").read_text())
    outcomes = written.pop("outcomes")
    assert written == found
    assert len(outcomes) == 30
    measured = [outcome for outcome in outcomes if outcome["due_s"] >= 0.1]
    assert found["requests"] == found["ok"] == found["good"] == len(measured) < 30
    assert found["failures"] == {}
    ttft_s = sorted(outcome["token_s"][0] for outcome in measured)
    assert ttft_s[0] <= found["ttft_p50_s"] <= found["ttft_p99_s"] <= ttft_s[-1]
    assert all(any(line.startswith(name) for line in shown) for name in ("ttft", "itl", "e2e", "machine", "commit"))
    assert "<svg" in (tmp_path / "run.svg").read_text()


async def test_failures_are_shown_with_a_reason_and_nothing_but_failures_is_exit_code_1(model: Path) -> None:
    silent = StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024, faults=Faults(silent=True))
    async with serving(model, silent) as served:
        code, out, _ = await generate(served, "--rate", "50", "--requests", "5", "--timeout", "0.5")
    assert code == 1
    assert "5 failed, DEADLINE_EXCEEDED; the first: " in out
    found = json.loads(out.splitlines()[-1])
    assert (found["ok"], found["failures"], found["ttft_p50_s"]) == (0, {"DEADLINE_EXCEEDED": 5}, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "1"], "UNAVAILABLE"),
        (["--rate", "1", "--prompt-tokens", "9-5"], "length '9-5'"),
        (["--rate", "1", "--timeout", "0"], "timeout of 0.0 s"),
        (["--rate", "1", "--json", "/nowhere/run.json"], "no folder /nowhere"),
        (["--rate", "1", "--plot", "run.txt"], "its ending is none of .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_run_is_one_clear_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", NOBODY, *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("loadtest.generate: error: ") and said in err and err.count("\n") == 1


def test_without_matplotlib_a_plot_is_refused_before_the_load_by_the_name_of_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # how Python marks what cannot be imported
    assert main(["--address", NOBODY, "--rate", "1", "--plot", "run.svg"]) == 1
    assert capsys.readouterr() == (
        "",
        "loadtest.generate: error: --plot needs matplotlib, which is not installed: pip install 'triptych[bench]'\n",
    )
