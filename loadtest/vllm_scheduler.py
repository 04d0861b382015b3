"""Times vLLM's own scheduler; run by the Python of an environment that has vLLM, so nothing of ours is imported.

Its argument is one JSON object (`peer_vllm_scheduler` says which), its last line of output another: for each case the
seconds of each step's `schedule()` and `update_from_output()`.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def main() -> None:
    """One line a case to stderr, the JSON at the end."""
    asked = json.loads(sys.argv[1])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), asked)
        for case in asked["cases"]:
            for _ in range(asked["repetitions"]):
                found.append(_measure(Path(folder), asked, case["prompt_tokens"]))
    print(json.dumps(found))


def _write_model(folder: Path, asked: dict[str, Any]) -> None:
    """A configuration without weights: the scheduler reads the context and the vocabulary alone."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": asked["context_tokens"],
        "vocab_size": asked["vocab_size"],
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _scheduler(folder: Path, asked: dict[str, Any], prompts: list[int]) -> tuple[Scheduler, Any]:
    block_tokens = asked["block_tokens"]
    # Room for all to the end, so that nothing is preempted: those that start first decode while the others prefill.
    output = asked["steps"] + asked["warmup_steps"] + block_tokens
    output += sum(prompts) // (asked["max_step_tokens"] - len(prompts))
    num_blocks = sum(-(-(prompt + output) // block_tokens) for prompt in prompts) + 1
    cache = CacheConfig(block_size=block_tokens, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=asked["context_tokens"]
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=len(prompts),
            max_num_batched_tokens=asked["max_step_tokens"],
            max_model_len=asked["context_tokens"],
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
    )
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        log_stats=False,
    )
    digest = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(digest)
    return scheduler, get_request_block_hasher(block_tokens, digest)


def _measure(folder: Path, asked: dict[str, Any], prompts: list[int]) -> dict[str, list[float]]:
    """All requests prefilled first; then the timed steps, one id for each of them."""
    scheduler, hasher = _scheduler(folder, asked, prompts)
    rng = random.Random(asked["seed"])
    ids = range(asked["first_id"], asked["vocab_size"])
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=asked["context_tokens"] - prompt, stop_token_ids=asked["stop_ids"])
        sampling.update_from_generation_config({}, eos_token_id=2)
        request = Request(f"request-{i}", rng.choices(ids, k=prompt), sampling, None, block_hasher=hasher)
        scheduler.add_request(request)
    while True:
        planned = scheduler.schedule()
        counts = planned.num_scheduled_tokens
        if len(counts) == len(prompts) and max(counts.values()) == 1:
            break
        scheduler.update_from_output(planned, _sampled(scheduler, counts, rng, ids))
    scheduler.update_from_output(planned, _sampled(scheduler, counts, rng, ids))
    gc.collect()
    gc.freeze()  # as vLLM's engine core does once it has started
    times: dict[str, list[float]] = {"plan_s": [], "apply_s": []}
    for step in range(asked["warmup_steps"] + asked["steps"]):
        start_s = time.perf_counter()
        planned = scheduler.schedule()
        planned_s = time.perf_counter()
        output = _sampled(scheduler, planned.num_scheduled_tokens, rng, ids)
        assert len(output.req_ids) == len(prompts)
        apply_s = time.perf_counter()
        updates = scheduler.update_from_output(planned, output)
        end_s = time.perf_counter()
        assert sum(len(one.outputs) for one in updates.values()) == len(prompts)
        if step >= asked["warmup_steps"]:
            times["plan_s"].append(planned_s - start_s)
            times["apply_s"].append(end_s - apply_s)
    gc.unfreeze()
    return times


def _sampled(scheduler: Scheduler, counts: dict[str, int], rng: random.Random, ids: range) -> ModelRunnerOutput:
    """An id for each request whose prompt is computed, none for the others."""
    names = list(counts)
    tokens: list[list[int]] = []
    for name in names:
        request = scheduler.requests[name]
        done = request.num_computed_tokens >= request.num_tokens
        tokens.append([rng.choice(ids)] if done else [])
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
    )


if __name__ == "__main__":
    main()
