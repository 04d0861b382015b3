"""Ranks that have a device each answer as one device does: the device path on two shims, gloo in the place of NCCL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from triptych.executor.v1 import executor_pb2 as pb
from triptych.inference.v1 import generation_pb2

from services.executor.plan import BadPlanError
from services.executor.ranks.device_following import FollowingDeviceExecutor
from services.executor.ranks.device_leading import LeadingDeviceExecutor
from services.executor.ranks.meeting import Hello, unfit
from tests.executor.mini_scheduler import GREEDY, MiniScheduler, Request, RunStream, column, read, serve
from tests.executor.ranks import device_ranks
from tests.executor.shim_device import ShimDevice, device_executor
from tests.executor.test_device_executor import NEW_TOKENS, check_near, outputs, prompts
from tests.support.checkpoints import check_same_ids, check_scores, reference_ids, tiny_llama, tiny_model

BLOCKS = 40
SMALL = {"max_slots": 4, "context_tokens": 128, "max_step_tokens": 32}
"""Settings of which the shim's warm-up is soon through."""


def two(*on: ShimDevice, made: list[LeadingDeviceExecutor] | None = None) -> Any:
    """Two ranks that capture nothing."""
    return device_ranks(*(on or (ShimDevice(), ShimDevice())), made=made, graph_sizes=())


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Ranks are threads here: each sets torch's default while it makes its model, and may put back the other's."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), head_dim=64)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With norms of heads."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=64)


async def generate(
    path: Path,
    make: Any,
    asked: list[list[int]],
    *,
    dtype: pb.DType = pb.D_TYPE_FLOAT32,
    preempt: int = 7,
    **request: Any,
) -> list[Request]:
    """Prompts in chunks, some preempted, two steps in flight."""
    async with serve(path, make=make, **SMALL) as rig:
        rig.config.dtype = dtype
        await rig.load()
        await rig.allocate(BLOCKS)
        run = await RunStream.open(rig)
        requests = [Request(list(prompt), NEW_TOKENS, **request) for prompt in asked]
        await MiniScheduler(run, rig.config, BLOCKS, budget=24).finish(requests, preempt_every=preempt)
        await run.close()
    return requests


@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_ids_by_two_ranks_are_those_of_transformers_with_graphs_chunks_and_preemption(
    family: str, request: pytest.FixtureRequest
) -> None:
    path, asked, made = request.getfixturevalue(family), prompts(1, 15, 17, 40), []
    shims = ShimDevice(), ShimDevice()
    requests = await generate(path, device_ranks(*shims, made=made), asked)
    check_same_ids(path, asked, outputs(requests), reference_ids(path, asked, NEW_TOKENS, ignore_eos=True))
    assert made[0].graphs.replayed.total() > 0 and made[0].graphs.eager > 0
    assert shims[0].replays == shims[1].replays
    launched = [set(shim.kernels.launched) for shim in shims]
    assert launched == [{"cache_rope", "attn_reference", "sampling"}, {"cache_rope", "attn_reference"}], "rank 0 draws"


async def test_sampled_and_penalized_ids_are_those_of_one_device(llama: Path) -> None:
    sampling = generation_pb2.Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.3)

    async def drawn(make: Any) -> list[list[int]]:
        return outputs(await generate(llama, make, prompts(5, 20), sampling=sampling, seed=11))

    assert await drawn(device_ranks(ShimDevice(), ShimDevice())) == await drawn(device_executor)


async def test_16_bits_by_tensor_cores(llama: Path) -> None:
    asked = prompts(3, 17)
    requests = await generate(llama, device_ranks(ShimDevice(), ShimDevice()), asked, dtype=pb.D_TYPE_BFLOAT16)
    check_near(llama, asked, outputs(requests), 0.03)


async def test_prompt_scores_are_those_of_the_reference(llama: Path) -> None:
    asked = prompts(1, 17, 30)
    requests = await generate(llama, device_ranks(ShimDevice(), ShimDevice()), asked, scored=0, preempt=0)
    check_scores(llama, asked, [list(request.scores.values()) for request in requests])


HEADS = {"head_dim": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TIED = {"vocab_size": 500, "tie_word_embeddings": True}
FAMILIES: list[Any] = [
    ("llama", HEADS | TIED),
    pytest.param("qwen2", HEADS, marks=pytest.mark.slow, id="biases of q, k, v"),
    pytest.param("qwen3_moe", HEADS | EXPERTS, marks=pytest.mark.slow, id="experts"),
    pytest.param("gemma2", HEADS, marks=pytest.mark.slow, id="scaled embeddings, soft caps, windows, four norms"),
    pytest.param(
        "gpt_neox",
        {"hidden_size": 256, "num_key_value_heads": None},
        marks=pytest.mark.slow,
        id="q, k, v in one, nothing fused",
    ),
]


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
async def test_families_and_vocabularies_that_do_not_divide_evenly(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    path, asked = tiny_model(tmp_path, family, **settings), [[5, 6, 7], list(range(3, 23))]
    requests = await generate(path, device_ranks(ShimDevice(), ShimDevice(), graph_sizes=()), asked, preempt=0)
    check_same_ids(path, asked, outputs(requests), reference_ids(path, asked, NEW_TOKENS, ignore_eos=True))


async def test_a_row_that_fails_fails_on_every_rank_and_the_others_go_on(tmp_path: Path) -> None:
    """Two steps in flight: the failure is known to the hosts later than to the devices."""
    from safetensors.torch import load_file

    good = tiny_llama(tmp_path / "good", head_dim=64)
    embedding = load_file(good / "model.safetensors")["model.embed_tokens.weight"]
    embedding[300] = torch.nan
    broken = tiny_llama(tmp_path / "broken", head_dim=64, extra={"model.embed_tokens.weight": embedding})
    (expected,) = reference_ids(good, [[5, 6, 7]], 4, ignore_eos=True)

    def started(slot: int, *ids: int, scored: bool = False) -> pb.NewRequest:
        return pb.NewRequest(
            slot=slot,
            token_ids=column(*ids),
            prompt_tokens=len(ids),
            block_ids=[column(slot + 1)],
            sampling=GREEDY,
            prompt_logprobs=0 if scored else None,
        )

    async with serve(broken, num_blocks=BLOCKS, make=two(), **SMALL) as rig:
        run = await RunStream.open(rig)
        await run.send(
            started=[started(0, 5, 300, 7), started(1, 5, 6, 7), started(2, 5, 300, 7, scored=True)],
            slots=column(0, 1, 2),
            token_counts=column(3, 3, 3),
        )
        await run.send(slots=column(0, 1, 2))
        for at in range(2):
            result = await run.result()
            assert [row.slot for row in result.failed] == [0, 2]
            assert (read(result.token_counts), read(result.token_ids)) == ([0, 1, 0], [expected[at]])
        result = await run.step(slots=column(0, 1, 2))  # the hosts leave the rows out by now
        assert read(result.token_ids) == [expected[2]]
        result = await run.step(freed_slots=column(0, 2), slots=column(1))
        assert read(result.token_ids) == [expected[3]]
        await run.close()


async def test_a_step_that_rank_0_abandons_after_its_forward_pass_leaves_the_ranks_in_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = LeadingDeviceExecutor._draw

    def abandon(*_: object) -> None:
        monkeypatch.setattr(LeadingDeviceExecutor, "_draw", draw)
        raise BadPlanError("what was waited for never came")

    async with serve(llama, num_blocks=BLOCKS, make=two(), **SMALL) as rig:
        monkeypatch.setattr(LeadingDeviceExecutor, "_draw", abandon)
        run = await RunStream.open(rig)
        started = pb.NewRequest(token_ids=column(5), prompt_tokens=1, block_ids=[column(1)], sampling=GREEDY)
        fault = await run.fault(started=[started], slots=column(0))
        assert fault.kind == pb.FAULT_KIND_BAD_PLAN and not fault.fatal
        run = await RunStream.open(rig)
        request = Request([5, 6, 7], 4)
        await MiniScheduler(run, rig.config, BLOCKS).finish([request])
        await run.close()
        assert [request.output] == reference_ids(llama, [[5, 6, 7]], 4, ignore_eos=True)


async def test_the_pool_is_what_the_fullest_device_has_room_for(llama: Path) -> None:
    """Nine tenths of what a device has left once a step has shown that it takes 1 MiB (shim_device)."""
    on = ShimDevice(free_bytes=64 << 20), ShimDevice(free_bytes=16 << 20)
    async with serve(llama, make=two(*on), kv_memory_bytes=None, **SMALL) as rig:
        loaded = await rig.load()
        block_bytes = loaded.kv_groups[0].block_bytes
        assert loaded.kv_bytes // block_bytes == int(0.9 * (15 << 20)) // block_bytes
        with pytest.raises(grpc.aio.AioRpcError, match="of rank 0; by 2 ranks a block takes"):
            await rig.allocate(loaded.kv_bytes // block_bytes + 1)
        await rig.allocate(BLOCKS)


async def test_what_one_devices_memory_refuses_is_refused_and_names_the_rank(llama: Path) -> None:
    small = ShimDevice(free_bytes=100_000)
    async with serve(llama, make=two(ShimDevice(), small), kv_memory_bytes=None, **SMALL) as rig:
        with pytest.raises(grpc.aio.AioRpcError, match=r"rank 1: the weights .* its share of what is free is 100000"):
            await rig.load()
        small.free_bytes = 64 << 20
        await rig.load()
        await rig.allocate(BLOCKS)


async def test_kv_memory_that_is_not_left_is_refused_with_every_ranks_reason_and_the_group_lives_on(
    llama: Path,
) -> None:
    on = ShimDevice(), ShimDevice(free_bytes=8 << 20)
    async with serve(llama, make=two(*on), kv_memory_bytes=16 << 20, **SMALL) as rig:
        with pytest.raises(grpc.aio.AioRpcError, match=f"^(?s:.*)rank 1: --kv-memory-bytes is {16 << 20}, but"):
            await rig.load()
        on[1].free_bytes = 64 << 20
        await rig.load()
        await rig.allocate(BLOCKS)


async def test_a_rank_that_dies_in_the_middle_of_a_step_ends_the_group(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LeadingDeviceExecutor] = []
    draw = FollowingDeviceExecutor._draw

    def die(self: FollowingDeviceExecutor, *arguments: Any) -> Any:
        if not self._warming:
            raise RuntimeError("an illegal memory access was encountered")
        return draw(self, *arguments)

    monkeypatch.setattr(FollowingDeviceExecutor, "_draw", die)
    async with serve(llama, num_blocks=BLOCKS, make=two(made=made), **SMALL) as rig:
        run = await RunStream.open(rig)
        started = pb.NewRequest(token_ids=column(5), prompt_tokens=1, block_ids=[column(1)], sampling=GREEDY)
        fault = await run.fault(started=[started], slots=column(0))
        assert fault.fatal and "rank 1: RuntimeError: an illegal memory access" in fault.message
        reason = await asyncio.wrap_future(made[0].lost)
        assert "illegal memory access" in reason


async def test_rank_0s_own_device_lost_for_good_ends_the_group(llama: Path) -> None:
    on, made = (ShimDevice(), ShimDevice()), []
    async with serve(llama, num_blocks=BLOCKS, make=two(*on, made=made), **SMALL) as rig:
        run = await RunStream.open(rig)
        on[0].failure = RuntimeError("a sticky error")
        started = pb.NewRequest(token_ids=column(5), prompt_tokens=1, block_ids=[column(1)], sampling=GREEDY)
        fault = await run.fault(started=[started], slots=column(0))
        assert fault.fatal and "rank 0: cuda:0: a sticky error" in fault.message
        assert "a sticky error" in await asyncio.wrap_future(made[0].lost)


async def test_ranks_of_which_one_cannot_compile_stay_in_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine without a compiler, or where compiling fails half-way: here the first of the ranks to ask."""
    from torch._dynamo.backends.debugging import eager

    asked = prompts(3, 17)
    failed: list[int] = []

    def once(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("no such instruction")
        return eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, backend: compiled(function, backend=once))
    with caplog.at_level(logging.WARNING):
        requests = await generate(llama, device_ranks(ShimDevice(), ShimDevice(), compile_mode="auto"), asked)
    torch._dynamo.reset()
    check_same_ids(llama, asked, outputs(requests), reference_ids(llama, asked, NEW_TOKENS, ignore_eos=True))
    told = [record.message for record in caplog.records if "torch's own kernels: torch.compile fails" in record.message]
    assert len(told) == 1, "one rank goes on without, the other compiles"


def test_a_rank_of_another_kind_of_device_is_refused(llama: Path) -> None:
    own, other = Hello.of(llama, 0, 2, "cuda"), Hello.of(llama, 1, 2)
    assert unfit(other, own) == "rank 1 is on cpu, rank 0 on cuda; give both the same kind of --device"
    assert unfit(Hello.of(llama, 1, 2, "cuda"), own) == ""
