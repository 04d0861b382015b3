"""Executors of several ranks answer as one of one rank does, and what one rank refuses or suffers is the group's."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from triptych.executor.v1 import executor_pb2 as pb

from services.common.errors import StartError
from services.executor import loader, memory
from services.executor.ranks import follower, leader
from services.executor.ranks.division import Shard
from services.executor.ranks.follower import Place
from services.executor.ranks.leader import LeadingExecutor
from services.executor.ranks.peers import ChildPeers
from tests.executor.mini_scheduler import GREEDY, MiniScheduler, Request, RunStream, column, read, serve
from tests.executor.ranks import RankThread, ranks
from tests.support.checkpoints import check_same_ids, check_scores, reference_ids, tiny_llama

BLOCKS = 40
LENGTHS = (1, 17, 40, 100)


def prompts(vocab: int = 512) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab, length).tolist() for length in LENGTHS]


async def finish(path: Path, size: int, requests: list[Request]) -> None:
    """Serves them by `size` ranks, prompts cut in chunks, some preempted, two steps in flight."""
    async with serve(path, num_blocks=BLOCKS, max_step_tokens=48, make=ranks(size)) as rig:
        run = await RunStream.open(rig)
        await MiniScheduler(run, rig.config, BLOCKS, budget=48).finish(requests, preempt_every=7)
        await run.close()


MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "9 heads on 3 by 2 ranks": (2, {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "2 kv heads by 3 ranks": (3, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "1 kv head by 2 ranks": (2, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "1 head by 2 ranks": (2, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "a vocabulary of 500": (2, {"vocab_size": 500}),
    "a tied vocabulary of 500": (2, {"vocab_size": 500, "tie_word_embeddings": True}),
    "an MLP 200 wide": (2, {"hidden_size": 100, "head_dim": 10}),
    "bfloat16": (2, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("model", MODELS)
async def test_ids_of_models_that_do_not_divide_evenly(tmp_path: Path, model: str) -> None:
    size, settings = MODELS[model]
    path = tiny_llama(tmp_path, **settings)
    asked = prompts(settings.get("vocab_size", 512))
    requests = [Request(prompt, 10) for prompt in asked]
    await finish(path, size, requests)
    expected = reference_ids(path, asked, 10, ignore_eos=True)
    check_same_ids(path, asked, [request.output for request in requests], expected)


async def test_sampled_ids_are_those_of_one_rank(tiny: Path) -> None:
    """The noise is a function of seed and position; the likelihoods differ by rounding alone."""
    from triptych.inference.v1 import generation_pb2

    sampling = generation_pb2.Sampling(temperature=1.0, top_p=0.9)

    async def drawn(size: int) -> list[list[int]]:
        requests = [Request(prompt, 10, sampling=sampling, seed=7 + i) for i, prompt in enumerate(prompts())]
        await finish(tiny, size, requests)
        return [request.output for request in requests]

    assert await drawn(2) == await drawn(1)


@pytest.mark.parametrize("size", [1, 2])
async def test_forced_ids_are_as_if_the_prompt_had_held_them_on_every_rank(tiny: Path, size: int) -> None:
    prompt, forced = [5, 6, 7], [300, 17, 44]
    (first,) = reference_ids(tiny, [prompt], 1, ignore_eos=True)[0]
    (expected,) = reference_ids(tiny, [[*prompt, first, *forced]], 3, ignore_eos=True)
    async with serve(tiny, num_blocks=BLOCKS, make=ranks(size)) as rig:
        run = await RunStream.open(rig)
        request = pb.NewRequest(
            slot=0, token_ids=column(*prompt), prompt_tokens=3, block_ids=[column(1)], sampling=GREEDY
        )
        result = await run.step(started=[request], slots=column(0), token_counts=column(3))
        assert read(result.token_ids) == [first]
        pairs = [number for token_id in forced for number in (0, token_id)]
        result = await run.step(forced_ids=column(*pairs), slots=column(0), token_counts=column(4), computed_tokens=3)
        ids = read(result.token_ids)
        for _ in range(2):
            ids += read((await run.step(slots=column(0))).token_ids)
        assert ids == expected
        await run.close()


async def test_prompt_scores_are_those_of_the_reference(tiny: Path) -> None:
    requests = [Request(prompt, 3, scored=0) for prompt in prompts()]
    await finish(tiny, 2, requests)
    check_scores(tiny, prompts(), [list(request.scores.values()) for request in requests])


async def test_a_row_that_fails_fails_on_every_rank_and_the_others_go_on(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    good = tiny_llama(tmp_path / "good")
    embedding = load_file(good / "model.safetensors")["model.embed_tokens.weight"]
    embedding[300] = torch.nan
    broken = tiny_llama(tmp_path / "broken", extra={"model.embed_tokens.weight": embedding})
    (expected,) = reference_ids(good, [[5, 6, 7]], 3, ignore_eos=True)

    def started(slot: int, *ids: int, scored: bool = False) -> pb.NewRequest:
        return pb.NewRequest(
            slot=slot,
            token_ids=column(*ids),
            prompt_tokens=len(ids),
            block_ids=[column(slot + 1)],
            sampling=GREEDY,
            prompt_logprobs=0 if scored else None,
        )

    async with serve(broken, num_blocks=BLOCKS, make=ranks(2)) as rig:
        run = await RunStream.open(rig)
        await run.send(
            started=[started(0, 5, 300, 7), started(1, 5, 6, 7), started(2, 5, 300, 7, scored=True)],
            slots=column(0, 1, 2),
            token_counts=column(3, 3, 3),
        )
        await run.send(slots=column(0, 1, 2))
        for token_id in expected[:2]:
            result = await run.result()
            assert [row.slot for row in result.failed] == [0, 2]
            assert (read(result.token_counts), read(result.token_ids)) == ([0, 1, 0], [token_id])
        result = await run.step(freed_slots=column(0, 2), slots=column(1))
        assert read(result.token_ids) == [expected[2]]
        await run.close()


async def test_a_bad_plan_is_a_fault_and_the_next_epoch_is_whole(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS, make=ranks(2)) as rig:
        run = await RunStream.open(rig)
        fault = await run.fault(slots=column(2))
        assert fault.kind == pb.FAULT_KIND_BAD_PLAN and not fault.fatal
        run = await RunStream.open(rig)
        request = Request([5, 6, 7], 4)
        await MiniScheduler(run, rig.config, BLOCKS).finish([request])
        await run.close()
        assert [request.output] == reference_ids(tiny, [[5, 6, 7]], 4, ignore_eos=True)


async def test_a_step_that_rank_0_abandons_after_its_forward_pass_leaves_the_ranks_in_step(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.executor.plan import BadPlanError

    sample = leader._Telling.sample

    def abandon(*_: object) -> None:
        monkeypatch.setattr(leader._Telling, "sample", sample)
        raise BadPlanError("what was waited for never came")

    async with serve(tiny, num_blocks=BLOCKS, make=ranks(2)) as rig:
        monkeypatch.setattr(leader._Telling, "sample", abandon)
        run = await RunStream.open(rig)
        started = pb.NewRequest(token_ids=column(5), prompt_tokens=1, block_ids=[column(1)], sampling=GREEDY)
        fault = await run.fault(started=[started], slots=column(0))
        assert fault.kind == pb.FAULT_KIND_BAD_PLAN and not fault.fatal
        run = await RunStream.open(rig)
        request = Request([5, 6, 7], 4)
        await MiniScheduler(run, rig.config, BLOCKS).finish([request])
        await run.close()
        assert [request.output] == reference_ids(tiny, [[5, 6, 7]], 4, ignore_eos=True)


async def test_the_pool_is_what_every_rank_has_room_for(tmp_path: Path) -> None:
    """Rank 0 has 2 of the 3 kv heads, so its blocks are the larger: K and V, 2 layers, 2 heads, 16 x 16, 4 bytes."""
    path = tiny_llama(tmp_path, hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
    async with serve(path, make=ranks(2), kv_memory_bytes=10 * 8192 + 100) as rig:
        loaded = await rig.load()
        assert loaded.kv_groups[0].block_bytes == 8192 and loaded.kv_bytes // 8192 == 10
        by_rank = "by 2 ranks a block takes 8192, 4096 bytes, 12288 in all, and 82020, 82020 are there for KV"
        with pytest.raises(grpc.aio.AioRpcError, match=f"10 fit .* of rank 0; {by_rank}"):
            await rig.allocate(11)
        await rig.allocate(10)
        await rig.allocate(10)


async def test_memory_that_is_left_is_divided_by_the_ranks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20)

    def make(path: Path, *, threads: int, kv_memory_bytes: int) -> LeadingExecutor:
        return LeadingExecutor(path, peers=peers(path), threads=threads)

    async with serve(tiny, make=make) as rig:
        assert (await rig.load()).kv_bytes == (64 << 20) * memory.KV_SHARE / 2


async def test_more_kv_memory_than_is_left_is_refused_with_every_ranks_figures(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20)
    asked = (32 << 20) + 1
    async with serve(tiny, make=ranks(2), kv_memory_bytes=asked) as rig:
        code, details = await refusal(rig.load())
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert f"--kv-memory-bytes is {asked} for each of 2 ranks, {2 * asked} in all" in details
        assert f"{64 << 20} bytes are left after the weights, {32 << 20} of them a rank's" in details


def peers(path: Path, start: Callable[..., Any] = RankThread, timeout_s: float = 60.0) -> ChildPeers:
    return ChildPeers(path, size=2, threads=1, timeout_s=timeout_s, start=start)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


async def test_what_one_rank_refuses_is_refused_and_names_the_rank(tiny: Path, tmp_path: Path) -> None:
    lacking = tiny_llama(tmp_path, drop=["model.layers.1.mlp.up_proj.weight"])

    def start(place: Place, connection: Connection, log_level: str) -> RankThread:
        return RankThread(
            Place(str(lacking), *[getattr(place, name) for name in list(place.__dict__)[1:]]), connection, log_level
        )

    def make(path: Path, *, threads: int, kv_memory_bytes: int) -> LeadingExecutor:
        return LeadingExecutor(path, peers=peers(path, start), threads=threads)

    async with serve(tiny, make=make) as rig:
        for _ in range(2):  # the group lives on and says it again
            code, details = await refusal(rig.load())
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert details.startswith("rank 1: ") and "layers.1.mlp.up_proj.weight" in details


async def test_after_a_refusal_of_rank_0_alone_the_right_config_loads(tiny: Path) -> None:
    async with serve(tiny, make=ranks(2)) as rig:
        wrong = pb.EngineConfig()
        wrong.CopyFrom(rig.config)
        wrong.weights_hash = "0" * 64
        code, details = await refusal(rig.load(config=wrong))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "0" * 64 in details
        assert (await rig.load()).vocab_size == 512
        await rig.allocate(BLOCKS)


async def test_both_must_have_been_given_the_same_number_of_ranks(tiny: Path) -> None:
    async with serve(tiny, make=ranks(2)) as rig:
        for asked in (0, 1, 3):
            rig.config.tp_size = asked
            code, details = await refusal(rig.load())
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert details.startswith(f"config.tp_size is {max(1, asked)}, this executor has --tp-size 2")


async def test_progress_counts_the_bytes_of_all_ranks(tiny: Path) -> None:
    async with serve(tiny, make=ranks(2)) as rig:
        progress = [r async for r in rig.stub.Load(rig.load_request()) if not r.HasField("loaded")]
    held = [loader.weight_bytes(tiny, torch.float32, Shard(rank, 2, 0)) for rank in (0, 1)]
    assert all(r.done_bytes <= r.total_bytes for r in progress)
    # A rank's bytes count from its first report on, and a caller that is slow sees the newest alone.
    assert {r.total_bytes for r in progress if r.stage == "weights"} <= {*held, sum(held)}
    assert {r.total_bytes for r in progress if r.stage == "hashing"} <= {(tiny / "model.safetensors").stat().st_size}
    assert progress


async def test_a_log_line_says_what_is_not_divided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_llama(tmp_path, num_attention_heads=1, num_key_value_heads=1)
    with caplog.at_level(logging.INFO):
        async with serve(path, make=ranks(2)) as rig:
            await rig.load()
    (line,) = [record.message for record in caplog.records if "divided over 2 ranks" in record.message]
    assert "whole on every rank: model.layers.*.self_attn (1 query heads on 1 kv heads)" in line


# -- a rank is lost


def breaking(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The second forward pass of rank 0 after its warm-up raises `error`."""
    load = leader.load_connected

    def load_hooked(*args: Any) -> loader.Checkpoint:
        checkpoint = load(*args)
        calls = []

        def call(*_: object) -> None:
            calls.append(1)
            if len(calls) == 4:  # two are of the warm-up
                raise error

        checkpoint.model.register_forward_pre_hook(call)
        return checkpoint

    monkeypatch.setattr(leader, "load_connected", load_hooked)


async def test_an_error_of_rank_0_is_a_fatal_fault(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(monkeypatch, MemoryError("no memory left"))
    monkeypatch.setattr("services.executor.ranks.peers._END_S", 0.1)
    async with serve(tiny, num_blocks=BLOCKS, make=ranks(2)) as rig:
        run = await RunStream.open(rig)
        started = pb.NewRequest(token_ids=column(5, 6, 7), prompt_tokens=3, block_ids=[column(1)], sampling=GREEDY)
        await run.step(started=[started], slots=column(0), token_counts=column(3))
        fault = await run.fault(slots=column(0))
        assert fault.kind == pb.FAULT_KIND_RANK_LOST and fault.fatal and fault.step == 2
        assert fault.message == "rank 0: MemoryError: no memory left"
        executor = rig.servicer._executor
        assert executor.lost.result(0) == fault.message, "which is what ends the process"


async def test_a_rank_that_does_not_come_to_a_sum_is_waited_for_no_longer_than_allowed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Hang:
        def __call__(self, *_: object) -> None:
            if hanging:
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)

    hanging: list[bool] = []
    load = follower.load_connected

    def load_hooked(*args: Any) -> loader.Checkpoint:
        checkpoint = load(*args)
        checkpoint.model.register_forward_pre_hook(Hang())
        return checkpoint

    monkeypatch.setattr(follower, "load_connected", load_hooked)
    async with serve(tiny, num_blocks=BLOCKS, make=ranks(2, timeout_s=2.0)) as rig:
        run = await RunStream.open(rig)
        hanging.append(True)
        started = pb.NewRequest(token_ids=column(5), prompt_tokens=1, block_ids=[column(1)], sampling=GREEDY)
        fault = await run.fault(started=[started], slots=column(0))
        assert fault.kind == pb.FAULT_KIND_RANK_LOST and fault.fatal
        assert "rank 0: " in fault.message and "imed out" in fault.message
        release.set()


def test_ranks_that_do_not_get_ready_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.executor.ranks.peers._START_S", 0.2)

    class Silent:
        def __init__(self, place: Place, connection: Connection, log_level: str) -> None:
            self.connection = Connection(os.dup(connection.fileno()))

        def wait(self, timeout: float) -> int:
            return 0

        def kill(self) -> None:
            raise AssertionError("it has ended")

    group = peers(Path("nowhere"), Silent, timeout_s=0.2)
    try:
        with pytest.raises(Exception, match=r"rank 1 has said nothing for 0.2 s"):
            group.wait_ready()
    finally:
        group.close()


def test_more_threads_than_there_are_cpus_are_refused_before_ranks_are_left_behind(tiny: Path) -> None:
    with pytest.raises(StartError, match="--threads is 4096"):
        LeadingExecutor(tiny, peers=peers(tiny), threads=4096)
