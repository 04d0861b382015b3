"""Ranks that are started by themselves meet at an address, or say why they do not; then they are a group like any."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from triptych.executor.v1 import executor_pb2 as pb

from services.common.errors import StartError
from services.executor import memory
from services.executor.config import ExecutorConfig
from services.executor.fit import fit
from services.executor.plan import RanksLostError
from services.executor.ranks import group, meeting
from services.executor.ranks.follower import Apart, Follower, LeftError, Place
from services.executor.ranks.interfaces import interface_of
from services.executor.ranks.joined import join
from services.executor.ranks.joining import JoiningPeers
from services.executor.ranks.leader import LeadingExecutor
from services.executor.ranks.meeting import Hello
from services.executor.ranks.messages import Kind
from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, serve
from tests.support.checkpoints import check_same_ids, reference_ids, tiny_llama

BLOCKS = 40
TIMEOUT_S = 60.0
PATIENCE_S = 30.0


@contextmanager
def waiting(path: Path, size: int = 2, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> Iterator[JoiningPeers]:
    """Rank 0, waiting for the others at a free port."""
    with closing(socket.create_server((host, 0))) as probe:
        port = probe.getsockname()[1]
    peers = JoiningPeers(path, size=size, address=f"{host}:{port}", timeout_s=timeout_s)
    try:
        yield peers
    finally:
        peers.close()


def address(peers: JoiningPeers) -> str:
    return peers._address


class Rank:
    """One that comes, as a thread: what a process of it does, its port for health apart."""

    def __init__(
        self,
        path: Path,
        peers: JoiningPeers,
        rank: int = 1,
        *,
        kv_memory_bytes: int = 64 << 20,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.error: BaseException | None = None
        self._args = path, address(peers), rank, peers.size, kv_memory_bytes, timeout_s
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ended(self) -> BaseException | None:
        """How it has ended: None in order."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.error

    def _run(self) -> None:
        path, where, rank, size, kv_memory_bytes, timeout_s = self._args
        try:
            joined = join(where, Hello.of(path, rank, size), timeout_s)
            place = Place(str(path), rank, size, 1, joined.timeout_s, rendezvous_fd=-1)
            Follower(place, joined.channel, Apart(lambda: joined.connect(rank, size), kv_memory_bytes)).run()
        except BaseException as error:
            self.error = error
        gc.collect()  # its connections with the other ranks end with its process


def leading(peers: JoiningPeers) -> Callable[..., LeadingExecutor]:
    def make(path: Path, *, threads: int, kv_memory_bytes: int) -> LeadingExecutor:
        return LeadingExecutor(path, peers=peers, threads=threads, kv_memory_bytes=kv_memory_bytes)

    return make


def listening() -> set[str]:
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("size", [2, 3])
async def test_ranks_that_have_met_answer_as_the_reference_does(tiny: Path, size: int) -> None:
    asked = [[5, 6, 7], [8] * 40]
    with waiting(tiny, size) as peers:
        ranks = [Rank(tiny, peers, rank) for rank in range(1, size)]
        async with serve(tiny, num_blocks=BLOCKS, max_step_tokens=48, make=leading(peers)) as rig:
            run = await RunStream.open(rig)
            requests = [Request(prompt, 8) for prompt in asked]
            await MiniScheduler(run, rig.config, BLOCKS, budget=48).finish(requests, preempt_every=5)
            await run.close()
    assert [rank.ended() for rank in ranks] == [None] * (size - 1), "rank 0 has ended in order"
    expected = reference_ids(tiny, asked, 8, ignore_eos=True)
    check_same_ids(tiny, asked, [request.output for request in requests], expected)


async def test_nothing_listens_on_another_address_than_rank_0s_and_the_one_it_is_reached_from(tiny: Path) -> None:
    """Rank 0 is told 127.0.0.2; who connects to that, comes from 127.0.0.1."""
    before = listening()
    with waiting(tiny, host="127.0.0.2") as peers:
        assert listening() - before == {"127.0.0.2"}
        rank = Rank(tiny, peers)
        async with serve(tiny, num_blocks=BLOCKS, make=leading(peers)):
            server = {"127.0.0.1", "::ffff:127.0.0.1"}  # the executor's own, as gRPC binds it
            assert {"127.0.0.2"} < listening() - before <= {"127.0.0.2", *server}
    assert rank.ended() is None


async def test_a_rank_may_come_before_rank_0_and_again_after_it_has_left(tiny: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    hello = Hello.of(tiny, 1, 2)
    early = asyncio.create_task(asyncio.to_thread(join, f"127.0.0.1:{port}", hello, TIMEOUT_S))
    await asyncio.sleep(0.3)
    leaving = socket.create_server(("127.0.0.1", port))  # a rank 0 that dies before it answers
    connected, _ = await asyncio.to_thread(leaving.accept)
    connected.close()
    leaving.close()
    peers = JoiningPeers(tiny, size=2, address=f"127.0.0.1:{port}", timeout_s=TIMEOUT_S)
    try:
        joined = await early
        assert joined.timeout_s == TIMEOUT_S
        joined.channel.send(Kind.READY)
        await asyncio.to_thread(peers.wait_ready)
    finally:
        peers.close()


def test_ranks_that_do_not_come_in_time_are_named_and_those_that_came_are_told(tiny: Path) -> None:
    with waiting(tiny, 3, timeout_s=1.0) as peers:
        with pytest.raises(StartError) as told:
            join(address(peers), Hello.of(tiny, 1, 3), 2.0)
        reason = (
            f"rank 2 did not come to {address(peers)} within 1 s; start each with --tp-rank and this --tp-rendezvous"
        )
        assert peers.lost.result(PATIENCE_S) == reason
        with pytest.raises(RanksLostError, match="rank 2 did not come"):
            peers.wait_ready()
    assert f"rank 1 has not met rank 0 at {address(peers)} within 2 s" in str(told.value)


def test_a_rank_without_a_rank_0_gives_up_and_says_what_to_start(tiny: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(StartError, match=r"within 0.3 s \(.*refused.*\); start rank 0 with --tp-rank 0"):
        join(f"127.0.0.1:{port}", Hello.of(tiny, 1, 2), 0.3)


UNFIT = {
    "another size": ({"size": 3}, "rank 1 has --tp-size 3, rank 0 2; start both with the same"),
    "no such rank": ({"rank": 2}, "rank 2 is none of ranks 1 to 1"),
    "rank 0 again": ({"rank": 0}, "rank 0 is none of ranks 1 to 1"),
    "another version": ({"version": "triptych 0.0.1"}, "rank 1 has triptych 0.0.1; rank 0 has triptych"),
    "another model": ({"config_hash": "ab" * 32}, f"rank 1 has a config.json that hashes to {'ab' * 32}, rank 0's to"),
}


@pytest.mark.parametrize("which", UNFIT)
def test_a_rank_that_does_not_fit_is_refused_with_the_reason_and_the_right_one_still_comes(
    tiny: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes, reason = UNFIT[which]
    good = Hello.of(tiny, 1, 2)
    with waiting(tiny) as peers, caplog.at_level(logging.ERROR):
        with pytest.raises(StartError, match="rank 0 refuses this rank: ") as refused:
            join(address(peers), replace(good, **changes), PATIENCE_S)
        assert reason in str(refused.value) and reason in caplog.text
        join(address(peers), good, PATIENCE_S).channel.send(Kind.READY)
        peers.wait_ready()


def test_a_second_rank_of_one_number_is_refused(tiny: Path) -> None:
    with waiting(tiny, 3) as peers:
        hello = Hello.of(tiny, 1, 3)
        first = Rank(tiny, peers, timeout_s=1.0)
        while 1 not in peers._came:
            time.sleep(0.01)
        with pytest.raises(StartError, match="rank 1 is here already; give each its own --tp-rank"):
            join(address(peers), hello, PATIENCE_S)
    assert isinstance(first.ended(), StartError), "rank 2 has not come"


def test_a_rank_that_leaves_before_all_are_here_may_come_again(tiny: Path) -> None:
    with waiting(tiny, 3) as peers:
        with pytest.raises(StartError):
            join(address(peers), Hello.of(tiny, 1, 3), 0.5)
        until = time.monotonic() + PATIENCE_S
        while 1 in peers._came and time.monotonic() < until:
            time.sleep(0.01)
        ranks = [Rank(tiny, peers, rank) for rank in (1, 2)]
        peers.wait_ready()
    assert [rank.ended() for rank in ranks] == [None, None]


STRANGE = {
    "a request of HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "an empty message": b"\0\0\0\0",
    "another kind than JOIN": b"\0\0\0\x03\x08[]",
    "a JOIN without its fields": b"\0\0\0\x03\x16{}",
    "a JOIN of a rank that is no number": b'\0\0\0\x3d\x16{"rank": "one", "size": 2, "version": "", "config_hash": ""}',
}


@pytest.mark.parametrize("said", STRANGE.values(), ids=STRANGE)
def test_who_is_no_rank_is_turned_away_and_nobody_waits_for_it(tiny: Path, said: bytes) -> None:
    with waiting(tiny) as peers:
        with closing(socket.create_connection(meeting.split(address(peers)))) as stranger:
            stranger.sendall(said)
            stranger.settimeout(PATIENCE_S)
            assert stranger.recv(1) == b""
        join(address(peers), Hello.of(tiny, 1, 2), PATIENCE_S).channel.send(Kind.READY)
        peers.wait_ready()


def test_who_connects_and_says_nothing_does_not_keep_the_ranks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.executor.ranks.joining._HELLO_S", 0.2)
    with waiting(tiny) as peers, closing(socket.create_connection(meeting.split(address(peers)))) as stranger:
        join(address(peers), Hello.of(tiny, 1, 2), PATIENCE_S).channel.send(Kind.READY)
        peers.wait_ready()
        stranger.settimeout(PATIENCE_S)
        assert stranger.recv(1) == b""


def test_an_address_that_is_not_this_machines_is_refused(tiny: Path) -> None:
    with pytest.raises(StartError, match=r"rank 0 cannot listen on --tp-rendezvous 192\.0\.2\.1:29500: "):
        JoiningPeers(tiny, size=2, address="192.0.2.1:29500", timeout_s=1)  # RFC 5737: nobody's


# -- once they have met


async def test_a_rank_with_other_weights_is_refused_in_the_load(tiny: Path, tmp_path: Path) -> None:
    """config.json is the same, so that only the hash of the files tells them apart."""
    other = tiny_llama(tmp_path, extra={"model.norm.weight": torch.full((64,), 0.5)})
    with waiting(tiny) as peers:
        rank = Rank(other, peers)
        async with serve(tiny, make=leading(peers)) as rig:
            for _ in range(2):  # the group lives on and says it again
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await rig.load()
                assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
                assert "rank 1: its weights hash to " in error.value.details()
                assert "give all ranks the same checkpoint" in error.value.details()
    assert rank.ended() is None


async def test_the_pool_is_what_each_machine_has_room_for(tiny: Path) -> None:
    """A block of a rank is K and V of 2 layers, 1 of 2 kv heads, 16 x 16, of 4 bytes: 4096. Rank 1 has room for 10."""
    with waiting(tiny) as peers:
        rank = Rank(tiny, peers, kv_memory_bytes=10 * 4096 + 100)
        async with serve(tiny, make=leading(peers), kv_memory_bytes=100 * 4096) as rig:
            loaded = await rig.load()
            assert loaded.kv_groups[0].block_bytes == 4096 and loaded.kv_bytes // 4096 == 10
            by_rank = "by 2 ranks a block takes 4096, 4096 bytes, 8192 in all, and 409600, 41060 are there for KV"
            with pytest.raises(grpc.aio.AioRpcError, match=f"10 fit .* of rank 0; {by_rank}"):
                await rig.allocate(11)
            await rig.allocate(10)
    assert rank.ended() is None


async def test_each_rank_counts_its_own_machines_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20)
    with waiting(tiny) as peers:
        Rank(tiny, peers)

        def make(path: Path, *, threads: int, kv_memory_bytes: int) -> LeadingExecutor:
            return LeadingExecutor(path, peers=peers, threads=threads)

        async with serve(tiny, make=make) as rig:
            assert (await rig.load()).kv_bytes // 4096 == (64 << 20) * memory.KV_SHARE // 4096


async def test_the_loss_of_a_rank_ends_the_group_and_the_others_hear_why(tiny: Path) -> None:
    with waiting(tiny, 3) as peers:
        staying, leaving = Rank(tiny, peers, 1), join_only(tiny, peers, 2)
        peers.wait_ready()
        leaving.channel.close()
        assert peers.lost.result(PATIENCE_S) == "rank 2 has closed its channel"
    error = staying.ended()
    assert isinstance(error, LeftError) and str(error) == "rank 2 has closed its channel"


async def test_a_rank_whose_rank_0_is_gone_ends(tiny: Path) -> None:
    with waiting(tiny) as peers:
        rank = Rank(tiny, peers)
        peers.wait_ready()
        peers._peers[0].channel.close()  # without a word, as the kernel does for a process that is killed
        error = rank.ended()
    assert isinstance(error, LeftError) and "rank 0 has ended, or cannot be reached any more" in str(error)


def join_only(path: Path, peers: JoiningPeers, rank: int) -> Any:
    joined = join(address(peers), Hello.of(path, rank, peers.size), PATIENCE_S)
    joined.channel.send(Kind.READY)
    return joined


# -- configuration, and what carries the sums


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"tp_rank": 1}, "tp_rank is set without tp_rendezvous"),
        ({"tp_rendezvous": "127.0.0.1:29500"}, "tp_rendezvous is set without tp_rank"),
        ({"tp_rank": 2, "tp_rendezvous": "127.0.0.1:29500"}, "tp_rank is 2, ranks of tp_size 2 are 0 to 1"),
        ({"tp_rank": 0, "tp_rendezvous": "127.0.0.1:29500", "tp_size": 1}, "tp_rank is set, but tp_size is 1"),
        ({"tp_rank": 0, "tp_rendezvous": "127.0.0.1"}, "HOST:PORT is needed"),
    ],
)
def test_a_rank_needs_a_number_and_a_place_to_meet(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ExecutorConfig(**({"tp_size": 2} | keys))


def test_ranks_that_are_started_by_themselves_have_their_machine_for_themselves() -> None:
    assert ExecutorConfig(tp_size=2).ranks_here == 2
    assert ExecutorConfig(tp_size=2, tp_rank=1, tp_rendezvous="127.0.0.1:29500").ranks_here == 1


def test_what_fits_a_rank_is_counted_on_its_own_machine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20)
    engine = pb.EngineConfig(context_tokens=1024, block_tokens=16, max_slots=4, max_step_tokens=256, tp_size=2)
    told = {"model": str(tiny), "tp_size": 2}
    apart = fit(tiny, engine, ExecutorConfig(**told, tp_rank=1, tp_rendezvous="127.0.0.1:29500"))
    weights = apart.rank_weight_bytes
    assert apart.kv_bytes == int(((64 << 20) - weights[1]) * memory.KV_SHARE)
    assert apart.weight_bytes == sum(weights)
    assert fit(tiny, engine, ExecutorConfig(**told)).kv_bytes == int(((64 << 20) - sum(weights)) // 2 * memory.KV_SHARE)


def test_the_device_chooses_what_carries_the_sums() -> None:
    assert (group.backend("cpu"), group.backend("cuda")) == ("gloo", "nccl")
    with pytest.raises(StartError, match="ranks on device 'tpu' are not served; served are cpu, cuda"):
        group.backend("tpu")


@pytest.mark.skipif(hasattr(torch.distributed, "ProcessGroupNCCL"), reason="this torch has NCCL")
def test_ranks_on_cuda_without_nccl_are_refused_clearly() -> None:
    with pytest.raises(StartError, match="need NCCL, which this torch is built without"):
        group.Group(torch.distributed.HashStore(), 0, 1, 1.0, device="cuda")


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    with pytest.raises(StartError, match=r"no network interface of this machine has the address 192\.0\.2\.1"):
        interface_of("192.0.2.1")
