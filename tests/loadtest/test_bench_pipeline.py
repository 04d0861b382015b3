"""The pipeline's benchmark: real processes with few streams, what it counts, and how it fails."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest import bare_server, bench_pipeline, peer_process, pipeline
from loadtest.bench_pipeline import Found
from loadtest.pipeline import Rate, Running, StreamError
from loadtest.stub_engine import Faults, StubEngine
from services.common.errors import StartError
from tests.frontend.harness import VOCAB_SIZE, serving, text_checkpoint

KEYS = {"out_tokens_per_s", "out_tokens_per_s_coalesced", "share_of_bare_grpc"}
"""What every last line of this benchmark holds, at least."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny-text")


def test_the_whole_benchmark_with_few_streams(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--streams", "4", "--tokens", "6", "--bare-tokens", "6", "--coalesced-tokens", "8"]
    assert bench_pipeline.main(["--quick", "--model", str(model), *small]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found.keys() >= KEYS
    assert found["share_of_bare_grpc"] == pytest.approx(found["messages_per_s"] / found["bare_messages_per_s"])
    assert found["out_tokens_per_s"] > 0
    assert any(line.startswith("triptych: scheduler") for line in shown)  # each process's CPU has a row
    with pytest.raises(ProcessLookupError):  # what it started has ended with it
        os.kill(_pid_of(f"--model {model}"), 0)


def _pid_of(part: str) -> int:
    """A process whose command line holds `part`; raises ProcessLookupError where there is none."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if part in file.read_bytes().replace(b"\0", b" ").decode():
                return int(file.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise ProcessLookupError(part)


async def test_messages_and_ids_of_all_streams_are_counted(model: Path) -> None:
    stub = StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024)
    async with serving(model, stub) as served:
        running = Running(f"127.0.0.1:{served.frontend.server.port}", {"this": os.getpid()})
        rate = await pipeline.measure(running, streams=3, tokens=5)
    assert rate.token_ids == 15 and rate.messages <= 15
    assert rate.tokens_per_s == 15 / rate.span_s
    assert rate.cpu_s.keys() == {"this", pipeline.CLIENT}
    assert {len(prompt) for prompt in stub.prompts} == {pipeline.PROMPT_TOKENS}
    assert len({prompt[0] for prompt in stub.prompts}) == 3  # no prefix is shared


async def test_a_stream_that_fails_voids_the_run(model: Path) -> None:
    stub = StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024, faults=Faults(cut_at=3))
    async with serving(model, stub) as served:
        with pytest.raises(StreamError, match="a stream failed, UNAVAILABLE"):
            await pipeline.measure(Running(f"127.0.0.1:{served.frontend.server.port}", {}), streams=2, tokens=8)


async def test_the_bare_pair_speaks_the_same_messages() -> None:
    # By hand: choices (2), in it text (2 + 6) and token_ids, packed (2 + 3).
    assert bare_server.DELTA.ByteSize() == 15
    options = inference_pb2.Options(sampling=generation_pb2.Sampling(temperature=0), max_tokens=7)
    async with pipeline.bare() as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert await pipeline._stream(stub, 0, options) == (7, 7)
        assert pipeline.cpu_seconds(running.pids[pipeline.BARE]) > 0


def rate(messages: int, ids: int, span_s: float) -> Rate:
    return Rate(span_s, messages, ids, dict.fromkeys(("frontend", "scheduler", "executor", "client", "bare server"), 1))


def test_the_share_is_of_each_repetitions_own_pair() -> None:
    bare = [rate(1000, 1000, 1.0), rate(1000, 1000, 2.0), rate(1000, 1000, 1.0)]
    ours = [rate(400, 400, 1.0), rate(500, 500, 2.0), rate(600, 600, 1.0)]
    flat = bench_pipeline.values(Found(bare, ours, [rate(100, 1600, 1.0)]))
    assert flat["share_of_bare_grpc"] == 0.5  # of 0.4, 0.5 and 0.6
    assert (flat["out_tokens_per_s"], flat["out_tokens_per_s_coalesced"]) == (400, 1600)
    assert flat["coalesced_ratio"] == 4
    assert flat["frontend_cpu_us_per_token"] == pytest.approx(1e6 / 500)
    assert bench_pipeline.values(Found(bare, ours))["out_tokens_per_s_coalesced"] is None


async def test_a_process_that_cannot_start_is_one_clear_error() -> None:
    process = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    async with peer_process.running(process, {}, pipe=False) as one:
        with pytest.raises(StartError, match=r"(?s)the thing ended while starting.*no such thing"):
            await pipeline.ready(f"127.0.0.1:{peer_process.free_port()}", {"thing": one}, pipeline.generates)
