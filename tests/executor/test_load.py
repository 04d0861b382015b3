"""Load and Allocate: what they answer, what they refuse, and by which name."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.executor.v1 import executor_pb2 as pb

from tests.executor.mini_scheduler import Rig, serve
from tests.support.checkpoints import tiny_llama

# Of the tiny checkpoint: keys and values, 2 layers, 2 kv heads, 16 tokens, head_dim 16, 4 bytes.
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status that awaiting `call` ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


def changed(rig: Rig, **fields: Any) -> pb.EngineConfig:
    """The rig's config with other fields."""
    config = pb.EngineConfig()
    config.CopyFrom(rig.config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


async def test_load_reports_progress_and_ends_with_what_is_loaded(tiny: Path) -> None:
    async with serve(tiny) as rig:
        responses = [r async for r in rig.stub.Load(rig.load_request())]
        *progress, last = responses
        assert not any(r.HasField("loaded") for r in progress)
        assert all(r.done_bytes <= r.total_bytes for r in progress)
        loaded = last.loaded
        file_hash = hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()
        assert loaded.weights_hash == hashlib.sha256(file_hash.encode()).hexdigest()
        assert loaded.config_hash == hashlib.sha256((tiny / "config.json").read_bytes()).hexdigest()
        assert (loaded.version, loaded.device, loaded.vocab_size, loaded.max_in_flight) == (1, "cpu", 512, 2)
        assert (loaded.dtype, loaded.kv_dtype) == (pb.D_TYPE_FLOAT32, pb.D_TYPE_FLOAT32)
        (group,) = loaded.kv_groups
        assert (group.block_tokens, group.block_bytes) == (16, BLOCK_BYTES)
        assert not group.HasField("window_tokens")
        assert loaded.kv_bytes == 64 << 20


async def test_the_same_config_again_is_answered_at_once_and_another_is_refused(tiny: Path) -> None:
    async with serve(tiny) as rig:
        loaded = await rig.load()
        again = [r async for r in rig.stub.Load(rig.load_request())]
        assert [r.loaded for r in again] == [loaded]
        explicit = changed(rig, dtype=pb.D_TYPE_FLOAT32, kv_dtype=pb.D_TYPE_FLOAT32, tp_size=1, pp_size=1, dp_size=1)
        assert await rig.load(config=explicit) == loaded
        assert await rig.load(config=changed(rig, model="the same folder by another name")) == loaded
        for fields in ({"block_tokens": 32}, {"max_slots": 9}, {"context_tokens": 512}, {"max_step_tokens": 1}):
            code, details = await refused(rig.load(config=changed(rig, **fields)))
            assert code == grpc.StatusCode.FAILED_PRECONDITION and "another config" in details
            ((key, value),) = fields.items()
            assert f"{key} is " in details and f", not {value}" in details


@pytest.mark.parametrize(
    ("kv_dtype", "block_bytes"),
    [
        (pb.D_TYPE_BFLOAT16, BLOCK_BYTES // 2),
        (
            pb.D_TYPE_INT8,
            BLOCK_BYTES // 4 + 2 * 2 * 2 * 16 * 4,
        ),  # a scale of 4 bytes for each key and value
    ],
)
async def test_a_load_says_how_keys_and_values_are_kept(
    tiny: Path, kv_dtype: pb.DType.ValueType, block_bytes: int
) -> None:
    async with serve(tiny) as rig:
        loaded = await rig.load(config=changed(rig, kv_dtype=kv_dtype))
        assert (loaded.dtype, loaded.kv_dtype) == (pb.D_TYPE_FLOAT32, kv_dtype)
        assert [group.block_bytes for group in loaded.kv_groups] == [block_bytes]
        code, details = await refused(rig.load())
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "kv_dtype is " in details


async def test_loads_at_the_same_time_share_one_load(tiny: Path) -> None:
    async with serve(tiny) as rig:
        first, second = await asyncio.gather(rig.load(), rig.load())
        assert first == second and first.vocab_size == 512


async def test_weights_of_another_hash_are_refused_and_the_right_ones_load_after(tiny: Path) -> None:
    async with serve(tiny) as rig:
        wrong = changed(rig, weights_hash="0" * 64)
        code, details = await refused(rig.load(config=wrong))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "0" * 64 in details
        loaded = await rig.load()
        assert await rig.load(config=changed(rig, weights_hash=loaded.weights_hash)) == loaded
        code, _ = await refused(rig.load(config=wrong))
        assert code == grpc.StatusCode.FAILED_PRECONDITION


async def test_weights_in_shards_hash_over_their_files_in_order_of_name(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "sharded", shards=3)
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == 3
    hashes = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    async with serve(path) as rig:
        assert (await rig.load()).weights_hash == hashlib.sha256(hashes.encode()).hexdigest()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("rank", {"rank": 1}),
        ("rendezvous", {"rendezvous": "localhost:1"}),
    ],
)
async def test_parts_of_a_load_that_are_not_served_yet_are_named(
    tiny: Path, field: str, changes: dict[str, Any]
) -> None:
    async with serve(tiny) as rig:
        code, details = await refused(rig.load(**changes))
        assert code == grpc.StatusCode.UNIMPLEMENTED and details.startswith(field)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tp_size", 2, grpc.StatusCode.FAILED_PRECONDITION),
        ("pp_size", 2, grpc.StatusCode.UNIMPLEMENTED),
        ("dp_size", 2, grpc.StatusCode.UNIMPLEMENTED),
        ("quantization", "awq", grpc.StatusCode.UNIMPLEMENTED),
        ("dtype", pb.D_TYPE_BFLOAT16, grpc.StatusCode.UNIMPLEMENTED),
        ("kv_dtype", pb.D_TYPE_E4M3, grpc.StatusCode.UNIMPLEMENTED),
        ("kv_dtype", 99, grpc.StatusCode.UNIMPLEMENTED),
        ("block_tokens", 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("max_slots", 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("max_step_tokens", 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("context_tokens", 0, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_config_that_is_not_served_is_refused_by_name(
    tiny: Path, field: str, value: Any, code: grpc.StatusCode
) -> None:
    async with serve(tiny) as rig:
        assert (await refused(rig.load(config=changed(rig, **{field: value}))))[0] == code
        assert f"config.{field}" in (await refused(rig.load(config=changed(rig, **{field: value}))))[1]


async def test_another_commit_than_the_schedulers_is_refused_and_an_unknown_one_is_not(tmp_path: Path) -> None:
    ours, theirs = "a" * 40, "b" * 40
    path = tiny_llama(tmp_path / "models--org--tiny" / "snapshots" / ours)
    async with serve(path) as rig:
        code, details = await refused(rig.load(config=changed(rig, revision=theirs)))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert ours in details and theirs in details and "--revision" in details
        loaded = await rig.load(config=changed(rig, revision=ours))
        assert await rig.load(config=changed(rig, revision="")) == loaded


async def test_files_of_no_hub_are_of_any_commit(tiny: Path) -> None:
    async with serve(tiny) as rig:  # the hashes say what they are
        assert (await rig.load(config=changed(rig, revision="a" * 40))).config_hash


@pytest.mark.parametrize(("low", "high"), [(2, 3), (0, 0)])
async def test_a_scheduler_of_another_version_is_refused(tiny: Path, low: int, high: int) -> None:
    async with serve(tiny) as rig:
        code, details = await refused(rig.load(min_version=low, max_version=high))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and f"{low} to {high}" in details


async def test_features_that_this_executor_lacks_are_left_out_of_the_answer(tiny: Path) -> None:
    async with serve(tiny) as rig:
        assert list((await rig.load(features=["graphs"])).features) == [
            "grammar",
            "log-level",
            "trace-context",
            "uncounted",
        ]


async def test_a_context_longer_than_the_models_is_refused(tiny: Path) -> None:
    async with serve(tiny, context_tokens=1025) as rig:
        code, details = await refused(rig.load())
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "1025" in details and "1024" in details


async def test_more_kv_memory_than_there_is_is_refused(tiny: Path) -> None:
    async with serve(tiny, kv_memory_bytes=1 << 60) as rig:
        code, details = await refused(rig.load())
        assert code == grpc.StatusCode.FAILED_PRECONDITION and str(1 << 60) in details


async def test_allocate_takes_the_same_number_again_and_no_other(tiny: Path) -> None:
    async with serve(tiny) as rig:
        code, _ = await refused(rig.allocate(20))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        await rig.load()
        await rig.allocate(20)
        await rig.allocate(20)
        code, details = await refused(rig.allocate(21))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "20" in details and "21" in details


async def test_allocate_refuses_what_does_not_fit_and_then_takes_what_does(tiny: Path) -> None:
    async with serve(tiny, kv_memory_bytes=10 * BLOCK_BYTES) as rig:
        await rig.load()
        for blocks in (0, 1, 11):
            code, details = await refused(rig.allocate(blocks))
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert f"{blocks} KV blocks" in details and "10 fit" in details
        await rig.allocate(10)


async def test_slots_that_memory_cannot_hold_are_refused(tiny: Path) -> None:
    async with serve(tiny, max_slots=2**32 - 1) as rig:
        await rig.load()
        code, details = await refused(rig.allocate(20))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and f"{2**32 - 1} slots" in details


async def test_allocate_for_other_than_one_kv_group_is_refused(tiny: Path) -> None:
    async with serve(tiny) as rig:
        await rig.load()
        for numbers in ([], [20, 20]):
            code, details = await refused(rig.stub.Allocate(pb.AllocateRequest(num_blocks=numbers)))
            assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("num_blocks")


async def test_a_draining_executor_takes_no_new_work(tiny: Path) -> None:
    async with serve(tiny) as rig:
        await rig.servicer.drain()
        assert (await refused(rig.load()))[0] == grpc.StatusCode.UNAVAILABLE
        assert (await refused(rig.allocate(20)))[0] == grpc.StatusCode.UNAVAILABLE
