"""A model's logits by the executor's own loader, runner and attention, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from services.executor import loader
from services.executor.attention.contract import Needs
from services.executor.attention.selection import select
from services.executor.batch import StepInputs
from services.executor.runner import ModelRunner


def logits(path: Path, ids: Sequence[int], kv_dtype: torch.dtype = torch.float32) -> np.ndarray:
    """[vocab] float32: for the id that follows `ids`, all computed in one step."""
    checkpoint = loader.load(path, torch.float32, lambda progress: None)
    shape = checkpoint.shape
    needs = Needs.of(shape, device="cpu", dtype=torch.float32, kv_dtype=kv_dtype, block_tokens=16)
    runner = ModelRunner(checkpoint, select(needs), needs)
    blocks = -(-len(ids) // 16)
    runner.allocate(1 + blocks)
    inputs = StepInputs(
        slots=np.array([0]),
        token_ids=np.array(ids),
        positions=np.arange(len(ids)),
        query_starts=np.array([0, len(ids)]),
        contexts=np.array([len(ids)]),
        sampling_rows=np.array([0]),
        places=np.array([0]),
        failed_slots=np.array([], np.int64),
    )
    with torch.inference_mode():
        return runner.forward(inputs, np.arange(1, blocks + 1, dtype=np.int32)[None])[0].numpy()
