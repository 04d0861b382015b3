"""A decode step in one call gives what the layers one by one give, and only models that it knows go that way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu import decode, paged_attention
from services.executor import loader
from services.executor.attention.contract import Needs
from services.executor.attention.cpu import CpuBackend
from services.executor.batch import StepInputs
from services.executor.fused import FusedLayer
from services.executor.ranks.division import Shard
from services.executor.runner import ModelRunner
from services.executor.stack import FusedStack, fits
from tests.support.checkpoints import tiny_model

LENGTHS = (1, 15, 16, 40, 65)
"""Of prompts: at the edges of a block and of a tile of keys."""
BLOCK_TOKENS = 16
ROW_BLOCKS = 5

ALIKE = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}
OTHERS = ("gemma2", "gemma3_text", "mixtral", "phi", "gpt_neox")


def stacks(model: torch.nn.Module) -> list[FusedStack]:
    return [module for module in model.modules() if isinstance(module, FusedStack)]


def inputs(tokens: np.ndarray, counts: np.ndarray, contexts: np.ndarray) -> StepInputs:
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.arange(len(counts))
    return StepInputs(
        slots=rows,
        token_ids=tokens,
        positions=np.concatenate([np.arange(end - count, end) for end, count in zip(contexts, counts, strict=True)]),
        query_starts=starts,
        contexts=contexts,
        sampling_rows=rows,
        places=rows,
        failed_slots=np.array([], np.int64),
    )


class Decodes:
    """Rows that hold prompts of LENGTHS, again and again, and are about to decode."""

    def __init__(self, path: Path, rows: int, kv_dtype: torch.dtype = torch.float32) -> None:
        checkpoint = loader.load(path, torch.float32, lambda progress: None)
        self.model = checkpoint.model
        needs = Needs.of(
            checkpoint.shape, device="cpu", dtype=torch.float32, kv_dtype=kv_dtype, block_tokens=BLOCK_TOKENS
        )
        self.runner = ModelRunner(checkpoint, CpuBackend(), needs)
        self.runner.allocate(1 + rows * ROW_BLOCKS)
        self.tables = 1 + np.random.default_rng(1).permutation(rows * ROW_BLOCKS).astype(np.int32).reshape(rows, -1)
        self.lengths = np.resize(LENGTHS, rows)
        self.ids = np.random.default_rng(2).integers(3, 512, int(self.lengths.sum()))
        self.following = np.random.default_rng(3).integers(3, 512, (2, rows))
        self.step(self.ids, self.lengths, self.lengths)

    def step(self, tokens: np.ndarray, counts: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self.runner.forward(inputs(tokens, counts, contexts), self.tables).numpy().copy()

    def decode(self, steps: int = 2) -> np.ndarray:
        """Logits of each of some steps; the same ids go in whatever comes out."""
        one = np.ones(len(self.lengths), np.int64)
        return np.stack([self.step(self.following[i], one, self.lengths + 1 + i) for i in range(steps)])


def check(monkeypatch: pytest.MonkeyPatch, decodes: Decodes) -> None:
    assert len(stacks(decodes.model)) == 1
    decodes.decode(1)  # the first is computed twice (direct.py)
    calls: list[int] = []
    run = decode.run
    monkeypatch.setattr(decode, "run", lambda x, *others: (calls.append(len(x)), run(x, *others)))
    together = decodes.decode()
    assert calls == [len(decodes.lengths)] * 2
    monkeypatch.setattr(decode, "MOST_ROWS", 0)
    one_by_one = decodes.decode()
    assert len(calls) == 2, "layer by layer no such call is made"
    np.testing.assert_allclose(together, one_by_one, rtol=0, atol=1e-5 * np.abs(one_by_one).max())


@pytest.mark.parametrize("rows", [1, 3, 17, decode.MOST_ROWS])
def test_any_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    check(monkeypatch, Decodes(tiny_model(tmp_path, "llama"), rows))


@pytest.mark.parametrize("name", ALIKE)
def test_families_whose_layers_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model_type, settings = ALIKE[name]
    check(monkeypatch, Decodes(tiny_model(tmp_path, model_type, **settings), 7))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_smaller_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype) -> None:
    """A last bit of a key can be rounded the other way, so they are equal within what that makes."""
    check(monkeypatch, Decodes(tiny_model(tmp_path, "llama"), 7, kv_dtype))


def test_one_thread_alone_gives_the_same_bits_as_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "ALONE_BELOW", 0)
    decodes = Decodes(tiny_model(tmp_path, "llama"), 7)
    together = decodes.decode()
    monkeypatch.setattr(decode, "ALONE_BELOW", 1 << 62)
    threads = paged_attention.get_num_threads()
    assert decodes.decode().tobytes() == together.tobytes()
    assert paged_attention.get_num_threads() == threads


def test_a_rows_bits_do_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    decodes = Decodes(tiny_model(tmp_path, "llama"), 7)
    together = decodes.decode(1)[0]
    decodes.tables, decodes.lengths, decodes.following = (
        decodes.tables[3:4],
        decodes.lengths[3:4],
        decodes.following[:, 3:4],
    )
    assert decodes.decode(1)[0].tobytes() == together[3:4].tobytes()


def test_steady_steps_compute_in_the_same_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    run = decode.run

    def watched(x: np.ndarray, weights: decode.Weights, *others: Any) -> None:
        buffers = next(one for one in others if isinstance(one, decode.Buffers))
        seen.append([one.ctypes.data for one in buffers])
        run(x, weights, *others)

    decodes = Decodes(tiny_model(tmp_path, "llama"), 3)
    decodes.decode(1)  # the first is computed twice (direct.py)
    monkeypatch.setattr(decode, "run", watched)
    decodes.decode()
    assert len(seen) == 2 and seen[0] == seen[1]
    cache = decodes.runner._allocated()
    assert cache.queries(65).ctypes.data == cache.queries(3).ctypes.data, "layer by layer there is one, too"


def test_nan_stays_in_its_row(tmp_path: Path) -> None:
    decodes = Decodes(tiny_model(tmp_path, "llama"), 3)
    clean = decodes.decode(1)[0]
    cache = decodes.runner._allocated()
    cache.whole.values[1, decodes.tables[1, 0], 0, 3] = np.nan
    spoiled = decodes.decode(1)[0]
    assert np.isnan(spoiled[1]).all()
    assert spoiled[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


def test_steps_that_are_no_decode_of_few_rows_go_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "run", lambda *arguments: pytest.fail("not for this step"))
    decodes = Decodes(tiny_model(tmp_path, "llama"), 3)  # a prefill
    decodes.step(decodes.ids[:4], np.array([1, 2, 1]), decodes.lengths + np.array([1, 2, 1]))
    monkeypatch.setattr(decode, "MOST_ROWS", 2)
    decodes.decode(1)


@pytest.mark.parametrize("model_type", OTHERS)
def test_layers_that_the_kernel_does_not_know_are_kept(tmp_path: Path, model_type: str) -> None:
    assert not stacks(loader.load(tiny_model(tmp_path, model_type), torch.float32, lambda progress: None).model)


def test_layers_of_a_rank_are_kept_since_they_meet_those_of_others(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama")
    assert not stacks(loader.load(path, torch.float32, lambda progress: None, shard=Shard(0, 2, 1 << 30)).model)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("self_attn.layer", 7),
        ("self_attn.heads.queries", 1),
        ("norms.before_mlp.epsilon", 0.5),
        ("mlp.is_silu", False),
        ("mlp", torch.nn.Identity()),
    ],
)
def test_a_layer_that_differs_keeps_all_from_being_one(tmp_path: Path, what: str, value: object) -> None:
    (stack,) = stacks(loader.load(tiny_model(tmp_path, "llama"), torch.float32, lambda progress: None).model)
    layers = [layer for layer in stack.layers if isinstance(layer, FusedLayer)]
    assert fits(layers)
    *path, name = what.split(".")
    owner = layers[2]
    for part in path:
        owner = getattr(owner, part)
    object.__setattr__(owner, name, value) if name != "mlp" else setattr(owner, name, value)
    assert not fits(layers)
