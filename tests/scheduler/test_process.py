"""The scheduler as a process: its log line, its refusals to start, and its drain on SIGTERM."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import grpc
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import StubExecutor
from services.common.checkpoint import tokenizer_hash
from services.common.errors import StartError
from services.scheduler.main import main
from services.scheduler.throughput import Throughput
from tests.support.attached import Frontend, until

PROGRAM = "import sys; from services.scheduler.main import main; sys.exit(main(sys.argv[1:]))"


class Process:
    """A scheduler process on a free port."""

    def __init__(self, stub: StubExecutor, model: Path, *flags: str) -> None:
        self._args = ["--executor", f"127.0.0.1:{stub.port}", "--port", "0", "--model", str(model), *flags]
        self.model = model
        self.lines: list[str] = []

    async def __aenter__(self) -> Process:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, *self._args, stderr=asyncio.subprocess.PIPE
        )
        self._reader = asyncio.create_task(self._read())
        await until(lambda: self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode())

    @property
    def port(self) -> int:
        found = re.search(r"serving scheduler on 127\.0\.0\.1:(\d+)", "".join(self.lines))
        return int(found[1]) if found else 0

    def frontend(self) -> Frontend:
        return Frontend(self.port, tokenizer_hash=tokenizer_hash(self.model))


async def test_sigterm_finishes_what_runs_refuses_what_is_new_and_ends(model: Path) -> None:
    async with (
        StubExecutor(step_s=0.005) as stub,
        Process(stub, model) as scheduler,
        scheduler.frontend() as frontend,
    ):
        await frontend.greeted()
        running = await frontend.submit([1], seed=1, max_tokens=150)
        await running.first.wait()
        scheduler.process.send_signal(signal.SIGTERM)
        await until(lambda: frontend.heartbeats[-1].state == engine_pb2.ENGINE_STATE_DRAINING)
        late = await frontend.run([2])
        assert late.code is grpc.StatusCode.UNAVAILABLE
        assert late.failed is not None and late.failed.reason == "DRAINING"
        await running.done.wait()
        assert running.finished and running.ids == expected_ids([1], 1, 150, 512)
        assert await asyncio.wait_for(scheduler.process.wait(), 10) == 0
        assert stub.violations == []


async def test_G5_what_does_not_finish_within_the_drain_ends_unavailable(model: Path) -> None:
    async with (
        StubExecutor() as stub,
        Process(stub, model, "--drain-s", "0.3") as scheduler,
        scheduler.frontend() as frontend,
    ):
        await frontend.greeted()
        stub.hold()
        stuck = await frontend.submit([1])
        await stub.plan_arrived(1)
        scheduler.process.send_signal(signal.SIGTERM)
        await stuck.done.wait()
        assert stuck.code is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(scheduler.process.wait(), 10) == 0


def test_a_start_that_cannot_be_is_one_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no model at"):
        main(["--model", str(tmp_path / "none")])
    with pytest.raises(StartError, match="--max-model-len is 9999"):
        main(["--model", str(model), "--max-model-len", "9999"])
    with pytest.raises(StartError, match="block_size"):
        main(["--model", str(model), "--block-size", "0"])


def test_throughput_counts_the_last_10_s_of_work() -> None:
    throughput = Throughput()
    assert throughput.output_tokens_per_s == 0
    for _ in range(100):
        throughput.add(1.0, 50, 2)
    throughput.add(5.0, 0, 100)
    # 10 s of work: 5 steps of 1 s with 2 ids, one of 5 s with 100.
    assert throughput.output_tokens_per_s == pytest.approx(110 / 10)
    assert throughput.prompt_tokens_per_s == pytest.approx(250 / 10)
