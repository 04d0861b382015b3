"""What the scheduler takes from config.json, from the operator, and from the executor where config.json is silent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from triptych.executor.v1 import executor_pb2

from loadtest.stub_executor import StubExecutor
from services.common.config import load
from services.common.errors import StartError
from services.scheduler.config import SchedulerConfig
from services.scheduler.executor_link import ExecutorFacts
from services.scheduler.identity import Model
from tests.support.attached import Frontend, scheduler_for, write_model


def silent(folder: Path, *names: str) -> Path:
    """The checkpoint, without these figures in its config.json."""
    path = write_model(folder)
    config = json.loads((path / "config.json").read_text())
    for name in names:
        del config[name]
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_context_that_nobody_tells_is_asked_for(tmp_path: Path) -> None:
    path = silent(tmp_path / "model", "max_position_embeddings")
    with pytest.raises(StartError, match=r"has no max_position_embeddings.*--max-model-len"):
        Model.read(SchedulerConfig(model=str(path)))
    model = Model.read(SchedulerConfig(model=str(path), max_model_len=100_000))
    assert model.engine_config().context_tokens == 100_000  # the executor refuses what is too much


async def test_a_vocabulary_that_config_json_leaves_to_its_family_is_the_executors(tmp_path: Path) -> None:
    path = silent(tmp_path / "model", "vocab_size", "max_position_embeddings")
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 39}}}))
    async with (
        StubExecutor(vocab_size=64) as stub,
        scheduler_for(stub, path, max_model_len=128) as server,
        Frontend(server) as frontend,
    ):
        hello = await frontend.greeted()
        assert (hello.vocab_size, hello.context_tokens) == (64, 128)
        assert (await frontend.run([39], max_tokens=3)).finished
        refused = await frontend.run([40], max_tokens=3)  # padding of the model: it stands for no text
        assert refused.failed is not None and "40" in refused.failed.message


def test_the_commit_of_a_hubs_model_goes_to_the_executor_and_its_name_to_frontends(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    path = write_model(tmp_path / "models--org--tiny" / "snapshots" / commit)
    model = Model.read(SchedulerConfig(model=str(path)))
    assert (model.name, model.engine_config().model, model.engine_config().revision) == ("org/tiny", "org/tiny", commit)
    assert Model.read(SchedulerConfig(model=str(write_model(tmp_path / "plain")))).engine_config().revision == ""


@pytest.mark.parametrize(
    ("kv_dtype", "asked"),
    [
        ("auto", executor_pb2.D_TYPE_UNSPECIFIED),
        ("float32", executor_pb2.D_TYPE_FLOAT32),
        ("bfloat16", executor_pb2.D_TYPE_BFLOAT16),
        ("int8", executor_pb2.D_TYPE_INT8),
    ],
)
def test_the_dtype_of_keys_and_values_goes_to_the_executor(
    tmp_path: Path, kv_dtype: Any, asked: executor_pb2.DType.ValueType
) -> None:
    model = Model.read(SchedulerConfig(model=str(write_model(tmp_path)), kv_dtype=kv_dtype))
    assert (model.engine_config().kv_dtype, model.engine_config().dtype) == (asked, executor_pb2.D_TYPE_UNSPECIFIED)


def test_engines_whose_ids_may_differ_have_another_fingerprint(tmp_path: Path) -> None:
    path = str(write_model(tmp_path))
    model, divided = (Model.read(SchedulerConfig(model=path, tp_size=size)) for size in (1, 2))
    facts = ExecutorFacts(
        device="cpu",
        version=1,
        weights_hash="w",
        config_hash="",
        vocab_size=64,
        block_bytes=1,
        kv_bytes=100,
        max_in_flight=1,
        dtype="float32",
        kv_dtype="float32",
    )
    kinds = ("float32", "bfloat16", "int8")
    assert len({model.fingerprint(replace(facts, kv_dtype=kind)) for kind in kinds}) == len(kinds)
    assert divided.fingerprint(facts) != model.fingerprint(facts), "sums over ranks round otherwise"


@pytest.mark.parametrize("reserve", [129, 9999])
def test_a_reserve_that_would_be_cut_is_refused_at_the_start(reserve: int) -> None:
    with pytest.raises(StartError) as caught:
        load(SchedulerConfig, ["--prefill-reserve-tokens", str(reserve)], {})
    assert f"prefill_reserve_tokens is {reserve}, more than half of max_num_batched_tokens, 256" in str(caught.value)
    assert load(SchedulerConfig, ["--prefill-reserve-tokens", "128"], {}).prefill_reserve_tokens == 128
