"""Every family served: greedy ids equal transformers' generate, in one batch, in chunks, after preemptions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.executor import architecture
from services.executor.executor import Executor
from tests.executor.forward import logits
from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, serve
from tests.executor.ranks import ranks
from tests.support.checkpoints import check_same_ids, float64_logits, reference_ids, tiny_model

README = Path(__file__).parents[2] / "README.md"
LENGTHS = (1, 3, 17, 40, 100)
WINDOW = 20
"""Shorter than the longer prompts, and no multiple of a block."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows from the third layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral, window": ("mistral", {"sliding_window": WINDOW, "head_dim": 24}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "gemma2": (
        "gemma2",
        ALTERNATING | {"head_dim": 24, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
        },
    ),
    "phi": ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gpt_neox, one after the other": ("gpt_neox", {"num_key_value_heads": None, "use_parallel_residual": False}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, settings = FAMILIES[request.param]
    return tiny_model(tmp_path_factory.mktemp(model_type), model_type, **settings)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 512, length).tolist() for length in LENGTHS]


async def served_ids(
    path: Path, new_tokens: int, *, budget: int = 256, preempt: int = 0, tp_size: int = 1
) -> list[list[int]]:
    blocks = 1 + sum(-(-(length + new_tokens) // 16) for length in LENGTHS)
    make = ranks(tp_size) if tp_size > 1 else Executor
    async with serve(path, num_blocks=blocks, max_step_tokens=budget, make=make) as rig:
        run = await RunStream.open(rig)
        requests = [Request(prompt, new_tokens) for prompt in prompts()]
        await MiniScheduler(run, rig.config, blocks, budget=budget).finish(requests, preempt_every=preempt)
        await run.close()
    return [request.output for request in requests]


async def check_ids(path: Path, new_tokens: int, **way: int) -> None:
    expected = reference_ids(path, prompts(), new_tokens, ignore_eos=True)
    assert all(len(set(ids)) > new_tokens // 4 for ids in expected), "a model that repeats itself would hide faults"
    check_same_ids(path, prompts(), await served_ids(path, new_tokens, **way), expected)


async def test_ids_equal_those_of_generate(family: Path) -> None:
    """In one batch, prompts cut into chunks, and each of the youngest preempted and resumed."""
    await check_ids(family, 12, budget=24, preempt=5)


@pytest.mark.parametrize("name", ["llama, biases", "gemma3_text", "gpt_neox", "mixtral", "qwen3_moe"])
async def test_ids_of_two_ranks_equal_those_of_generate(tmp_path: Path, name: str) -> None:
    """In chunks, preempted, and with two steps in flight, as above."""
    model_type, settings = FAMILIES[name]
    await check_ids(tiny_model(tmp_path, model_type, **settings), 12, budget=24, preempt=5, tp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "preempt"), [(256, 0), (24, 11)], ids=["in one batch", "chunked and preempted"])
async def test_64_ids_of_two_ranks_equal_those_of_generate(family: Path, budget: int, preempt: int) -> None:
    await check_ids(family, 64, budget=budget, preempt=preempt, tp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "preempt"), [(256, 0), (24, 11)], ids=["in one batch", "chunked and preempted"])
async def test_64_ids_equal_those_of_generate(family: Path, budget: int, preempt: int) -> None:
    await check_ids(family, 64, budget=budget, preempt=preempt)


def test_logits_equal_those_of_the_float64_model(family: Path) -> None:
    """Ids alone would not show what keeps the order of logits, such as Gemma 2's cap of the last layer's."""
    prompt = prompts()[-1]
    np.testing.assert_allclose(logits(family, prompt), float64_logits(family, prompt), atol=1e-3)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "phi", "gpt_neox", "mixtral"])
def test_logits_of_tied_embeddings(tmp_path: Path, name: str) -> None:
    model_type, settings = FAMILIES[name]
    path = tiny_model(tmp_path, model_type, **(settings | {"tie_word_embeddings": True}))
    prompt = prompts()[-1]
    np.testing.assert_allclose(logits(path, prompt), float64_logits(path, prompt), atol=1e-3)


def test_every_family_named_as_served_is_tested_here_and_told_in_the_readme() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == architecture.MODEL_TYPES
    (told,) = re.findall(r"its `model_type` in\s+`config.json` is (.*?), whose ids", README.read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", told)) == architecture.MODEL_TYPES
