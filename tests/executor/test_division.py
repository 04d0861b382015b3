"""Who holds what: every part of a divided tensor is some rank's, and a rank reads no more of the files than its own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import StartError
from services.executor import loader, main
from services.executor.architecture import Architecture
from services.executor.config import ExecutorConfig
from services.executor.ranks.division import Division, Part, Shard, head_spans, span
from services.executor.weight_files import WeightFiles
from tests.support.checkpoints import tiny_llama, tiny_model

PLENTY = 1 << 40


def divided(path: Path, rank: int, size: int) -> Division:
    return loader.divided(path, torch.float32, Shard(rank, size, PLENTY))


@pytest.mark.parametrize(("count", "size"), [(4, 2), (3, 2), (9, 4), (4, 4)])
def test_spans_follow_one_another_and_differ_by_one_at_most(count: int, size: int) -> None:
    spans = [span(count, rank, size) for rank in range(size)]
    assert [i for part in spans for i in part] == list(range(count))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 2), (8, 8, 2), (4, 1, 2), (8, 2, 4), (6, 2, 4), (12, 3, 4), (32, 8, 3)]
)
def test_every_query_head_is_one_ranks_beside_its_kv_head(heads: int, kv_heads: int, size: int) -> None:
    shape = Architecture(512, 1024, 2, heads, kv_heads, 16)
    held = []
    for rank in range(size):
        query, key_value = head_spans(shape, rank, size)
        held += query
        group = heads // kv_heads
        assert {head // group for head in query} == set(key_value)
        assert len(query) % len(key_value) == 0, "a rank's own attention must group evenly too"
    assert held == list(range(heads))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 2), (4, 2, 5), (8, 8, 16), (3, 3, 4)])
def test_attention_with_less_than_a_head_a_rank_is_not_divided(heads: int, kv_heads: int, size: int) -> None:
    assert {head_spans(Architecture(512, 1024, 2, heads, kv_heads, 16), rank, size) for rank in range(size)} == {None}


FAMILIES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "llama": ({"attention_bias": True, "mlp_bias": True}, 8, True),
    "qwen2": ({}, 8, True),
    "qwen3": ({"head_dim": 24}, 8, True),
    "mistral": ({"head_dim": 24}, 8, True),
    "gemma2": ({"head_dim": 24, "query_pre_attn_scalar": 40}, 8, True),
    "gemma3_text": ({"head_dim": 24, "query_pre_attn_scalar": 40}, 8, True),
    "phi": ({}, 8, True),
    "gpt_neox": ({"num_key_value_heads": None}, 8, True),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 8, True),
    # Of four layers, one has an MLP and no experts.
    "qwen3_moe": ({"num_experts": 4, "head_dim": 24, "moe_intermediate_size": 32, "mlp_only_layers": [1]}, 8, True),
    # One panel is not divided.
    "qwen3_moe narrow": ({"num_experts": 4, "head_dim": 24, "moe_intermediate_size": 16}, 4, False),
}
"""Settings, sums over the ranks in four layers, and whether all blocks are divided."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_attention_mlps_experts_embedding_and_head_are_divided(tmp_path: Path, model_type: str) -> None:
    settings, sums, all_divided = FAMILIES[model_type]
    path = tiny_model(tmp_path, model_type.split()[0], **settings)
    parts: Counter[str] = Counter()
    for rank in (0, 1):
        held = divided(path, rank, 2)
        assert len(held.summed) + len(held.experts) == sums
        assert (held.gathered.name, held.gathered.widths) == ("lm_head", (256, 256))
        assert held.embedding.endswith("embed_tokens") or held.embedding.endswith("embed_in")
        assert held.whole == (() if all_divided else ("model.layers.*.mlp.experts (their width is 16)",))
        for name, part in held.parts.items():
            parts[name] += part.end - part.begin
            assert part.begin == 0 if rank == 0 else part.end == part.whole
    assert parts == Counter({name: part.whole for name, part in held.parts.items()})


def test_what_cannot_be_divided_is_refused_with_the_reasons(tiny: Path) -> None:
    with pytest.raises(
        StartError, match=r"cannot be divided over 64 ranks .*4 query heads on 2 kv heads.*width is 128"
    ):
        divided(tiny, 0, 64)


def test_an_executor_of_too_many_ranks_is_refused_before_any_is_started(tiny: Path) -> None:
    config = ExecutorConfig(model=str(tiny), tp_size=64)
    before = psutil.Process().children()
    with pytest.raises(StartError, match="cannot be divided over 64 ranks"):
        main._executor(tiny, config, main._Devices())
    assert psutil.Process().children() == before


def test_attention_that_cannot_be_divided_is_whole_beside_an_mlp_that_can(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, num_attention_heads=1, num_key_value_heads=1)
    held = divided(path, 1, 2)
    assert (held.heads, held.kv_heads) == (1, 1) and len(held.summed) == 2
    assert held.whole == ("model.layers.*.self_attn (1 query heads on 1 kv heads)",)


def test_tied_embeddings_are_divided_as_one(tmp_path: Path) -> None:
    """A vocabulary of 500 is 32 panels of 16, the last with 4 ids."""
    path = tiny_llama(tmp_path, vocab_size=500, tie_word_embeddings=True)
    held = divided(path, 1, 2)
    assert held.parts["model.embed_tokens.weight"] == held.parts["lm_head.weight"] == Part(0, 256, 500, 500)
    model = loader.load(path, torch.float32, lambda progress: None, shard=Shard(1, 2, PLENTY)).model
    assert model.lm_head.weights is model.model.embed_tokens.weights


@pytest.mark.parametrize(
    ("tied", "whole"),
    [
        (True, "model.embed_tokens (as the output layer)"),
        (False, "model.embed_tokens (the vocabulary is not divided)"),
    ],
)
def test_a_vocabulary_of_less_than_a_panel_a_rank_is_whole_on_each(tmp_path: Path, tied: bool, whole: str) -> None:
    path = tiny_llama(tmp_path, tie_word_embeddings=tied)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 16}))
    held = divided(path, 1, 2)
    assert held.embedding == "" and held.gathered is None
    assert held.whole == (whole,) and not {"model.embed_tokens.weight", "lm_head.weight"} & held.parts.keys()


def test_of_ids_that_another_rank_has_a_rank_makes_zeros_and_of_none_an_error(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, vocab_size=500)
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    model = loader.load(path, torch.float32, lambda progress: None, shard=Shard(1, 2, PLENTY)).model
    embedded = model.model.embed_tokens(torch.tensor([[0, 255, 256, 499]]))
    assert not embedded[0, :2].any() and torch.equal(embedded[0, 2:], stored[[256, 499]])
    for bad in (-1, 500):
        with pytest.raises(IndexError, match="there are 500"):
            model.model.embed_tokens(torch.tensor([[256, bad]]))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
}


@pytest.mark.parametrize("model", MODELS)
def test_each_rank_reads_its_own_part_of_the_files_and_nothing_else(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of what is divided, once over the ranks; norms and routers, a hundredth of all, by each."""
    model_type, settings = MODELS[model]
    path = tiny_model(tmp_path, model_type, **settings)
    stored = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    read, used = WeightFiles.read, [0, 0]

    def counted(files: WeightFiles, *which: Any) -> torch.Tensor:
        made = read(files, *which)
        used[rank] += made.nbytes
        return made

    monkeypatch.setattr(WeightFiles, "read", counted)
    for rank in (0, 1):
        shard = Shard(rank, 2, PLENTY)
        loader.load(path, torch.float32, lambda progress: None, shard=shard)
        # All widths here are whole panels and all numbers float32, so what is held is what was used.
        assert loader.weight_bytes(path, torch.float32, shard) == used[rank]
    assert stored <= sum(used) < 1.01 * stored
    assert max(used) < 0.51 * stored


def test_experts_that_the_files_hold_in_one_tensor_are_cut_in_both_of_its_halves(tmp_path: Path) -> None:
    """As a model of transformers has them in memory: gates above ups."""
    path = tiny_model(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    whole = loader.load(path, torch.float32, lambda progress: None).model.model.layers[0].mlp.experts
    stored = load_file(path / "model.safetensors")
    fused = {name: tensor for name, tensor in stored.items() if "layers.0.block_sparse_moe.experts." not in name}
    fused["model.layers.0.mlp.experts.gate_up_proj"] = whole.gate_up_proj.contiguous()
    fused["model.layers.0.mlp.experts.down_proj"] = whole.down_proj.contiguous()
    assert len(fused) == len(stored) - 12 + 2
    save_file(fused, path / "model.safetensors")
    for rank, lanes in enumerate((range(64), range(64, 128))):
        model = loader.load(path, torch.float32, lambda progress: None, shard=Shard(rank, 2, PLENTY)).model
        held = model.model.layers[0].mlp.experts.experts
        assert torch.equal(held.gate_up_proj[:, :64], whole.gate_up_proj[:, list(lanes)])
        assert torch.equal(held.gate_up_proj[:, 64:], whole.gate_up_proj[:, [128 + lane for lane in lanes]])
        assert torch.equal(held.down_proj, whole.down_proj[:, :, list(lanes)])


def test_an_expert_of_another_width_is_refused_though_a_rank_reads_a_part_of_it(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    stored = load_file(path / "model.safetensors")
    stored["model.layers.0.block_sparse_moe.experts.2.w1.weight"] = torch.zeros(256, 64)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(StartError, match=r"experts.2.w1.weight is \[256, 64\].*should be 128 wide"):
        loader.load(path, torch.float32, lambda progress: None, shard=Shard(1, 2, PLENTY))


def test_a_tensor_of_another_size_is_refused_though_a_rank_reads_a_part_of_it(tmp_path: Path) -> None:
    wide = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(256, 64),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(64, 256),
    }
    path = tiny_llama(tmp_path, extra=wide)
    with pytest.raises(StartError, match=r"down_proj.weight \[64, 256\].*up_proj.weight \[256, 64\]"):
        loader.load(path, torch.float32, lambda progress: None, shard=Shard(1, 2, PLENTY))


def test_a_rank_takes_no_more_memory_than_its_share(tiny: Path) -> None:
    needed = loader.weight_bytes(tiny, torch.float32, Shard(1, 2, 0))
    loader.load(tiny, torch.float32, lambda progress: None, shard=Shard(1, 2, needed))
    every = [loader.weight_bytes(tiny, torch.float32, Shard(rank, 2, 0)) for rank in (0, 1)]
    with pytest.raises(
        StartError,
        match=rf"take {needed} bytes on rank 1 .* is {needed - 1} \(by 2 ranks .* {every[0]}, {every[1]} bytes,"
        rf" {sum(every)} in all\)",
    ):
        loader.load(tiny, torch.float32, lambda progress: None, shard=Shard(1, 2, needed - 1))
