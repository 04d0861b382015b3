"""What an executor's memory peaks at, above what its process held after its imports: one JSON line on standard output.

`python -m tests.executor.peak_memory MODEL CONTEXT_TOKENS`: loads, allocates a pool of one context, reads a prompt of
a full step, writes every block, and decodes. Counted is all that is resident, pages of mapped files too (VmHWM of
proc(5), the most that VmRSS has been): pages of the weights' files are given back as they are packed, and that is
part of what is measured. Two packages import most of themselves late, numba at the first function that it compiles,
transformers a model's code when it is asked for; that is done before, as it is imports all the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numba
import numpy as np
import torch
import transformers

import services.executor.main  # noqa: F401 - all that an executor's process imports
from services.executor import loader
from services.executor.executor import Executor
from services.executor.plan import Plan, Settings, Started
from services.executor.sampling_params import SamplingParams

BLOCK_TOKENS, STEP_TOKENS, SLOTS, THREADS = 16, 256, 64, 2
COPIED_AT_ONCE = 4
NONE = np.zeros(0, np.int64)


def status_bytes(name: str) -> int:
    """A figure of /proc/self/status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def main(model: Path, context_tokens: int) -> dict[str, int]:
    """The figures, in bytes."""
    _import_the_rest(model)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew; proc(5)
    after_imports = status_bytes("VmRSS")
    executor = Executor(model, threads=THREADS)
    facts = executor.load(
        Settings(context_tokens, BLOCK_TOKENS, SLOTS, STEP_TOKENS), torch.float32, "", lambda progress: None
    )
    blocks = context_tokens // BLOCK_TOKENS
    executor.allocate(1 + blocks)
    prompt = np.arange(3, 3 + STEP_TOKENS - 1, dtype=np.uint32)
    request = Started(0, prompt, len(prompt), 0, np.arange(1, blocks + 1), SamplingParams())
    step = 1
    executor.execute(_plan(step, started=(request,), slots=[0], tokens=[len(prompt)]))
    for begin in range(2, 1 + blocks, COPIED_AT_ONCE):
        step += 1
        executor.execute(
            _plan(step, copies=[(1, block) for block in range(begin, min(begin + COPIED_AT_ONCE, 1 + blocks))])
        )
    executor.execute(_plan(step + 1, slots=[0], tokens=[1]))
    return {
        "peak_bytes": status_bytes("VmHWM") - after_imports,
        "weight_bytes": loader.weight_bytes(model, torch.float32),
        "kv_bytes": (1 + blocks) * facts.block_bytes,
    }


def _import_the_rest(model: Path) -> None:
    (name,) = json.loads((model / "config.json").read_text())["architectures"]
    getattr(transformers, name)
    numba.njit(lambda x: x + 1)(1)


def _plan(
    step: int,
    *,
    started: tuple[Started, ...] = (),
    slots: list[int] | None = None,
    tokens: list[int] | None = None,
    copies: list[tuple[int, int]] | None = None,
) -> Plan:
    return Plan(
        step,
        NONE,
        started,
        NONE.reshape(0, 2),
        np.array(slots or [], np.int64),
        np.array(tokens or [], np.int64),
        None,
        None,
        copies=np.array(copies or [], np.int64).reshape(-1, 2),
    )


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
