"""The executor's device path, whole, on the shim: real server, real model, our kernels; tensors on the CPU pose as a
card's."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triptych.executor.v1 import executor_pb2 as pb
from triptych.inference.v1 import generation_pb2

from services.common.errors import StartError
from services.executor import steps
from services.executor.executor import Executor
from services.executor.graphs import ladder
from services.executor.masks import StepMasks, allowing
from services.executor.plan import Plan, Settings, Started
from services.executor.sampling_params import SamplingParams
from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, column, read, serve
from tests.executor.shim_device import ShimDevice, device_executor
from tests.support.checkpoints import (
    check_same_ids,
    check_scores,
    float64_logits,
    reference_ids,
    tiny_llama,
    tiny_model,
)

NEW_TOKENS = 12
NO_IDS = np.zeros(0, np.int64)
NO_PAIRS = NO_IDS.reshape(0, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with heads of 64 dimensions, which the kernels know."""
    return tiny_llama(tmp_path_factory.mktemp("heads-of-64"), head_dim=64)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 512, length).tolist() for length in lengths]


async def generate(
    path: Path,
    asked: Sequence[Sequence[int]],
    device: ShimDevice,
    *,
    make: Any = device_executor,
    dtype: pb.DType = pb.D_TYPE_FLOAT32,
    kv_dtype: pb.DType = pb.D_TYPE_UNSPECIFIED,
    sizes: Sequence[int] | None = None,
    budget: int = 256,
    slots: int = 8,
    preempt: int = 0,
    in_flight: int = 2,
    **request: Any,
) -> tuple[list[Request], dict[str, int]]:
    """The requests once they are done, and the steps by how they ran."""
    blocks = 1 + sum(-(-(len(prompt) + NEW_TOKENS) // 16) for prompt in asked)
    make = functools.partial(make, device=device, graph_sizes=sizes) if make is device_executor else make
    async with serve(path, max_slots=slots, context_tokens=128, max_step_tokens=max(budget, 32), make=make) as rig:
        rig.config.dtype, rig.config.kv_dtype = dtype, kv_dtype
        await rig.load()
        await rig.allocate(blocks)
        device.kernels.launched.clear()
        run = await RunStream.open(rig)
        requests = [Request(list(prompt), NEW_TOKENS, **request) for prompt in asked]
        scheduler = MiniScheduler(run, rig.config, blocks, budget=budget, max_in_flight=in_flight)
        await scheduler.finish(requests, preempt_every=preempt)
        await run.close()
        executor = rig.servicer._executor
        graphs = getattr(executor, "graphs", None)
    ran = {} if graphs is None else {"eager": graphs.eager, **{str(size): n for size, n in graphs.replayed.items()}}
    return requests, ran


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output for request in requests]


@pytest.mark.parametrize(
    ("sizes", "budget", "slots", "preempt"),
    [((), 256, 8, 0), (None, 24, 3, 7)],
    ids=["eager", "graphs, chunks, few slots, preemption"],
)
async def test_float32_gives_the_ids_of_transformers_and_of_the_cpu(
    model: Path, sizes: Sequence[int] | None, budget: int, slots: int, preempt: int
) -> None:
    asked, device = prompts(1, 15, 17, 40), ShimDevice()
    requests, ran = await generate(model, asked, device, sizes=sizes, budget=budget, slots=slots, preempt=preempt)
    check_same_ids(model, asked, outputs(requests), reference_ids(model, asked, NEW_TOKENS, ignore_eos=True))
    assert set(device.kernels.launched) == {"cache_rope", "attn_reference", "sampling"}
    assert ran["eager"] > 0 and (len(ran) > 1) == (sizes is None)


def check_near(path: Path, asked: Sequence[Sequence[int]], got: Sequence[Sequence[int]], share: float) -> None:
    """Each id is one whose float64 logit lies within `share` of the spread of the likeliest one's, given what was
    drawn before it: rounding to 16 bits may choose between such, and between no others."""
    for prompt, ids in zip(asked, got, strict=True):
        assert len(ids) == NEW_TOKENS
        for at, token_id in enumerate(ids):
            logits = float64_logits(path, [*prompt, *ids[:at]])
            assert logits.max() - logits[token_id] <= share * np.ptp(logits), (len(prompt), at)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "share"),
    [
        (pb.D_TYPE_BFLOAT16, pb.D_TYPE_UNSPECIFIED, 0.03),
        pytest.param(pb.D_TYPE_FLOAT16, pb.D_TYPE_UNSPECIFIED, 0.005, marks=pytest.mark.slow),
        pytest.param(pb.D_TYPE_BFLOAT16, pb.D_TYPE_E4M3, 0.15, marks=pytest.mark.slow),
    ],
)
async def test_16_bits_by_tensor_cores_with_graphs_mixed_steps_and_preemption(
    model: Path, dtype: pb.DType, kv_dtype: pb.DType, share: float
) -> None:
    """A prompt of 40 in chunks of up to 24 beside decodes, so that a step has rows of both kernels."""
    asked, device = prompts(1, 17, 40), ShimDevice()
    requests, ran = await generate(model, asked, device, dtype=dtype, kv_dtype=kv_dtype, budget=24, slots=3, preempt=9)
    check_near(model, asked, outputs(requests), share)
    used = set(device.kernels.launched)
    assert used == {"cache_rope", "attn_decode", "attn_decode_reduce", "attn_prefill", "sampling"}
    assert ran["eager"] > 0 and len(ran) > 1


async def test_the_checkpoints_own_dtype_is_served_where_none_is_asked_for(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, head_dim=64, dtype="bfloat16", num_hidden_layers=1)
    async with serve(path, make=device_executor) as rig:
        told = await rig.load()
    assert (told.dtype, told.kv_dtype, told.device) == (pb.D_TYPE_BFLOAT16, pb.D_TYPE_BFLOAT16, "cuda:0")


async def test_the_slow_backend_gives_the_same_ids_and_is_taken_where_the_kernels_do_not_know_the_heads(
    model: Path, tiny: Path
) -> None:
    for path, options in ((tiny, {}), (model, {"attention_backend": "torch-sdpa"})):
        asked, device = prompts(1, 17, 40), ShimDevice()
        make = functools.partial(device_executor, device=device, **options)
        requests, ran = await generate(path, asked, device, make=make, budget=24)
        check_same_ids(path, asked, outputs(requests), reference_ids(path, asked, NEW_TOKENS, ignore_eos=True))
        assert set(device.kernels.launched) == {"sampling"} and set(ran) == {"eager"}


async def test_the_slow_backend_serves_the_cpu_too_where_it_is_asked_for(tiny: Path) -> None:
    asked = prompts(1, 17, 40)
    make = functools.partial(Executor, attention_backend="torch-sdpa")
    requests, _ = await generate(tiny, asked, ShimDevice(), make=make, budget=24)
    check_same_ids(tiny, asked, outputs(requests), reference_ids(tiny, asked, NEW_TOKENS, ignore_eos=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma2", {"head_dim": 64, "sliding_window": 20, "query_pre_attn_scalar": 64}),
        ("mistral", {"head_dim": 64, "sliding_window": 20}),
        ("qwen3", {"head_dim": 64}),
        ("gpt_neox", {"hidden_size": 256, "num_key_value_heads": None}),
        ("mixtral", {"head_dim": 64, "num_local_experts": 4}),
    ],
)
async def test_families_with_windows_caps_norms_and_experts(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    path = tiny_model(tmp_path, model_type, **settings)
    asked, device = prompts(1, 17, 40), ShimDevice()
    requests, ran = await generate(path, asked, device, budget=24)
    check_same_ids(path, asked, outputs(requests), reference_ids(path, asked, NEW_TOKENS, ignore_eos=True))
    assert "attn_reference" in device.kernels.launched
    assert (set(ran) == {"eager"}) == (model_type == "mixtral"), "experts are looped over on the host"


SEEDED = generation_pb2.Sampling(
    temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1
)


async def test_seeded_and_penalized_ids_are_those_of_the_cpu_though_the_last_one_is_not_known_on_the_host(
    model: Path,
) -> None:
    """Two steps in flight: penalties count an id before the host has been told it. A preemption lies in between."""
    asked, device = prompts(3, 17), ShimDevice()
    options = {"sampling": SEEDED, "seed": 11, "budget": 24}
    expected, _ = await generate(model, asked, device, make=Executor, in_flight=1, **options)
    got, _ = await generate(model, asked, device, preempt=5, **options)
    assert outputs(got) == outputs(expected)


async def test_prompt_logprobs_are_float64s(model: Path) -> None:
    asked, device = prompts(17, 40), ShimDevice()
    requests, _ = await generate(model, asked, device, budget=24, scored=2)
    check_scores(model, asked, [[request.scores[at] for at in sorted(request.scores)] for request in requests])


def settings(**changes: int) -> Settings:
    return Settings(**({"context_tokens": 64, "block_tokens": 16, "max_slots": 4, "max_step_tokens": 32} | changes))


def ready(path: Path, device: ShimDevice, *, blocks: int = 12, **options: Any) -> Any:
    """A loaded and allocated executor."""
    executor = device_executor(path, device=device, threads=1, **options)
    executor.load(settings(), torch.float32, "", lambda progress: None)
    executor.allocate(blocks)
    return executor


def started(slot: int, ids: Sequence[int], **sampling: Any) -> Started:
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    return Started(slot, np.array(ids, np.uint32), len(ids), 0, np.array([1 + 2 * slot, 2 + 2 * slot]), params)


def plan(step: int, slots: Sequence[int], counts: Sequence[int], *new: Started, freed: Sequence[int] = ()) -> Plan:
    return Plan(
        step,
        np.array(freed, np.int64),
        new,
        NO_PAIRS,
        np.array(slots, np.int64),
        np.array(counts, np.int64),
        None,
        None,
    )


def test_a_steady_decode_is_launched_before_the_step_before_it_is_known_and_waits_for_nothing(model: Path) -> None:
    device = ShimDevice()
    executor = ready(model, device)
    (prompt,) = prompts(9)
    (expected,) = reference_ids(model, [prompt], 6, ignore_eos=True)
    device.waits = 0
    steps = [executor.launch(plan(1, [0], [9], started(0, prompt)))]
    steps.append(executor.launch(plan(2, [0], [1])))
    assert device.waits == 0 and not any(step.is_done for step in steps)
    for number in range(3, 7):
        assert steps[number - 3].outcome().token_ids.tolist() == [expected[number - 3]]
        device.waits = 0
        steps.append(executor.launch(plan(number, [0], [1])))
        assert device.waits == 0
    assert [step.outcome().token_ids.tolist() for step in steps] == [[token_id] for token_id in expected]
    assert executor.graphs.replayed == {1: 5} and [step.outcome().in_graph for step in steps] == [False, *[True] * 5]


def test_a_graph_reads_no_table_but_its_rows_and_pads_write_the_null_block_alone(model: Path) -> None:
    """Three rows in a graph of four; every block that is nobody's keeps what lay in it."""
    device = ShimDevice()
    executor = ready(model, device, blocks=12)
    asked = prompts(5, 6, 7)
    expected = reference_ids(model, asked, 3, ignore_eos=True)
    cache = executor._runner._cache
    cache._stored[:, :, 7:] = 1e4
    cache._stored[:, :, 0] = torch.nan
    got = [executor.execute(plan(1, [0, 1, 2], [5, 6, 7], *(started(i, ids) for i, ids in enumerate(asked))))]
    got += [executor.execute(plan(step, [0, 1, 2], [1, 1, 1])) for step in (2, 3)]
    assert [outcome.token_ids.tolist() for outcome in got] == [list(ids) for ids in zip(*expected, strict=True)]
    assert executor.graphs.replayed == {4: 2}
    assert (cache._stored[:, :, 7:] == 1e4).all()
    assert not cache._stored[:, :, 0, :, 0].isnan().any() and cache._stored[:, :, 0, :, 1:].isnan().all()


def test_rows_that_do_not_sample_share_a_graph_with_those_that_do(model: Path) -> None:
    device = ShimDevice()
    executor = ready(model, device)
    long, short = prompts(6, 4)
    expected = reference_ids(model, [long, short], 2, ignore_eos=True)
    executor.execute(plan(1, [1, 0], [4, 4], started(0, long), started(1, short)))
    second = executor.execute(plan(2, [1, 0], [1, 1]))  # the fifth of six tokens: one token, and no id
    third = executor.execute(plan(3, [0], [1]))
    assert second.token_counts.tolist() == [1, 0] and second.token_ids.tolist() == expected[1][1:]
    assert third.token_ids.tolist() == expected[0][:1] and executor.graphs.replayed == {2: 1, 1: 1}


def test_the_ladder_of_graphs() -> None:
    assert ladder(1) == (1,) and ladder(3) == (1, 2, 3) and ladder(8) == (1, 2, 4, 8)
    assert ladder(20) == (1, 2, 4, 8, 16, 20)
    assert ladder(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def test_steps_larger_than_the_largest_graph_and_steps_of_prompts_run_eagerly(model: Path) -> None:
    executor = ready(model, ShimDevice(), graph_sizes=(2,))
    asked = prompts(5, 6, 7)
    executor.execute(plan(1, [0, 1, 2], [5, 6, 7], *(started(i, ids) for i, ids in enumerate(asked))))
    ran = [executor.execute(plan(2, [0, 1, 2], [1, 1, 1])).in_graph, executor.execute(plan(3, [2], [1])).in_graph]
    assert ran == [False, True] and (executor.graphs.eager, executor.graphs.replayed) == (2, {2: 1})


def test_copied_blocks_are_read_by_the_step_that_copies_them(model: Path) -> None:
    executor = ready(model, ShimDevice())
    (prompt,) = prompts(20)
    (expected,) = reference_ids(model, [prompt], 2, ignore_eos=True)
    executor.execute(plan(1, [0], [20], started(0, prompt)))
    other = replace(started(1, prompt), computed_tokens=19, block_ids=np.array([1, 7]))
    copying = replace(plan(2, [0, 1], [1, 1], other), copies=np.array([[2, 7]]))
    assert executor.execute(copying).token_ids.tolist() == [expected[1], expected[0]]
    assert executor.execute(plan(3, [1], [1])).token_ids.tolist() == [expected[1]]


def test_a_mask_is_waited_for_once_the_forward_pass_is_on_its_way(model: Path) -> None:
    device = ShimDevice()
    executor = ready(model, device)
    asked = prompts(5, 6)
    step = replace(
        plan(1, [0, 1], [5, 6], *(started(i, ids) for i, ids in enumerate(asked))), masked_slots=np.array([1])
    )
    masks = StepMasks(1)
    masks.expect([1], deadline_s=20.0)
    device.kernels.launched.clear()
    launched: list[str] = []

    def put() -> None:
        launched.extend(device.kernels.launched)
        masks.put(1, allowing(np.array([7, 9]), 512))

    timer = threading.Timer(0.5, put)
    timer.start()
    outcome = executor.execute(step, masks)
    timer.join()
    logits = float64_logits(model, asked[1])
    assert outcome.token_ids.tolist()[1] == max((7, 9), key=lambda token_id: logits[token_id])
    assert launched.count("attn_reference") == 2 and "sampling" not in launched


def test_an_id_is_forced_behind_one_that_only_the_device_knows_yet(model: Path) -> None:
    """Penalized, so that the history too has the unknown id before the forced one."""
    executor = ready(model, ShimDevice())
    (prompt,) = prompts(9)
    penalized = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    first = executor.launch(plan(1, [0], [9], started(0, prompt, **penalized)))
    second = executor.launch(replace(plan(2, [0], [2]), forced_ids=np.array([[0, 77]])))
    assert not first.is_done
    ids = [*prompt, int(first.outcome().token_ids[0]), 77]
    known = replace(started(1, ids, **penalized), prompt_tokens=9)
    assert executor.execute(plan(3, [1], [11], known)).token_ids.tolist() == second.outcome().token_ids.tolist()


def test_a_row_that_no_id_is_left_for_is_told_from_one_whose_logits_are_nan(model: Path) -> None:
    executor = ready(model, ShimDevice())
    bad, empty, good = prompts(5, 6, 7)
    with torch.inference_mode():
        executor._checkpoint.model.get_input_embeddings().weight[bad[-1]] = torch.nan
    news = (started(0, bad, allowed_ids=(4,)), started(1, empty, allowed_ids=(4,)), started(2, good))
    masks = StepMasks(1)
    masks.expect([1], deadline_s=20.0)
    masks.put(1, allowing(np.array([5]), 512))
    outcome = executor.execute(replace(plan(1, [0, 1, 2], [5, 6, 7], *news), masked_slots=np.array([1])), masks)
    assert outcome.failed_slots == (0, 1) and outcome.idless_slots == (1,)
    assert outcome.token_counts.tolist() == [0, 0, 1]


def test_a_row_whose_logits_are_nan_fails_alone_and_so_does_the_step_launched_behind_it(model: Path) -> None:
    device = ShimDevice()
    executor = ready(model, device)
    bad, good = prompts(5, 6)
    (expected,) = reference_ids(model, [good], 4, ignore_eos=True)
    weight = executor._checkpoint.model.get_input_embeddings().weight
    with torch.inference_mode():
        weight[bad[-1]] = torch.nan
    assert bad[-1] not in [*good, *expected]
    first = executor.launch(plan(1, [0, 1], [5, 6], started(0, bad), started(1, good)))
    second = executor.launch(plan(2, [0, 1], [1, 1]))
    outcomes = [first.outcome(), second.outcome()]
    outcomes.append(executor.execute(plan(3, [0, 1], [1, 1])))  # by now the host leaves the row out
    for at, outcome in enumerate(outcomes):
        assert outcome.failed_slots == (0,) and outcome.token_counts.tolist() == [0, 1]
        assert outcome.token_ids.tolist() == [expected[at]]
    # The slot is as good as new for the next request.
    executor.execute(plan(4, [1], [1], freed=[0]))
    again = executor.execute(plan(6, [0], [6], started(0, good)))
    assert again.failed_slots == () and again.token_ids.tolist() == expected[:1]


def test_a_prompt_whose_scores_are_nan_fails_in_that_chunk_and_tells_none(model: Path) -> None:
    """The chunk samples nothing; the one behind it, launched before that is known, fails too."""
    executor = ready(model, ShimDevice())
    bad, good = prompts(12, 5)
    with torch.inference_mode():
        executor._checkpoint.model.get_input_embeddings().weight[bad[3]] = torch.nan
    news = (replace(started(0, bad), scored=1), replace(started(1, good), scored=1))
    first = executor.launch(plan(1, [0, 1], [8, 5], *news))
    second = executor.launch(plan(2, [0, 1], [4, 1]))
    for at, step in enumerate((first, second)):
        outcome = step.outcome()
        assert outcome.failed_slots == (0,) and outcome.token_counts.tolist() == [0, 1]
        assert [scores.slot for scores in outcome.prompt_scores] == ([1] if at == 0 else [])


def test_a_slot_freed_while_its_failure_is_on_its_way_starts_without_it(model: Path) -> None:
    device = ShimDevice()
    executor = ready(model, device)
    bad, good = prompts(5, 6)
    with torch.inference_mode():
        executor._checkpoint.model.get_input_embeddings().weight[bad[-1]] = torch.nan
    first = executor.launch(plan(1, [0], [5], started(0, bad)))
    second = executor.launch(plan(2, [], [], freed=[0]))
    assert first.outcome().failed_slots == (0,) and second.outcome().failed_slots == ()
    executor.execute(plan(3, [], []))
    assert executor.execute(plan(4, [0], [6], started(0, good))).failed_slots == ()


def test_kv_gets_its_share_of_what_weights_and_a_step_leave(model: Path) -> None:
    device = ShimDevice(free_bytes=21 << 20)
    executor = device_executor(model, device=device, threads=1)
    facts = executor.load(settings(), torch.float32, "", lambda progress: None)
    assert facts.kv_bytes == int(0.9 * (20 << 20))  # the shim says that a step takes 1 MiB at its height
    assert facts.block_bytes == 2 * 2 * 2 * 16 * 64 * 4  # layers, keys and values, kv heads, tokens, dimensions
    loaded = {instance.name.split("<")[0] for instance in device.loaded}
    assert loaded == {"cache_rope", "attn_reference", "sampling"}


@pytest.mark.parametrize(
    ("options", "free_bytes", "said"),
    [
        ({"kv_memory_bytes": 1 << 30}, 64 << 20, "--kv-memory-bytes is 1073741824, but 67108864 bytes are left"),
        ({}, 1 << 10, "are free; raise the memory limit"),
        ({"attention_backend": "cpu-numba"}, 64 << 20, "--attention-backend is cpu-numba, which cannot serve"),
        ({"attention_backend": "flash"}, 64 << 20, "--attention-backend is flash, which there is not"),
        (
            {"attention_backend": "torch-sdpa", "graph_sizes": (1, 2)},
            64 << 20,
            "torch-sdpa, which cannot serve this model here: its steps cannot be captured in CUDA graphs",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(
    model: Path, options: dict[str, Any], free_bytes: int, said: str
) -> None:
    executor = device_executor(model, device=ShimDevice(free_bytes=free_bytes), threads=1, **options)
    with pytest.raises(StartError, match=said):
        executor.load(settings(), torch.float32, "", lambda progress: None)


def test_more_rows_in_a_graph_than_requests_are_refused(model: Path) -> None:
    executor = device_executor(model, device=ShimDevice(), threads=1, graph_sizes=(1, 8))
    executor.load(settings(), torch.float32, "", lambda progress: None)
    with pytest.raises(StartError, match="--cuda-graph-sizes holds 8, but at most 4 requests run at once"):
        executor.allocate(12)


async def test_a_dtype_that_is_not_served_is_refused_and_the_served_ones_named(model: Path) -> None:
    async with serve(model, make=device_executor) as rig:
        rig.config.kv_dtype = pb.D_TYPE_INT8
        with pytest.raises(Exception, match=r"kv_dtype INT8 is not served on this device yet; served: bfloat16"):
            await rig.load()


async def test_a_device_that_is_lost_for_good_is_a_fatal_fault_and_the_process_is_told(model: Path) -> None:
    device = ShimDevice()
    make = functools.partial(device_executor, device=device)
    async with serve(model, num_blocks=12, max_step_tokens=32, context_tokens=64, make=make) as rig:
        run = await RunStream.open(rig)
        request = pb.NewRequest(
            slot=0, token_ids=column(3, 4), prompt_tokens=2, block_ids=[column(1)], sampling=generation_pb2.Sampling()
        )
        first = await run.step(started=[request], slots=column(0), token_counts=column(2))
        assert len(read(first.token_ids)) == 1
        device.failure = RuntimeError("CUDA error: an illegal memory access, sticky")
        fault = await run.fault(slots=column(0))
        assert (fault.kind, fault.fatal) == (pb.FAULT_KIND_DEVICE, True) and "illegal memory access" in fault.message
        executor = rig.servicer._executor
        assert executor.lost.done() and executor.lost.result().startswith("cuda:0: CUDA error")
        device.failure = None  # so that the rig can end


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_device_that_hangs_ends_the_process_at_the_steps_deadline(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch returns at once; it is the wait for the result that has the deadline."""
    ended, go_on = threading.Event(), threading.Event()

    def end_process() -> None:
        ended.set()
        raise SystemExit  # the watchdog's thread alone, here

    monkeypatch.setattr(steps, "_end_process", end_process)
    device = ShimDevice()
    make = functools.partial(device_executor, device=device)
    async with serve(model, num_blocks=12, max_step_tokens=32, context_tokens=64, make=make) as rig:
        run = await RunStream.open(rig)
        request = pb.NewRequest(
            slot=0, token_ids=column(3, 4), prompt_tokens=2, block_ids=[column(1)], sampling=generation_pb2.Sampling()
        )
        device.hang = go_on
        await run.send(started=[request], slots=column(0), token_counts=column(2), deadline_ms=300)
        assert await asyncio.to_thread(ended.wait, 20)
        go_on.set()
        await run.result()
        await run.close()


async def test_an_error_that_the_device_survives_ends_the_epoch_alone(model: Path) -> None:
    device = ShimDevice()
    make = functools.partial(device_executor, device=device)
    async with serve(model, num_blocks=12, max_step_tokens=32, context_tokens=64, make=make) as rig:
        request = pb.NewRequest(
            slot=0, token_ids=column(3, 4), prompt_tokens=2, block_ids=[column(1)], sampling=generation_pb2.Sampling()
        )
        whole = {"started": [request], "slots": column(0), "token_counts": column(2)}
        run = await RunStream.open(rig)
        device.failure = RuntimeError("made up")
        fault = await run.fault(**whole)
        assert (fault.kind, fault.fatal) == (pb.FAULT_KIND_INTERNAL, False)
        device.failure = None
        run = await RunStream.open(rig)
        assert len(read((await run.step(**whole)).token_ids)) == 1
        await run.close()
