"""Ranks as processes: they listen on loopback alone, end together, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import psutil
import pytest
from triptych.executor.v1 import executor_pb2 as pb
from triptych.executor.v1 import executor_pb2_grpc

from services.executor.ranks.follower import Place
from services.executor.ranks.leader import LeadingExecutor
from services.executor.ranks.peers import ChildPeers
from services.executor.steps import HUNG_EXIT_STATUS
from tests.executor.mini_scheduler import GREEDY, MiniScheduler, Request, RunStream, column, serve
from tests.support.checkpoints import reference_ids

ROOT = Path(__file__).parents[2]
START_S = 90
GONE_S = 15
BLOCKS = 100


@contextlib.contextmanager
def executor(model: Path, *flags: str) -> Iterator[tuple[psutil.Popen, int, Callable[[], str]]]:
    """`triptych executor --tp-size 2`: its process, its port, and what it has logged since."""
    command = [sys.executable, "-m", "services.cli.main", "executor", "--port", "0", "--threads", "1"]
    command += ["--kv-memory-bytes", str(64 << 20), "--tp-size", "2", "--model", str(model), *flags]
    running = psutil.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        lines = [""]
        while not (found := re.search(r"serving executor on 127\.0\.0\.1:(\d+)", lines[-1])):
            lines.append(running.stderr.readline())
            assert lines[-1], lines
        yield running, int(found[1]), lambda: str(running.stderr.read())
    finally:
        for process in [*running.children(recursive=True), running] if running.is_running() else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        running.wait()
        running.stderr.close()


def make_ready(stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
    config = pb.EngineConfig(context_tokens=1024, block_tokens=16, max_slots=4, max_step_tokens=256, tp_size=2)
    list(stub.Load(pb.LoadRequest(min_version=1, max_version=1, config=config), timeout=START_S))
    stub.Allocate(pb.AllocateRequest(num_blocks=[BLOCKS]), timeout=START_S)


def requests(running: psutil.Popen, deadline_ms: int = 0, steps: int = 100_000) -> Iterator[pb.RunRequest]:
    """A request that decodes until its executor has ended, one step at a time in the pace of its results."""
    yield pb.RunRequest(open=pb.Open(epoch=1, version=1))
    started = pb.NewRequest(token_ids=column(5), prompt_tokens=1, block_ids=[column(*range(1, 65))], sampling=GREEDY)
    yield pb.RunRequest(plan=pb.StepPlan(step=1, started=[started], slots=column(0), deadline_ms=deadline_ms))
    for step in range(2, steps):
        while not done.setdefault(running.pid, 0) >= step - 1 and running.is_running():
            time.sleep(0.001)
        yield pb.RunRequest(plan=pb.StepPlan(step=step, slots=column(0), deadline_ms=deadline_ms))


done: dict[int, int] = {}
"""The last step that has a result, by the process of its executor."""


def events(
    running: psutil.Popen, stub: executor_pb2_grpc.ExecutorServiceStub, **options: int
) -> Iterator[pb.RunResponse]:
    """Results and faults of such a request."""
    for event in stub.Run(requests(running, **options), timeout=START_S):
        if event.HasField("result"):
            assert event.result.token_ids
            done[running.pid] = event.result.step
        if not event.HasField("heartbeat"):
            yield event


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + GONE_S
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def listeners(*processes: psutil.Process) -> set[str]:
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
def test_all_listen_on_loopback_alone_and_sigterm_ends_all(tiny: Path) -> None:
    with executor(tiny) as (running, port, _), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        make_ready(stub)
        (peer,) = running.children()
        assert peer.cmdline()[3] == "services.executor.ranks.main"
        addresses = listeners(running, peer)
        assert addresses and addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        assert listeners(peer) == {"127.0.0.1"}, "the peer takes part in sums"
        results = events(running, stub)
        next(results)
        running.send_signal(signal.SIGTERM)
        os.kill(peer.pid, signal.SIGTERM)  # as a supervisor may that signals a whole group: rank 0 ends it in order
        with pytest.raises(grpc.RpcError) as error:
            for event in results:
                assert event.HasField("result"), "a step in flight was lost"
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in error.value.details()
        assert running.wait(20) == 0 and gone(peer.pid)


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
def test_the_death_of_a_peer_in_a_step_is_a_fatal_fault_and_ends_rank_0(tiny: Path) -> None:
    with executor(tiny) as (running, port, log), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        make_ready(stub)
        (peer,) = running.children()
        results = events(running, stub)
        for _ in range(3):
            next(results)
        peer.kill()
        *_, last = results
        assert last.fault.kind == pb.FAULT_KIND_RANK_LOST and last.fault.fatal
        assert last.fault.message == "rank 1 was ended by SIGKILL"
        assert running.wait(20) == 1 and gone(peer.pid)
        assert "triptych: error: rank 1 was ended by SIGKILL" in log()


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
def test_the_death_of_a_peer_while_nothing_runs_ends_rank_0(tiny: Path) -> None:
    with executor(tiny) as (running, _, log):
        (peer,) = running.children()
        peer.kill()
        assert running.wait(20) == 1 and gone(peer.pid)
        assert "triptych: error: rank 1 was ended by SIGKILL" in log()


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
@pytest.mark.parametrize("loaded", [True, False])
def test_peers_do_not_outlive_rank_0(tiny: Path, loaded: bool) -> None:
    with executor(tiny) as (running, port, _), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        (peer,) = running.children()
        if loaded:
            make_ready(stub)
            results = events(running, stub)
            next(results)
        running.kill()
        assert gone(running.pid, peer.pid)


@pytest.mark.slow
@pytest.mark.timeout(3 * START_S)
@pytest.mark.parametrize("deadline_ms", [2000, 0])
def test_a_peer_that_hangs_ends_the_group_by_the_steps_deadline_or_the_ranks_own(tiny: Path, deadline_ms: int) -> None:
    limit_s = "60" if deadline_ms else "10"
    with (
        executor(tiny, "--rank-timeout-s", limit_s) as (running, port, _),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        make_ready(stub)
        (peer,) = running.children()
        results = events(running, stub, deadline_ms=deadline_ms)
        for _ in range(3):
            next(results)
        peer.suspend()
        with contextlib.suppress(grpc.RpcError):
            *_, last = results
            assert last.fault.kind == pb.FAULT_KIND_RANK_LOST and last.fault.fatal
        assert running.wait(30) == (HUNG_EXIT_STATUS if deadline_ms else 1) and gone(peer.pid)


BREAKING = """
import sys
from services.executor.ranks import follower, main
load, calls = follower.load_connected, []

def load_breaking(*args):
    checkpoint = load(*args)
    checkpoint.model.register_forward_pre_hook(call)
    return checkpoint

def call(*_):
    calls.append(1)
    if len(calls) == 4:  # two are of the warm-up
        raise MemoryError("no memory left")

follower.load_connected = load_breaking
sys.exit(main.main(sys.argv[1:]))
"""


def start_breaking(place: Place, connection: Connection, log_level: str) -> subprocess.Popen[bytes]:
    """A peer whose fourth forward pass raises an error."""
    arguments = (str(os.getpid()), str(connection.fileno()), log_level, json.dumps(asdict(place)))
    return subprocess.Popen(
        [sys.executable, "-c", BREAKING, *arguments], pass_fds=(connection.fileno(), place.rendezvous_fd), cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.timeout(START_S)
async def test_an_error_of_a_peer_is_a_fatal_fault_that_names_it(tiny: Path) -> None:
    """One request is served by two processes before that: its ids are the reference's."""

    def make(path: Path, *, threads: int, kv_memory_bytes: int) -> LeadingExecutor:
        peers = ChildPeers(path, size=2, threads=threads, timeout_s=60, start=start_breaking)
        return LeadingExecutor(path, peers=peers, threads=threads, kv_memory_bytes=kv_memory_bytes)

    async with serve(tiny, num_blocks=BLOCKS, make=make) as rig:
        run = await RunStream.open(rig)
        request = Request([5, 6, 7], 1)
        await MiniScheduler(run, rig.config, BLOCKS).finish([request])
        assert [request.output] == reference_ids(tiny, [[5, 6, 7]], 1, ignore_eos=True)
        await run.close()
        run = await RunStream.open(rig)
        started = pb.NewRequest(token_ids=column(5), prompt_tokens=1, block_ids=[column(1)], sampling=GREEDY)
        fault = await run.fault(started=[started], slots=column(0))
        assert fault.kind == pb.FAULT_KIND_RANK_LOST and fault.fatal and fault.step == 1
        assert fault.message == "rank 1: MemoryError: no memory left"
        executor = rig.servicer._executor
        assert isinstance(executor, LeadingExecutor) and gone(*executor._peers.pids)
