"""Continuous batching of transformers behind lines of JSON: run by a peer's own Python, which has no part of Triptych.

stdin: {"id": 7, "prompt_ids": [...], "output_tokens": 64}. stdout: {"ready": true} once, then {"id": 7, "count": n}
whenever request 7 has n ids, or {"id": 7, "error": "..."}. Ends with stdin.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

NO_EOS = -1
SEQUENCES = 16
PAGE_TOKENS = 32
SEQUENCE_TOKENS = 640
"""Prompts of 550 and 64 ids more, in whole pages."""
STEP_TOKENS = 256
"""As Triptych's scheduler. Left to itself, it takes most of the memory for KV and masks its attention over all of it:
minutes before the first token on two cores, and seconds for each."""


def main(model_path: str) -> None:
    """Serves until stdin ends."""
    # What the libraries print goes to stderr, so that the answers stand alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0, max_new_tokens=64)
    sizes = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=SEQUENCES * SEQUENCE_TOKENS // PAGE_TOKENS,
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=SEQUENCES,
        allow_block_sharing=False,  # no two prompts of the load begin alike
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=sizes)
    manager.start()
    threading.Thread(target=_answer, args=(manager, answers), daemon=True).start()
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        manager.add_request(
            asked["prompt_ids"],
            request_id=str(asked["id"]),
            max_new_tokens=asked["output_tokens"],
            streaming=True,
            eos_token_id=NO_EOS,
        )
    os._exit(0)  # its threads need no farewell


def _answer(manager: Any, answers: TextIO) -> None:
    while True:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                os._exit(1)
            continue
        said: dict[str, object] = {"id": int(result.request_id)}
        said |= {"count": len(result.generated_tokens)} if result.error is None else {"error": str(result.error)}
        print(json.dumps(said), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
