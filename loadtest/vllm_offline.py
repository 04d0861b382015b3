"""vLLM as a library, asked as `peer_offline` says; run by the Python of an environment that has it.

Arguments: the checkpoint, and how many requests may run at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(model: str, max_seqs: str) -> None:
    """Serves until stdin ends."""
    # What the library prints, its processes' lines included, goes to stderr, so that the answers stand alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from vllm import LLM

    llm = LLM(model, dtype="float32", enforce_eager=True, max_num_seqs=int(max_seqs))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"token_s": _burst(llm.llm_engine, json.loads(line)["requests"])}), file=answers)


def _burst(engine: Any, requests: list[dict[str, Any]]) -> list[list[float]]:
    from vllm import SamplingParams

    token_s: list[list[float]] = [[] for _ in requests]
    begun_s = time.monotonic()
    for number, asked in enumerate(requests):
        greedy = SamplingParams(temperature=0, max_tokens=asked["output_tokens"], ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": asked["prompt_ids"]}, greedy)
    while engine.has_unfinished_requests():
        for output in engine.step():
            times_s = token_s[int(output.request_id)]
            new = len(output.outputs[0].token_ids) - len(times_s)  # an output has all ids so far
            times_s += [time.monotonic() - begun_s] * new
    return token_s


if __name__ == "__main__":
    main(*sys.argv[1:])
