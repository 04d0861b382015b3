"""vLLM's scheduler as a peer of the core: timed by `vllm_scheduler.py` in the Python of an environment that has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest import core_load, peer_process
from services.common.errors import StartError

TIMEOUT_S = 240.0
"""For a repetition of all cases; the machine may be busy."""

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_SCRIPT = Path(__file__).with_name("vllm_scheduler.py")


@dataclass(frozen=True)
class PeerTimes:
    """One repetition: seconds of each step's `schedule()` and `update_from_output()`."""

    plan_s: tuple[float, ...]
    apply_s: tuple[float, ...]


async def measure(
    python: Path, cases: Sequence[Sequence[int]], *, steps: int, warmup_steps: int, repetitions: int, seed: int
) -> list[list[PeerTimes]]:
    """For each case, which is a list of prompt lengths, its repetitions. Raises StartError with its last lines."""
    asked = {
        "cases": [{"prompt_tokens": list(prompts)} for prompts in cases],
        "repetitions": repetitions,
        "steps": steps,
        "warmup_steps": warmup_steps,
        "seed": seed,
        "context_tokens": max(max(prompts) for prompts in cases) + 4096,
        "vocab_size": core_load.VOCAB_SIZE,
        "block_tokens": core_load.BLOCK_TOKENS,
        "max_step_tokens": core_load.MAX_STEP_TOKENS,
        "stop_ids": list(core_load.STOP_IDS),
        "first_id": core_load.FIRST_ID,
    }
    # -P: the folder of the script holds modules of ours, which the peer must not find.
    command = [str(python), "-P", str(_SCRIPT), json.dumps(asked)]
    async with peer_process.running(command, ENVIRONMENT, pipe=True) as peer:
        assert peer.process.stdout is not None
        try:
            async with asyncio.timeout(TIMEOUT_S * repetitions):
                said = await peer.process.stdout.read()
                code = await peer.process.wait()
        except TimeoutError:
            raise StartError(f"vLLM's scheduler was not measured within {TIMEOUT_S * repetitions:g} s") from None
        if code != 0:
            lines = await peer.last_lines()
            raise StartError("\n".join(["vLLM's scheduler could not be measured; its last lines:", *lines]))
    return _by_case(json.loads(said.splitlines()[-1]), repetitions)


def _by_case(found: Sequence[dict[str, list[float]]], repetitions: int) -> list[list[PeerTimes]]:
    times = [PeerTimes(tuple(one["plan_s"]), tuple(one["apply_s"])) for one in found]
    return [times[start : start + repetitions] for start in range(0, len(times), repetitions)]
