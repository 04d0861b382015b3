"""Checkpoints that cannot be served are refused in one line that says why; those that can load to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoConfig

from kernels.cpu import compact, linear
from services.common.errors import StartError
from services.executor import architecture, loader, memory, packing, weight_files
from services.executor.attention import selection
from services.executor.attention.contract import Needs
from services.executor.attention.cpu import CpuBackend
from services.executor.attention.selection import select
from services.executor.executor import Executor
from services.executor.plan import Settings
from tests.executor.forward import logits
from tests.support.checkpoints import tiny_llama, tiny_model


def load(path: Path) -> loader.Checkpoint:
    return loader.load(path, torch.float32, lambda progress: None)


KV_WIDTH = 2 * 16
"""Of the tiny checkpoint: its keys of a token, 2 heads of 16."""


def dense(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors by their names in the files, packed ones unpacked to float32, layers out of their stack."""
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(".panels")}
    for name, module in model.named_modules():
        if isinstance(module, packing.PackedLinear | packing.PackedEmbedding):
            out = np.empty((module.weights.outputs, module.weights.depth), np.float32)
            compact.gather(module.weights, np.arange(module.weights.outputs), out)
            if name.endswith(".gate_up"):
                parts = zip(("gate_proj", "up_proj"), torch.from_numpy(out).chunk(2), strict=True)
                state |= {f"{name.removesuffix('gate_up')}{part}.weight": tensor for part, tensor in parts}
            elif name.endswith(".qkv_proj"):
                widths = [len(out) - 2 * KV_WIDTH, KV_WIDTH, KV_WIDTH]
                parts = zip(("q_proj", "k_proj", "v_proj"), torch.from_numpy(out).split(widths), strict=True)
                state |= {f"{name.removesuffix('qkv_proj')}{part}.weight": tensor for part, tensor in parts}
            else:
                state[f"{name}.weight"] = torch.from_numpy(out)
    return {name.replace(".layers.0.layers.", ".layers."): tensor for name, tensor in state.items()}


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights, shared ones once."""
    tensors = [*model.parameters(), *(one for name, one in model.named_buffers() if name.endswith(".panels"))]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2},
}
PARTS = {
    "mixtral": ("model.layers.0.block_sparse_moe.experts.0.", "w1.weight", "w3.weight"),
    "qwen3_moe": ("model.layers.0.mlp.experts.0.", "gate_proj.weight", "up_proj.weight"),
}
"""Names in published files: an expert's, and those of its gate and its up projection."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_parameters_are_those_of_the_files_converted(tmp_path: Path, dtype: str, shards: int) -> None:
    path = tiny_llama(tmp_path / "m", dtype=dtype, shards=shards)
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    state = dense(load(path).model)
    assert state.keys() == stored.keys()
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, stored[name].float()), name


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_held_once_in_no_more_than_the_files_bfloat16_and_else_in_float32(
    tmp_path: Path, dtype: str, itemsize: int, tied: bool
) -> None:
    path = tiny_llama(tmp_path / "m", dtype=dtype, tie_word_embeddings=tied)
    attention, mlp, vocabulary, norms = 64 * (64 + 32 + 32 + 64), 3 * 64 * 128, 512 * 64, 2 * 64
    matrices = 2 * (attention + mlp) + (1 if tied else 2) * vocabulary
    held = itemsize * matrices
    if dtype == "bfloat16" and compact.IS_SERVED:  # a panel of 16 outputs is 64 bytes and 24 for each of its depths
        layer, head = (192 + 256) // 16 * (64 + 24 * 64) + 64 // 16 * (64 + 24 * 128), 512 // 16 * (64 + 24 * 64)
        held = 2 * layer + (1 if tied else 2) * head
    expected = held + 4 * (2 * norms + 64)
    assert held_bytes(load(path).model) == loader.weight_bytes(path, torch.float32) == expected


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "phi", "qwen3_moe"])
def test_logits_of_bfloat16_weights_are_those_of_the_same_weights_in_float32(tmp_path: Path, model_type: str) -> None:
    """To the bit: widening loses nothing, and a product does not depend on how its weights are held."""
    stored = tiny_model(tmp_path / "stored", model_type, dtype="bfloat16", tie_word_embeddings=True)
    wide = tmp_path / "wide"
    shutil.copytree(stored, wide)
    weights = {name: tensor.float() for name, tensor in load_file(stored / "model.safetensors").items()}
    save_file(weights, wide / "model.safetensors", metadata={"format": "pt"})
    assert loader.weight_bytes(stored, torch.float32) < loader.weight_bytes(wide, torch.float32)
    assert np.array_equal(logits(stored, range(3, 40)), logits(wide, range(3, 40)))


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
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10_000.0},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_llama(tmp_path / "m", config={"rope_parameters": rope})
    expected = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb
    ours = load(path).model.model.rotary_emb
    assert torch.equal(ours.inv_freq, expected.inv_freq)
    assert ours.attention_scaling == expected.attention_scaling


@pytest.mark.skipif(not compact.IS_SERVED, reason="nothing is compact here")
def test_a_matrix_of_too_many_exponents_is_held_in_bfloat16_and_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "m", dtype="bfloat16")
    weights = load_file(path / "model.safetensors")
    wild = weights["model.layers.1.self_attn.k_proj.weight"]
    wild *= 2.0 ** -torch.arange(wild.shape[1])[None].remainder(30)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    told: list[loader.Progress] = []
    model = loader.load(path, torch.float32, told.append).model
    held = [module.weights for module in model.modules() if isinstance(module, packing.PackedLinear)]
    assert {type(one) for one in held} == {compact.Compact, linear.Packed}
    assert [p for p in told if p.stage == "weights"][-1].done_bytes == loader.weight_bytes(path, torch.float32)
    found = logits(path, range(3, 40))
    monkeypatch.setattr(compact, "fits", lambda depth: False)
    assert np.array_equal(found, logits(path, range(3, 40)))


def test_old_checkpoints_with_stored_frequencies_load(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(2)}
    load(tiny_llama(tmp_path / "m", extra=extra))


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", tie_word_embeddings=True, lm_head=True)
    told: list[loader.Progress] = []
    checkpoint = loader.load(path, torch.float32, told.append)
    weights = [p for p in told if p.stage == "weights"]
    assert weights[-1].done_bytes == weights[-1].total_bytes == held_bytes(checkpoint.model)
    assert told[-1].done_bytes == told[-1].total_bytes == (path / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2': that family is not among those tested; served now: gemma2, "),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}},
            },
            "rope_type 'dynamic'",
        ),
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


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("t5", "encoder-decoder"),
        ("whisper", "encoder-decoder"),
        ("mamba", "its linear_attention layers keep a state"),
        ("jamba", "its linear_attention layers keep a state"),
        ("qwen3_next", "its linear_attention layers keep a state"),
        ("rwkv", "a recurrent state"),
        ("lfm2", "a recurrent state"),
        ("deepseek_v3", "MLA"),
        ("gpt_oss", "sinks"),
        ("gemma3", "more than text"),
        ("qwen2_vl", "more than text"),
        ("bert", "not among those tested"),
    ],
)
def test_kinds_of_models_that_are_not_served_are_refused_with_the_reason(
    tmp_path: Path, model_type: str, said: str
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(StartError, match=f"of model_type '{model_type}': .*{said}.*; served now: gemma2, "):
        architecture.read(tmp_path)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_in_files_one_by_one_become_the_models_fused_tensors(tmp_path: Path, model_type: str) -> None:
    path = tiny_model(tmp_path, model_type, **EXPERTS[model_type])
    stored = load_file(path / "model.safetensors")
    first, gate, up = PARTS[model_type]
    assert first + gate in stored and not any("gate_up_proj" in name for name in stored)
    fused = load(path).model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    for i in range(4):
        expert = first.replace("layers.0", "layers.1").replace("experts.0", f"experts.{i}")
        assert torch.equal(fused[i], torch.cat([stored[expert + gate], stored[expert + up]]))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("part", [1, 2])
def test_an_expert_without_one_of_its_tensors_is_refused_by_name(tmp_path: Path, model_type: str, part: int) -> None:
    path = tiny_model(tmp_path, model_type, **EXPERTS[model_type])
    stored = load_file(path / "model.safetensors")
    del stored[PARTS[model_type][0] + PARTS[model_type][part]]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj cannot be made of 7 tensors"):
        load(path)


def test_a_whole_expert_that_is_missing_is_a_shape_that_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "mixtral", **EXPERTS["mixtral"])
    stored = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if "layers.0.block_sparse_moe.experts.2" not in name}
    assert len(kept) == len(stored) - 3
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartError, match=r"gate_up_proj \[3, 256, 64\] instead of \[4, 256, 64\]"):
        load(path)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", extra={"norm.weight": torch.zeros(64)})
    with pytest.raises(StartError, match=r"the weights hold model\.norm\.weight more than once: "):
        load(path)


def test_masks_in_old_gpt_neox_checkpoints_are_passed_over_and_nothing_else(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "gpt_neox", num_key_value_heads=None)
    stored = load_file(path / "model.safetensors")
    old = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.zeros(2),
    }
    save_file(stored | old, path / "model.safetensors", metadata={"format": "pt"})
    load(path)
    save_file(stored | {"gpt_neox.layers.0.extra": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(StartError, match=r"unexpected: gpt_neox\.layers\.0\.extra$"):
        load(path)


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
    needed = held_bytes(load(tiny).model)
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    load(tiny)
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(StartError, match=f"take {needed} bytes to be served in float32, {needed - 1} are free"):
        load(tiny)


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(files: object, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(weight_files.WeightFiles, "read", read)


def test_another_hash_is_refused_before_a_weight_is_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(tiny).weights_hash
    assert loader.load(tiny, torch.float32, lambda progress: None, found).weights_hash == found
    unread(monkeypatch)
    with pytest.raises(StartError, match=f"hash to {found}, the scheduler expects ff00; give both the same checkpoint"):
        loader.load(tiny, torch.float32, lambda progress: None, "ff00")


def test_another_shape_is_refused_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unread(monkeypatch)
    path = tiny_llama(tmp_path / "m", config={"intermediate_size": 96})
    with pytest.raises(
        StartError, match=r"shapes: .*layers\.0\.mlp\.down_proj\.weight \[64, 128\] instead of \[64, 96\]"
    ):
        load(path)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_number_of_threads_and_of_files_changes_nothing(tmp_path: Path, dtype: str) -> None:
    path, sharded = tiny_llama(tmp_path / "m", dtype=dtype), tiny_llama(tmp_path / "sharded", dtype=dtype, shards=5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = dense(load(path).model)
        torch.set_num_threads(4)
        together = dense(load(sharded).model)
    finally:
        torch.set_num_threads(before)
    assert alone.keys() == together.keys()
    assert all(torch.equal(tensor, together[name]) for name, tensor in alone.items())


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
    ("changes", "cpu", "sdpa"),
    [
        ({"device": "cuda"}, "runs on cpu, not on cuda", None),
        ({"dtype": torch.float16}, "dtype is float32 alone, not float16", None),
        ({"kv_dtype": torch.float16}, "kv_dtype is one of float32, bfloat16, int8, not float16", None),
        ({"heads": 5}, "5 query heads are no multiple of 2 kv heads", "5 query heads are no multiple of 2 kv heads"),
        (
            {"device": "cuda", "kv_dtype": torch.int8},
            "runs on cpu, not on cuda",
            "kv_dtype is one of float32, bfloat16, float16, not int8",
        ),
        (
            {"graphs": True},
            "its steps cannot be captured in CUDA graphs",
            "its steps cannot be captured in CUDA graphs",
        ),
    ],
)
def test_the_slow_backend_is_the_last_resort_and_without_it_a_model_is_refused_with_every_reason(
    changes: dict[str, Any], cpu: str, sdpa: str | None
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
    asked = Needs(**(needs | changes))
    assert cpu in selection.survey(asked)["cpu-numba"]
    if sdpa is None:
        assert select(asked).name == "torch-sdpa"
        return
    with pytest.raises(StartError) as refused:
        select(asked)
    assert f"cpu-numba: {cpu}" in str(refused.value) and f"torch-sdpa: {sdpa}" in str(refused.value)


class _NoWindows(CpuBackend):
    """A backend that serves neither windows nor soft caps."""

    name = "plain"

    def refusals(self, needs: Needs) -> list[str]:
        reasons = ["no sliding windows"] if needs.windows else []
        return [*reasons, *(["no soft caps"] if needs.soft_caps else [])]


@pytest.mark.parametrize(
    ("model_type", "settings", "said"),
    [
        ("gemma2", {}, "plain: no sliding windows, no soft caps"),
        ("gemma3_text", {}, "plain: no sliding windows$"),
        ("mistral", {"sliding_window": 20}, "plain: no sliding windows$"),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": False}, None),
    ],
)
def test_windows_and_soft_caps_are_asked_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, settings: dict[str, Any], said: str | None
) -> None:
    path = tiny_model(tmp_path, model_type, num_hidden_layers=2, **settings)
    monkeypatch.setattr(selection, "BACKENDS", (_NoWindows(),))
    executor = Executor(path, threads=1, kv_memory_bytes=1 << 20)
    asked = Settings(context_tokens=64, block_tokens=16, max_slots=2, max_step_tokens=16)
    if said is None:
        executor.load(asked, torch.float32, "", lambda progress: None)
        return
    with pytest.raises(StartError, match=said):
        executor.load(asked, torch.float32, "", lambda progress: None)


def test_what_a_layer_passes_to_attention_and_is_not_known_is_refused() -> None:
    heads = torch.zeros(1, 1, 1, 4)
    with pytest.raises(NotImplementedError, match="Linear passes s_aux to attention"):
        AttentionInterface()[selection.IMPLEMENTATION](
            torch.nn.Linear(1, 1), heads, heads, heads, None, scaling=1.0, attention_step=None, s_aux=torch.zeros(1)
        )
