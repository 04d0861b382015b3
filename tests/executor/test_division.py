"""Who holds what: every part of a divided tensor is some rank's, and a rank reads no more of the files than its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from services.common.errors import StartError
from services.executor import loader, main
from services.executor.architecture import Architecture
from services.executor.config import ExecutorConfig
from services.executor.ranks.division import Division, Shard, head_spans, span
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
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 4, False),
    # Of four layers, one has an MLP and no experts.
    "qwen3_moe": ({"num_experts": 4, "head_dim": 24, "moe_intermediate_size": 32, "mlp_only_layers": [1]}, 5, False),
}
"""Settings, sums over the ranks in four layers, and whether all blocks are divided."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_attention_mlp_and_head_are_divided_and_experts_are_not(tmp_path: Path, model_type: str) -> None:
    settings, sums, all_divided = FAMILIES[model_type]
    path = tiny_model(tmp_path, model_type, **settings)
    parts: Counter[str] = Counter()
    for rank in (0, 1):
        held = divided(path, rank, 2)
        assert (len(held.summed), held.gathered.name, held.gathered.widths) == (sums, "lm_head", (256, 256))
        assert bool(held.whole) != all_divided
        if held.whole:
            assert held.whole == ("model.layers.*.mlp.experts (experts are not divided yet)",)
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
        main._executor(tiny, config)
    assert psutil.Process().children() == before


def test_attention_that_cannot_be_divided_is_whole_beside_an_mlp_that_can(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, num_attention_heads=1, num_key_value_heads=1)
    held = divided(path, 1, 2)
    assert (held.heads, held.kv_heads) == (1, 1) and len(held.summed) == 2
    assert held.whole == ("model.layers.*.self_attn (1 query heads on 1 kv heads)",)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_uses_its_own_part_of_the_files_and_nothing_else(
    tmp_path: Path, rank: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shard = tiny_llama(tmp_path, tie_word_embeddings=tied, shards=2), Shard(rank, 2, PLENTY)
    parts = loader.divided(path, torch.float32, shard).parts
    read, held = WeightFiles.read, {}

    def read_with_holes(files: WeightFiles, name: str) -> torch.Tensor:
        stored = read(files, name)
        if (part := parts.get(name)) is None:
            held[name] = stored.numel()
            return stored
        holed = torch.full_like(stored, torch.nan)
        mine = stored.narrow(part.dim, part.begin, part.end - part.begin)
        holed.narrow(part.dim, part.begin, part.end - part.begin).copy_(mine)
        held[name] = mine.numel()
        return holed

    monkeypatch.setattr(WeightFiles, "read", read_with_holes)
    model = loader.load(path, torch.float32, lambda progress: None, shard=shard).model
    stored_parts = parts.keys() - {"lm_head.weight"} if tied else parts.keys()
    assert len(stored_parts) >= 14 and stored_parts <= held.keys()
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())
    # All widths here are whole panels and all numbers float32, so what is held is what was used.
    assert loader.weight_bytes(path, torch.float32, shard) == 4 * sum(held.values())


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
    with pytest.raises(StartError, match=f"take {needed} bytes"):
        loader.load(tiny, torch.float32, lambda progress: None, shard=Shard(1, 2, needed - 1))
