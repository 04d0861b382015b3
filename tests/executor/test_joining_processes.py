"""Ranks as processes that are started one by one: `triptych executor --tp-rank R --tp-rendezvous HOST:PORT`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from triptych.executor.v1 import executor_pb2 as pb
from triptych.executor.v1 import executor_pb2_grpc

from tests.executor.mini_scheduler import GREEDY, column, read
from tests.executor.test_rank_processes import START_S, events, gone, listeners, make_ready
from tests.support.checkpoints import reference_ids, tiny_llama
from tests.support.cluster import health

ROOT = Path(__file__).parents[2]
RANK_0_IP = "127.0.0.2"
"""Who connects to it comes from 127.0.0.1, so that the two are told apart."""


def free_address() -> str:
    with socket.create_server((RANK_0_IP, 0)) as probe:
        return f"{RANK_0_IP}:{probe.getsockname()[1]}"


class Rank:
    """A process, its log as it comes, and the port it serves on."""

    def __init__(self, model: Path, rank: int, address: str, log: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "services.cli.main", "executor", "--port", "0", "--threads", "1", *flags]
        command += ["--kv-memory-bytes", str(64 << 20), "--tp-size", "2", "--model", str(model)]
        # As a pod is told which it is.
        keys = {"TRIPTYCH_EXECUTOR__TP_RANK": str(rank), "TRIPTYCH_EXECUTOR__TP_RENDEZVOUS": address}
        self._log = log / f"rank-{rank}-{time.monotonic_ns()}"
        with self._log.open("w") as lines:
            self.process = psutil.Popen(command, stderr=lines, cwd=ROOT, env=os.environ | keys)

    def log(self) -> str:
        return self._log.read_text()

    def said(self, pattern: str) -> re.Match[str]:
        """Waits for a line."""
        until = time.monotonic() + START_S
        while not (found := re.search(pattern, self.log())):
            assert self.process.poll() is None and time.monotonic() < until, self.log()
            time.sleep(0.05)
        return found

    @property
    def port(self) -> int:
        return int(self.said(r"serving .* on 127\.0\.0\.1:(\d+)")[1])


@contextlib.contextmanager
def pair(model: Path, folder: Path, *flags: str) -> Iterator[tuple[Rank, Rank, executor_pb2_grpc.ExecutorServiceStub]]:
    """Rank 1, started first, and rank 0; and a stub of rank 0."""
    address = free_address()
    one = Rank(model, 1, address, folder, *flags)
    zero = Rank(model, 0, address, folder, *flags)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{zero.port}") as channel:
            yield zero, one, executor_pb2_grpc.ExecutorServiceStub(channel)
    finally:
        end(zero, one)


def end(*ranks: Rank) -> None:
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.process.kill()
        rank.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
def test_they_answer_as_the_reference_listen_where_they_are_told_and_end_together(tiny: Path, tmp_path: Path) -> None:
    with pair(tiny, tmp_path) as (zero, one, stub):
        make_ready(stub)
        assert health(one.port, "liveness") == health(one.port, "readiness") == "SERVING"
        loopback = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}  # of their own ports
        assert {RANK_0_IP} < listeners(zero.process) <= {RANK_0_IP, *loopback}
        assert listeners(one.process) <= loopback
        request = pb.NewRequest(token_ids=column(5, 6, 7), prompt_tokens=3, block_ids=[column(1)], sampling=GREEDY)

        def plans() -> Iterator[pb.RunRequest]:
            yield pb.RunRequest(open=pb.Open(epoch=1, version=1))
            yield pb.RunRequest(plan=pb.StepPlan(step=1, started=[request], slots=column(0), token_counts=column(3)))
            yield pb.RunRequest(plan=pb.StepPlan(step=2, slots=column(0)))

        results = [event.result for event in stub.Run(plans(), timeout=START_S) if event.HasField("result")]
        ids = [token_id for result in results for token_id in read(result.token_ids)]
        assert [ids] == reference_ids(tiny, [[5, 6, 7]], 2, ignore_eos=True)
        # As when a whole set of pods is taken down: rank 1 serves until rank 0 has ended.
        one.process.send_signal(signal.SIGTERM)
        zero.process.send_signal(signal.SIGTERM)
        assert zero.process.wait(30) == 0 and one.process.wait(30) == 0, zero.log() + one.log()


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
@pytest.mark.parametrize("who", [0, 1])
def test_the_death_of_one_ends_the_other_with_the_reason(tiny: Path, tmp_path: Path, who: int) -> None:
    with pair(tiny, tmp_path) as (zero, one, stub):
        make_ready(stub)
        results = events(zero.process, stub)
        for _ in range(3):
            next(results)
        killed, other = (zero, one) if who == 0 else (one, zero)
        killed.process.kill()
        if who:
            *_, last = results
            assert last.fault.kind == pb.FAULT_KIND_RANK_LOST and last.fault.fatal
            assert last.fault.message == "rank 1 has closed its channel"
        assert other.process.wait(30) == 1
        assert gone(zero.process.pid, one.process.pid)
        assert re.search(r"triptych: error: rank [01].*start it again", other.log()), other.log()


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
def test_one_without_the_other_gives_up_in_time_and_says_what_to_start(tiny: Path, tmp_path: Path) -> None:
    address = free_address()
    zero = Rank(tiny, 0, address, tmp_path, "--rank-timeout-s", "1")
    try:
        assert zero.process.wait(START_S) == 1
        assert f"triptych: error: rank 1 did not come to {address} within 1 s" in zero.log()
        one = Rank(tiny, 1, address, tmp_path, "--rank-timeout-s", "1")
        assert one.process.wait(START_S) == 1
        assert f"triptych: error: rank 1 has not met rank 0 at {address} within 1 s" in one.log()
    finally:
        end(zero)


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
def test_one_with_another_model_is_refused_and_the_right_one_comes_after(tiny: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", num_hidden_layers=3)
    address = free_address()
    zero, wrong = Rank(tiny, 0, address, tmp_path), Rank(other, 1, address, tmp_path)
    try:
        assert wrong.process.wait(START_S) == 1
        assert "triptych: error: rank 0 refuses this rank: rank 1 has a config.json that hashes to" in wrong.log()
        right = Rank(tiny, 1, address, tmp_path, "--drain-s", "0.5")
        right.said("rank 1 of 2 has joined rank 0")
        # Signalled alone, it is given its time to drain, and is gone: rank 0 ends with it.
        right.process.send_signal(signal.SIGTERM)
        assert right.process.wait(30) == 0
        assert zero.process.wait(30) == 1
        assert "triptych: error: rank 1 has closed its channel; the executor ends with its ranks" in zero.log()
    finally:
        end(zero, wrong)
        with contextlib.suppress(UnboundLocalError):
            end(right)


def test_the_address_of_another_machine_is_refused_before_a_rank_waits(tiny: Path) -> None:
    command = [sys.executable, "-m", "services.cli.main", "executor", "--model", str(tiny), "--tp-size", "2"]
    command += ["--tp-rank", "0", "--tp-rendezvous", "192.0.2.1:29500"]  # RFC 5737: nobody's
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=START_S)
    assert ended.returncode == 1
    assert "triptych: error: rank 0 cannot listen on --tp-rendezvous 192.0.2.1:29500" in ended.stderr


def test_what_ranks_are_not_served_with_is_refused_by_each_of_them(tiny: Path) -> None:
    command = [sys.executable, "-m", "services.cli.main", "executor", "--model", str(tiny), "--tp-size", "2"]
    command += ["--tp-rank", "1", "--tp-rendezvous", "127.0.0.1:9", "--attention-backend", "torch-sdpa"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=START_S)
    assert ended.returncode == 1
    assert "--attention-backend is not served with --tp-size" in ended.stderr
