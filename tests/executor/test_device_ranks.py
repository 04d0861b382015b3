"""Ranks that have a device each answer as one device does: the device path on two shims, gloo in the place of NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from triptych.executor.v1 import executor_pb2 as pb
from triptych.inference.v1 import generation_pb2

from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, serve
from tests.executor.ranks import device_ranks
from tests.executor.shim_device import ShimDevice, device_executor
from tests.executor.test_device_executor import NEW_TOKENS, check_near, outputs, prompts
from tests.support.checkpoints import check_same_ids, check_scores, reference_ids, tiny_llama, tiny_model

BLOCKS = 40


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
    async with serve(path, max_slots=4, context_tokens=128, max_step_tokens=32, make=make) as rig:
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
