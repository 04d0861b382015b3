"""Three processes that serve a model on the card: the ids they stream are the model's, as transformers computes it.

Without a card the same is done with `--device cpu`, and the executor's device path runs with its kernels on the host
shim. Ids are not compared one by one (in 16 bits a near tie may fall either way) but judged: each id drawn greedily
must be, by transformers' logits in float32 for the ids before it, the likeliest to within what the model's type loses.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu_check.checks import Check, Place, SkippedError

NEW_IDS = 24
LENGTHS = (1, 5, 16, 17, 100, 300)
"""Of prompts: around blocks, and longer than a chunk."""
LOSS = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""How far behind the likeliest an id's logit may lie, as a share of the spread (standard deviation) of all logits."""


def checks(place: Place) -> Iterator[Check]:
    """A random Llama of four layers in each type, and a real checkpoint where one is given."""
    if place.dry:
        name = "random Llama of 4 layers, float16, an executor on the shim"
        yield Check(name, lambda: _where_installed(lambda: _on_the_shim(place, ranks=1)))
    for dtype in ("float32",) if place.dry else ("float32", "float16", "bfloat16"):
        yield Check(
            f"random Llama of 4 layers, {dtype}",
            lambda dtype=dtype: _where_installed(lambda: _random_llama(place, dtype)),
        )
    name = "random Llama of 4 layers, float16, two ranks, " + ("a shim each" if place.dry else "a card each")
    yield Check(name, lambda: _where_installed(lambda: _by_two_ranks(place)))
    if place.model is not None:
        path = place.model
        yield Check(f"checkpoint {path}", lambda: _where_installed(lambda: _served(place, path)))
    else:
        yield Check("a real checkpoint", _no_model)


def _where_installed(run: Callable[[], str]) -> str:
    """A card need not have what the services need."""
    try:
        return run()
    except ModuleNotFoundError as missing:
        raise SkippedError(f"{missing.name} is not installed here") from None


def _no_model() -> str:
    raise SkippedError("--model PATH names none")


def _by_two_ranks(place: Place) -> str:
    import torch

    if place.dry:
        return _on_the_shim(place, ranks=2)
    if (count := torch.cuda.device_count()) < 2:
        raise SkippedError(f"two ranks take a card each, and this machine has {count}")
    return _random_llama(place, "float16", "--tp-size", "2")


def _random_llama(place: Place, dtype: str, *flags: str) -> str:
    from tests.support.checkpoints import tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        dims = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
        path = tiny_llama(Path(folder) / "llama", head_dim=64, dtype=dtype, **dims)
        return _served(place, path, *flags)


def _on_the_shim(place: Place, ranks: int) -> str:
    from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, serve
    from tests.executor.ranks import device_ranks
    from tests.executor.shim_device import ShimDevice, device_executor
    from tests.support.checkpoints import tiny_llama

    make = device_executor if ranks == 1 else device_ranks(*(ShimDevice() for _ in range(ranks)))
    rng = np.random.default_rng(4)
    requests = [Request(rng.integers(3, 500, length).tolist(), NEW_IDS) for length in (1, 16, 37)]

    async def run(path: Path) -> None:
        async with serve(path, num_blocks=40, context_tokens=128, max_slots=4, make=make) as rig:
            stream = await RunStream.open(rig)
            await MiniScheduler(stream, rig.config, 40).finish(requests)
            await stream.close()

    with tempfile.TemporaryDirectory() as folder:
        path = tiny_llama(Path(folder) / "llama", num_hidden_layers=4, head_dim=64, dtype="float16")
        asyncio.run(run(path))
        worst = _behind(place, path, [one.prompt for one in requests], [one.output for one in requests])
    assert worst <= LOSS["float16"], f"an id lies {worst:.4f} spreads behind the likeliest"
    return f"{len(requests)} prompts; at worst {worst:.5f} of a spread behind transformers"


def _served(place: Place, path: Path, *flags: str) -> str:
    """Starts the three, executor and scheduler with `flags` too, asks for LENGTHS prompts at once, twice (the second
    time from the prefix cache), and judges."""
    from tests.support.cluster import running

    config = json.loads((path / "config.json").read_text())
    rng = np.random.default_rng(3)
    vocab = int(config.get("text_config", config)["vocab_size"])
    prompts = [rng.integers(3, min(vocab, 500), length).tolist() for length in LENGTHS]
    given = {"executor": ["--device", "cpu" if place.dry else "cuda", *flags], "scheduler": list(flags)}
    with tempfile.TemporaryDirectory() as logs, running(path, Path(logs), **given) as cluster:
        try:
            first, second = (asyncio.run(_ids(cluster.address, prompts)) for _ in range(2))
        except Exception as error:
            raise RuntimeError(f"{error}\n{cluster.log('executor')[-1500:]}") from error
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    worst = max(_behind(place, path, prompts, answers) for answers in (first, second))
    assert worst <= LOSS[dtype], f"an id lies {worst:.4f} spreads behind the likeliest; {dtype} may lose {LOSS[dtype]}"
    same = sum(a == b for a, b in zip(first, second, strict=True))
    return f"{len(prompts)} prompts twice, {same} alike; at worst {worst:.5f} of a spread behind transformers"


async def _ids(address: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What the engine appends to each prompt, all at once."""
    import grpc

    from tests.support import calls

    async with grpc.aio.insecure_channel(address) as channel:
        requests = [calls.by_ids(ids, calls.greedy(max_tokens=NEW_IDS, ignore_eos=True)) for ids in prompts]
        answers = await asyncio.gather(*(calls.generate(channel, request, timeout_s=60) for request in requests))
    return [answer.ids for answer in answers]


def _behind(place: Place, path: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """The worst distance of a logit that was chosen from the largest, in spreads of the logits."""
    import torch

    device = "cpu" if place.dry else "cuda"
    model = _model(path, device)
    worst = 0.0
    for prompt, ids in zip(prompts, answers, strict=True):
        assert len(ids) == NEW_IDS, f"{len(ids)} ids came back, {NEW_IDS} were asked for"
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids[:-1]], device=device)).logits[0, len(prompt) - 1 :].double()
        chosen = logits.gather(1, torch.tensor(ids, device=device)[:, None])[:, 0]
        worst = max(worst, float(((logits.amax(1) - chosen) / logits.std(1)).max()))
    return worst


def _model(path: Path, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
