"""The executor as a process: it starts, refuses in one line, drains on SIGTERM, and ends itself when hung."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from triptych.executor.v1 import executor_pb2 as pb
from triptych.executor.v1 import executor_pb2_grpc

from services.executor.steps import HUNG_EXIT_STATUS
from tests.executor.mini_scheduler import GREEDY, column
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import health

START_TIMEOUT_S = 90
"""Importing torch and transformers takes most of it, on a machine that does other things too."""
MAIN = (
    "import sys\nfrom services.common.errors import StartError\nfrom services.executor.main import main\n"
    "try:\n    sys.exit(main(sys.argv[1:]))\nexcept StartError as error:\n    sys.exit(f'refused: {error}')\n"
)


@contextlib.contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], executor_pb2_grpc.ExecutorServiceStub, int]]:
    """An executor, a stub of it, and its port."""
    command = [sys.executable, "-c", MAIN, "--port", "0", "--threads", "1", "--kv-memory-bytes", str(64 << 20), *flags]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        lines = []
        while not (found := re.search(r"serving executor on 127\.0\.0\.1:(\d+)", lines[-1] if lines else "")):
            lines.append(running.stderr.readline())
            assert lines[-1], lines
        with grpc.insecure_channel(f"127.0.0.1:{found[1]}") as channel:
            yield running, executor_pb2_grpc.ExecutorServiceStub(channel), int(found[1])
    finally:
        running.kill()
        running.wait()
        running.stderr.close()


def make_ready(stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
    config = pb.EngineConfig(context_tokens=1024, block_tokens=16, max_slots=4, max_step_tokens=1024)
    list(stub.Load(pb.LoadRequest(min_version=1, max_version=1, config=config), timeout=START_TIMEOUT_S))
    stub.Allocate(pb.AllocateRequest(num_blocks=[100]), timeout=START_TIMEOUT_S)


def prefill(tokens: int, deadline_ms: int = 0) -> pb.RunRequest:
    request = pb.NewRequest(
        token_ids=column(*[5] * tokens),
        prompt_tokens=tokens,
        block_ids=[column(*range(1, tokens // 16 + 2))],
        sampling=GREEDY,
    )
    plan = pb.StepPlan(step=1, started=[request], slots=column(0), token_counts=column(tokens), deadline_ms=deadline_ms)
    return pb.RunRequest(plan=plan)


def opening() -> pb.RunRequest:
    return pb.RunRequest(open=pb.Open(epoch=1, version=1))


@pytest.mark.timeout(3 * START_TIMEOUT_S)
def test_G5_sigterm_ends_the_stream_and_the_process_in_order(tiny: Path) -> None:
    with process("--model", str(tiny), "--drain-s", "20") as (running, stub, port):
        assert health(port, "readiness") == "SERVING"  # a scheduler must reach it before any weight is loaded
        make_ready(stub)

        def requests() -> Iterator[pb.RunRequest]:
            yield from [opening(), prefill(64)]
            while running.poll() is None:  # the stream stays open
                time.sleep(0.05)

        events = stub.Run(requests(), timeout=START_TIMEOUT_S)
        assert next(events).HasField("heartbeat")
        while not (event := next(events)).HasField("result"):
            pass
        assert event.result.token_ids
        running.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as error:
            for _ in events:
                pass
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.value.details()
        assert running.wait(20) == 0


@pytest.mark.timeout(3 * START_TIMEOUT_S)
def test_a_step_past_its_deadline_ends_the_process(tmp_path: Path) -> None:
    """1,000 tokens through 8 layers of width 512 are 17 GFLOP: no core does them in a millisecond."""
    path = tiny_llama(tmp_path / "m", hidden_size=512, num_attention_heads=8, num_hidden_layers=8)
    with process("--model", str(path)) as (running, stub, _):
        make_ready(stub)
        events = stub.Run(iter([opening(), prefill(1000, deadline_ms=1)]), timeout=START_TIMEOUT_S)
        with pytest.raises(grpc.RpcError):
            for event in events:
                assert not event.HasField("result")
        assert running.wait(20) == HUNG_EXIT_STATUS
        assert "passed its deadline" in running.stderr.read()


@pytest.mark.timeout(START_TIMEOUT_S)
def test_a_model_that_is_not_served_stops_the_start_with_one_line(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", config={"model_type": "gpt2"})
    ended = subprocess.run(
        [sys.executable, "-c", MAIN, "--port", "0", "--model", str(path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 1
    assert "model_type 'gpt2'" in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
