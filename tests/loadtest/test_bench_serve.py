"""The serving benchmark: its last line, its ratio, and the whole of it on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loadtest import bench_serve, open_loop, serve_load
from loadtest.report import ROOT
from loadtest.serve_load import LoadError, Measured
from loadtest.stub_engine import Faults, StubEngine
from tests.frontend.harness import VOCAB_SIZE, serving, text_checkpoint

KEYS = {
    "total_tokens_per_s",
    "out_tokens_per_s",
    "ttft_p50_s",
    "itl_p50_s",
    "single_stream_tokens_per_s",
    "ratio_vs_vllm",
}
"""What every last line of this benchmark holds, at least."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny-text")


@asynccontextmanager
async def measured_on(model: Path, stub: StubEngine, times: int = 1) -> AsyncIterator[Measured]:
    measured = Measured(bench_serve.OURS)
    async with serving(model, stub) as served:
        ask = open_loop.over_grpc(served.channel)
        await serve_load.repeat(ask, measured, vocab_size=VOCAB_SIZE, times=times, seed=0)
        yield measured


async def test_the_load_is_16_streams_and_then_1_and_the_keys_come_out(model: Path) -> None:
    stub = StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024)
    async with measured_on(model, stub) as measured:
        _, _, *prompts = stub.prompts  # the two that warm up
    assert len(prompts) == 17
    assert all(50 <= len(prompt) <= 550 for prompt in prompts)
    assert {submit.max_tokens for submit in stub.submits[2:]} == {64}
    assert len(prompts[-1]) == 300
    found = bench_serve.values([measured])
    assert found.keys() >= KEYS
    assert found["ratio_vs_vllm"] is None
    one = measured.repetitions[0]
    assert found["out_tokens_per_s"] == pytest.approx(16 * 64 / one.many.span_s)
    assert found["total_tokens_per_s"] == pytest.approx((16 * 64 + sum(map(len, prompts[:16]))) / one.many.span_s)
    assert found["single_stream_tokens_per_s"] == pytest.approx(64 / one.single.e2e_s[0], rel=0.01)


async def test_the_ratio_is_of_medians_of_the_same_run(model: Path) -> None:
    async with measured_on(model, StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024)) as ours:
        pass
    slow = StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024, step_s=0.01)
    async with measured_on(model, slow) as theirs:
        pass
    peer = Measured("vllm", theirs.repetitions)
    found = bench_serve.values([ours, peer])
    assert found["ratio_vs_vllm"] == found["total_tokens_per_s"] / found["vllm_total_tokens_per_s"]
    assert found["vllm_itl_p50_s"] >= 0.01  # the stub's step
    assert found["ratio_vs_transformers"] is None


async def test_a_failed_request_voids_the_benchmark(model: Path) -> None:
    stub = StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024, faults=Faults(cut_at=3))
    with pytest.raises(LoadError, match="triptych: a request of 64 prompt tokens failed: UNAVAILABLE"):
        async with measured_on(model, stub):
            pass


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--model", "/nowhere/model"], "no model at '/nowhere/model'"), (["--plot", "x.svg"], "triptych[bench]")],
)
def test_what_cannot_start_is_one_clear_line(
    flags: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench_serve.main(["--quick", *flags]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("loadtest.bench_serve: error: ") and said in last


async def bench(model: Path, **variables: str) -> tuple[list[str], dict[str, object]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIPTYCH_")} | variables
    command = [sys.executable, "-m", "loadtest.bench_serve", "--quick", "--model", str(model)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, cwd=ROOT, env=environment)
    try:
        out, err = await asyncio.wait_for(process.communicate(), 280)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    *shown, last = out.decode().splitlines()
    return shown, json.loads(last)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_whole_benchmark_on_a_tiny_checkpoint_beside_transformers(tmp_path: Path) -> None:
    from tests.support.checkpoints import tiny_llama

    shown, found = await bench(tiny_llama(tmp_path / "tiny-llama"), TRIPTYCH_PEER_TRANSFORMERS=sys.executable)
    assert found.keys() >= KEYS
    assert found["quick"] is True and found["repetitions"] == 1
    assert found["ratio_vs_vllm"] is None
    assert "left out: vllm (set TRIPTYCH_PEER_VLLM)" in shown
    for key in KEYS - {"ratio_vs_vllm"}:
        assert isinstance(found[key], float) and found[key] > 0
        assert found[f"transformers_{key}"] > 0  # type: ignore[operator]
    ratio = found["total_tokens_per_s"] / found["transformers_total_tokens_per_s"]  # type: ignore[operator]
    assert found["ratio_vs_transformers"] == pytest.approx(ratio)


async def test_ended_from_outside_it_leaves_no_process_behind(model: Path) -> None:
    command = [sys.executable, "-m", "loadtest.bench_serve", "--quick", "--model", str(model)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, cwd=ROOT)
    try:
        async with asyncio.timeout(60):
            while len(_processes_of(model)) < 4:  # itself and the three services
                assert process.returncode is None
                await asyncio.sleep(0.05)
            process.terminate()
            await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 143
    assert _processes_of(model) == []


def _processes_of(model: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(model).encode() in arguments:
            found.append(file.parent.name)
    return found
