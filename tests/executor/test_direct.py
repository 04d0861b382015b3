"""Decode steps go round transformers' forward where that gives the same bits, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.executor import direct, loader
from services.executor.ranks.division import Shard
from tests.executor.test_stack import ALIKE, OTHERS, Decodes, inputs
from tests.support.checkpoints import tiny_model


def forwards(monkeypatch: pytest.MonkeyPatch, model: Any, change: Any = lambda output: output) -> list[int]:
    """Counts calls of a model's own forward from now on; what it returns goes through `change`."""
    calls: list[int] = []
    own = model.forward

    def forward(**inputs: Any) -> Any:
        calls.append(1)
        return change(own(**inputs))

    monkeypatch.setattr(model, "forward", forward)
    return calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALIKE)
def test_after_the_first_decode_step_the_models_own_forward_is_not_called_and_bits_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    model_type, settings = ALIKE[name]
    decodes = Decodes(tiny_model(tmp_path, model_type, dtype=dtype, **settings), 3)
    calls = forwards(monkeypatch, decodes.model)
    first = decodes.decode(1)
    assert len(calls) == 1
    assert decodes.decode(1).tobytes() == first.tobytes()
    both = decodes.decode(2)
    assert len(calls) == 1
    decodes.runner._direct = None
    assert decodes.decode(2).tobytes() == both.tobytes() and len(calls) == 3


def test_rows_that_do_not_sample_have_no_logits(tmp_path: Path) -> None:
    decodes = Decodes(tiny_model(tmp_path, "llama"), 3)
    both = decodes.decode(1)[0]
    sampling = np.array([0, 2])
    step, last = decodes.runner._begin(_one_each(decodes), decodes.tables)
    assert decodes.runner._direct is not None
    with torch.inference_mode():
        found = decodes.runner._direct.logits(_one_each(decodes), last[sampling], step).numpy()
    assert found.tobytes() == both[sampling].tobytes()


def _one_each(decodes: Decodes) -> Any:
    return inputs(decodes.following[0], np.ones(3, np.int64), decodes.lengths + 1)


def test_a_family_that_does_more_than_its_parts_keeps_its_own_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    decodes = Decodes(tiny_model(tmp_path, "llama"), 3)
    calls = forwards(monkeypatch, decodes.model, doubled)
    first, second = decodes.decode(2)
    assert len(calls) == 2 and decodes.runner._direct is None
    assert decodes.decode(2).tobytes() == np.stack([first, second]).tobytes()


@pytest.mark.parametrize("model_type", OTHERS)
def test_models_of_other_parts_keep_their_own_forward(tmp_path: Path, model_type: str) -> None:
    assert direct.of(loader.load(tiny_model(tmp_path, model_type), torch.float32, lambda progress: None).model) is None


def test_a_rank_keeps_the_models_forward(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama")
    assert direct.of(loader.load(path, torch.float32, lambda progress: None, shard=Shard(0, 2, 1 << 30)).model) is None
