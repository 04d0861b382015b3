"""Rows of the case table about checkpoints: X5, X6, X7."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.common.errors import StartError
from services.executor import architecture, loader
from tests.executor.forward import logits
from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, serve
from tests.support.checkpoints import check_same_ids, float64_logits, reference_ids, tiny_llama, tiny_model

NEW_TOKENS = 12
BLOCKS = 40


def load(path: Path) -> loader.Checkpoint:
    return loader.load(path, torch.float32, lambda progress: None)


async def served_ids(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy ids by the executor's server."""
    async with serve(path, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        requests = [Request(prompt, NEW_TOKENS) for prompt in prompts]
        await MiniScheduler(run, rig.config, BLOCKS).finish(requests)
        await run.close()
    return [request.output for request in requests]


async def check_serves(path: Path) -> None:
    """Ids equal those of transformers on the same folder."""
    prompts = [np.random.default_rng(i).integers(3, 512, n).tolist() for i, n in enumerate((1, 17, 50))]
    expected = reference_ids(path, prompts, NEW_TOKENS, ignore_eos=True)
    check_same_ids(path, prompts, await served_ids(path, prompts), expected)


@pytest.mark.parametrize("lm_head", [False, True])
async def test_X5_tied_embeddings_with_and_without_the_lm_head_tensor(tmp_path: Path, lm_head: bool) -> None:
    path = tiny_llama(tmp_path / "tied", tie_word_embeddings=True, lm_head=lm_head)
    assert ("lm_head.weight" in load_file(path / "model.safetensors")) == lm_head
    model = load(path).model
    assert model.lm_head.weights is model.model.embed_tokens.weights
    await check_serves(path)


async def test_X5_untied_embeddings_keep_their_own_lm_head(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "untied")
    model = load(path).model
    assert not torch.equal(model.lm_head.panels, model.model.embed_tokens.panels)
    await check_serves(path)


def test_X5_untied_without_the_lm_head_tensor_refuses_and_lists_it(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "headless", lm_head=False)
    with pytest.raises(StartError, match=r"missing: lm_head\.weight"):
        load(path)


def test_X5_tied_with_an_lm_head_that_differs_refuses(tmp_path: Path) -> None:
    other = torch.zeros(512, 64)
    path = tiny_llama(tmp_path / "two", tie_word_embeddings=True, extra={"lm_head.weight": other})
    with pytest.raises(StartError, match=r"lm_head\.weight in the weights differs"):
        load(path)


def test_X5_everything_missing_or_unexpected_is_listed(tmp_path: Path) -> None:
    dropped = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    path = tiny_llama(tmp_path / "holes", drop=dropped, extra={"model.layers.7.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(StartError) as error:
        load(path)
    missing, unexpected = str(error.value).split("unexpected:")
    assert all(name in missing for name in dropped)
    assert "model.layers.7.mlp.up_proj.weight" in unexpected


def test_X5_a_tensor_of_another_shape_is_listed_with_both_shapes(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "shape", extra={"model.norm.weight": torch.zeros(65)})
    with pytest.raises(StartError, match=r"model\.norm\.weight \[65\] instead of \[64\]"):
        load(path)


def test_X5_a_shard_without_a_tensor_that_the_index_places_there(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "shards", shards=2)
    files = sorted(path.glob("*.safetensors"))
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(StartError, match=r"lacks .*model\.safetensors\.index\.json places there"):
        load(path)


async def test_X6_the_configs_head_dim_wins_over_hidden_size_by_heads(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "wide", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=24)
    await check_serves(path)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 24), (3, 1, 32), (6, 2, 8)])
def test_X6_logits_are_the_references_whatever_the_heads(
    tmp_path: Path, model_type: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    figures = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    path = tiny_model(tmp_path, model_type, hidden_size=16 * heads, **figures)
    prompt = np.random.default_rng(3).integers(3, 512, 40).tolist()
    np.testing.assert_allclose(logits(path, prompt), float64_logits(path, prompt), atol=1e-3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 4), (8, 1), (7, 7)])
async def test_X6_any_whole_number_of_query_heads_a_kv_head(tmp_path: Path, heads: int, kv_heads: int) -> None:
    heads_alone = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    await check_serves(tiny_llama(tmp_path / "m", hidden_size=16 * heads, **heads_alone))


def test_X6_query_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", config={"num_attention_heads": 8, "num_key_value_heads": 3})
    with pytest.raises(StartError, match="8 query heads on 3 kv heads"):
        load(path)


@pytest.mark.parametrize("model_type", ["gemma2", "mixtral", "phi", "qwen2", "qwen3_moe"])
def test_X6_three_query_heads_on_two_kv_heads_are_refused_in_every_family(tmp_path: Path, model_type: str) -> None:
    config = {"model_type": model_type, "num_attention_heads": 3, "num_key_value_heads": 2, "hidden_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match="3 query heads on 2 kv heads"):
        architecture.read(tmp_path)


def test_X6_a_hidden_size_that_heads_do_not_divide_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", config={"num_attention_heads": 6})
    with pytest.raises(StartError, match=r"cannot read .*config\.json.* not a multiple of the number of"):
        load(path)


@pytest.mark.parametrize("pad", [None, 0, 2, 511, 512, -1])
async def test_X7_no_pad_id_is_ever_needed(tmp_path: Path, pad: int | None) -> None:
    """None: no pad token; 0: the tokenizer's unk; 512 and -1 are no ids at all."""
    config: dict[str, Any] = {"pad_token_id": pad}
    path = tiny_llama(tmp_path / "m", config=config, generation_config=config)
    prompts = [[5], list(range(100, 140)), [0, 2, 511]]
    plain = tiny_llama(tmp_path / "plain")
    expected = reference_ids(plain, prompts, NEW_TOKENS, ignore_eos=True)
    check_same_ids(plain, prompts, await served_ids(path, prompts), expected)
