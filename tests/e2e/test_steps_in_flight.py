"""Real scheduler, real executor, a tiny checkpoint: ids do not depend on how many steps are under way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from triptych.inference.v1 import generation_pb2

from tests.executor.mini_scheduler import serve
from tests.support.attached import Frontend, Port, Told, finished, scheduler_for, until_idle
from tests.support.checkpoints import check_same_ids, reference_ids

NEW_TOKENS = 40
GREEDY = generation_pb2.Sampling(temperature=0)
SEEDED = generation_pb2.Sampling(temperature=1.0, top_k=-1, repetition_penalty=1.2)
ABORTED = (4, 9)


async def streams(
    path: Path, prompts: list[list[int]], stops: list[list[int]], sampling: generation_pb2.Sampling, depth: int
) -> tuple[list[Told], int]:
    """What each request was told, and how many were preempted; two are aborted in the middle."""
    async with serve(path) as rig:
        # A pool of 9 blocks for requests that need 3 to 8 each.
        config = {"num_kv_blocks": 10, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_in_flight": depth}
        async with (
            scheduler_for(Port(rig.port), path, max_model_len=160, **config) as server,
            Frontend(server) as frontend,
        ):
            await frontend.greeted()
            told = [
                await frontend.submit(
                    prompt, request_id=n + 1, max_tokens=NEW_TOKENS, seed=n, stop_ids=stop_ids, sampling=sampling
                )
                for n, (prompt, stop_ids) in enumerate(zip(prompts, stops, strict=True))
            ]
            for n in ABORTED:
                await told[n].first.wait()
                await frontend.abort(n + 1)
            await finished(*(mine for n, mine in enumerate(told) if n not in ABORTED))
            await until_idle(server)
            assert all(mine.failed is None and mine.after_end == 0 for mine in told)
            return told, server.engine.core.counters.preemptions


async def test_greedy_ids_are_the_references_with_one_step_or_two(tiny: Path) -> None:
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, 512, length).tolist() for length in (1, 15, 16, 17, 40, 64, 70, 5, 33, 80, 2, 50)]
    whole = reference_ids(tiny, prompts, NEW_TOKENS, ignore_eos=True)
    stops = [[ids[20 + n]] if n % 2 else [] for n, ids in enumerate(whole)]
    cut = [ids[: ids.index(stop[0]) + 1] if stop else ids for ids, stop in zip(whole, stops, strict=True)]
    for depth in (1, 2):
        told, preemptions = await streams(tiny, prompts, stops, GREEDY, depth)
        assert preemptions > 0
        ended = [n for n in range(len(prompts)) if n not in ABORTED]
        check_same_ids(tiny, [prompts[n] for n in ended], [told[n].ids for n in ended], [cut[n] for n in ended])
        for n in ABORTED:
            assert told[n].ids == cut[n][: len(told[n].ids)]


async def test_seeded_ids_with_penalties_are_the_same_with_one_step_or_two(tiny: Path) -> None:
    """Noise is of the output position, penalties of the ids: both are wrong if a step reads ids of before the last."""
    rng = np.random.default_rng(12)
    prompts = [rng.integers(3, 512, length).tolist() for length in (3, 20, 31, 32, 60, 7, 18, 44, 9, 72)]
    none: list[list[int]] = [[] for _ in prompts]
    (one, _), (two, preemptions) = [await streams(tiny, prompts, none, SEEDED, depth) for depth in (1, 2)]
    assert preemptions > 0
    for n in range(len(prompts)):
        if n not in ABORTED:
            assert len(one[n].ids) == NEW_TOKENS and one[n].ids == two[n].ids
