"""Checkpoints that cannot be served are refused in one line that says why; those that can load to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.common.errors import StartError
from services.executor import architecture, loader, memory
from services.executor.attention.contract import Needs
from services.executor.attention.selection import select
from tests.support.checkpoints import tiny_llama


def load(path: Path) -> loader.Checkpoint:
    return loader.load(path, torch.float32, lambda progress: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_parameters_are_those_of_the_files_converted(tmp_path: Path, dtype: str, shards: int) -> None:
    path = tiny_llama(tmp_path / "m", dtype=dtype, shards=shards)
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    state = load(path).model.state_dict()
    assert state.keys() == stored.keys()
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, stored[name].float()), name


def test_nothing_is_left_on_the_meta_device_and_nothing_wants_gradients(tiny: Path) -> None:
    model = load(tiny).model
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors and not any(tensor.is_meta or tensor.requires_grad for tensor in tensors)
    assert not model.training


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10_000.0,
        },
    ],
)
def test_rotary_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_llama(tmp_path / "m", config={"rope_parameters": rope})
    expected = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb
    ours = load(path).model.model.rotary_emb
    assert torch.equal(ours.inv_freq, expected.inv_freq)
    assert ours.attention_scaling == expected.attention_scaling


def test_old_checkpoints_with_stored_frequencies_load(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(2)}
    load(tiny_llama(tmp_path / "m", extra=extra))


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", tie_word_embeddings=True, lm_head=True)
    told: list[loader.Progress] = []
    checkpoint = loader.load(path, torch.float32, told.append)
    weights = [p for p in told if p.stage == "weights"]
    assert weights[-1].done_bytes == weights[-1].total_bytes == sum(p.nbytes for p in checkpoint.model.parameters())
    assert told[-1].done_bytes == told[-1].total_bytes == (path / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; served now: llama"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": "no such model"}, "cannot read"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}, "cannot read"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
    ],
)
def test_models_that_are_not_served_are_refused_with_the_reason(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    path = tiny_llama(tmp_path / "m", config=config)
    (path / "code.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(StartError) as error:
        load(path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    (path / "config.json").write_text("{")
    with pytest.raises(StartError, match=r"cannot read .*config\.json"):
        architecture.read(path)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(StartError, match="safetensors alone"):
        loader.weight_files(path)


def test_a_damaged_weight_file_is_refused(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartError, match=r"cannot read .*model\.safetensors"):
        load(path)


def test_weights_that_do_not_fit_into_memory_are_refused_before_they_are_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(parameter.nbytes for parameter in load(tiny).model.parameters())
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    load(tiny)
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(StartError, match=f"take {needed} bytes as float32, {needed - 1} are free"):
        load(tiny)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, index: str) -> None:
    path = tiny_llama(tmp_path / "m", shards=2)
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartError, match="weight_map"):
        loader.weight_files(path)


def test_an_index_never_leads_out_of_the_folder(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", shards=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    outside = tmp_path / "outside.safetensors"
    next(path.glob("*.safetensors")).rename(outside)
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../outside.safetensors")
    file.write_text(json.dumps(index))
    with pytest.raises(StartError, match=r"lacks outside\.safetensors"):
        loader.weight_files(path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StartError, match=r"lacks model-00002-of-00003\.safetensors"):
        loader.weight_files(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cuda"}, "runs on cpu, not on cuda"),
        ({"dtype": torch.float16}, "dtype is float32 alone, not float16"),
        ({"kv_dtype": torch.int8}, "kv_dtype is float32 alone, not int8"),
        ({"heads": 5}, "5 query heads are no multiple of 2 kv heads"),
    ],
)
def test_a_model_that_no_attention_backend_serves_is_refused_with_every_reason(
    changes: dict[str, Any], said: str
) -> None:
    needs: dict[str, Any] = {
        "device": "cpu",
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "block_tokens": 16,
    }
    assert select(Needs(**needs)).name == "cpu-numba"
    with pytest.raises(StartError, match=said):
        select(Needs(**(needs | changes)))
