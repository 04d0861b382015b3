"""Real scheduler, real executor, a tiny checkpoint: seeded ids do not depend on caches, batches, steps under way or
preemptions, and choices are the requests that their seeds make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2

from services.common.digests import prompt_digests, root_digest
from services.common.philox import derived_seed
from tests.executor.mini_scheduler import serve
from tests.support.attached import Frontend, Port, Told, finished, ids_column, scheduler_for, until, until_idle

NEW_TOKENS = 32
SAMPLING = generation_pb2.Sampling(temperature=1.0, top_k=-1, repetition_penalty=1.2, frequency_penalty=0.3)
ROOT = root_digest(tenant="", salt="", adapter="")

PLAIN = {"prefix_cache": False, "max_in_flight": 1}
FULL = {"prefix_cache": True, "max_in_flight": 2}
SMALL_POOL = {"num_kv_blocks": 11, "max_num_batched_tokens": 48}
"""10 blocks of 16."""


def prompts() -> list[list[int]]:
    """Pairs that share 32, 20 and 0 tokens, around the edges of blocks of 16."""
    rng = np.random.default_rng(21)
    common = rng.integers(3, 512, 32).tolist()
    tails = [rng.integers(3, 512, length).tolist() for length in (1, 16, 15, 40, 1, 30, 33, 3)]
    heads = [common, common, common[:20], common[:20], [], [], common, []]
    return [head + tail for head, tail in zip(heads, tails, strict=True)]


class Rig:
    """One scheduler on one executor, and a frontend attached."""

    def __init__(self, frontend: Frontend, server: Any) -> None:
        self.frontend, self.server = frontend, server

    async def submit(self, prompt: list[int], seed: int, **fields: Any) -> Told:
        fields = {"max_tokens": NEW_TOKENS, **fields}
        ids = np.array(prompt, dtype=np.uint32)
        return await self.frontend.submit(
            prompt,
            seed=seed,
            sampling=SAMPLING,
            root_digest=ROOT,
            block_digests=prompt_digests(ROOT, ids, 16),
            **fields,
        )

    async def run_all(self, asked: list[list[int]], **fields: Any) -> list[Told]:
        """All at once, each with a seed of its own."""
        told = [await self.submit(prompt, seed, **fields) for seed, prompt in enumerate(asked)]
        await finished(*told)
        await until_idle(self.server)
        return told


class rigged:  # noqa: N801  reads as a statement
    """`async with rigged(tiny, **config) as rig`"""

    def __init__(self, path: Path, **config: Any) -> None:
        self._path, self._config = path, config

    async def __aenter__(self) -> Rig:
        self._executor = serve(self._path)
        port = (await self._executor.__aenter__()).port
        self._scheduler = scheduler_for(Port(port), self._path, max_model_len=160, **self._config)
        server = await self._scheduler.__aenter__()
        self._frontend = Frontend(server)
        frontend = await self._frontend.__aenter__()
        await frontend.greeted()
        return Rig(frontend, server)

    async def __aexit__(self, *error: Any) -> None:
        await self._frontend.__aexit__(*error)
        await self._scheduler.__aexit__(*error)
        await self._executor.__aexit__(*error)


def ids(told: list[Told]) -> list[list[int]]:
    assert all(each.finished and each.failed is None for each in told)
    return [each.ids for each in told]


async def test_K2_S5_seeded_streams_are_the_same_alone_in_a_batch_and_with_everything_cached(tiny: Path) -> None:
    async with rigged(tiny, **PLAIN) as rig:
        batch = ids(await rig.run_all(prompts()))
        alone = []
        for seed, prompt in enumerate(prompts()):
            told = await rig.submit(prompt, seed)
            await finished(told)
            alone.append(told)
        assert all(each.started and each.started.cached_tokens == 0 for each in alone)
        assert ids(alone) == batch
    async with rigged(tiny, **FULL) as rig:
        first, second = await rig.run_all(prompts()), await rig.run_all(prompts())
        # The second time all full blocks but the last token's are there.
        hits = [each.started.cached_tokens for each in second if each.started]
        assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts()]
        assert ids(first) == ids(second) == batch


async def test_K3_S5_seeded_penalized_streams_preempted_twice_or_more_are_the_unpreempted_ones(tiny: Path) -> None:
    # Each grows from one block to seven: five of them take each other's place again and again.
    asked = [[7 + n, 8, 9] for n in range(5)]
    async with rigged(tiny, **PLAIN) as rig:
        expected = ids(await rig.run_all(asked, max_tokens=96))
    async with rigged(tiny, **FULL, **SMALL_POOL) as rig:
        told = await rig.run_all(asked, max_tokens=96)
        assert max(each.finished.preemptions for each in told if each.finished) >= 2
        assert ids(told) == expected
        assert all(len(each) == 96 for each in expected)


async def test_S5_three_choices_are_three_requests_with_the_derived_seeds(tiny: Path) -> None:
    prompt = prompts()[3]
    async with rigged(tiny, **PLAIN) as rig:
        apart = [await rig.submit(prompt, derived_seed(77, choice)) for choice in range(3)]
        await finished(*apart)
        expected = ids(apart)
    assert len({tuple(each) for each in expected}) == 3
    for config in (PLAIN, FULL, FULL | SMALL_POOL):
        async with rigged(tiny, **config) as rig:
            await rig.submit(prompt, 77, request_id=100, num_choices=3)
            choices = rig.frontend.told
            await until(lambda choices=choices: len(choices) == 3)
            await finished(*choices.values())
            assert ids([choices[100 + choice] for choice in range(3)]) == expected


@pytest.mark.parametrize("config", [PLAIN, FULL])
async def test_a_request_resumed_at_any_position_receives_what_the_unbroken_one_would(
    tiny: Path, config: dict[str, Any]
) -> None:
    prompt = prompts()[3]
    async with rigged(tiny, **config) as rig:
        unbroken = await rig.submit(prompt, 5)
        await finished(unbroken)
        (expected,) = ids([unbroken])
        cuts = (0, 1, 2, 12, 15, 16, 30, 31)
        told = [await rig.submit(prompt, 5, resumed=[resumed(0, expected[:cut])]) for cut in cuts]
        await finished(*told)
        assert [expected[:cut] + each.ids for cut, each in zip(cuts, told, strict=True)] == [expected] * len(cuts)
        assert all(each.started for each in told)
        await until_idle(rig.server)


async def test_choices_are_resumed_each_with_its_own_noise_and_those_that_had_ended_are_not_run(tiny: Path) -> None:
    prompt = prompts()[3]
    async with rigged(tiny, **FULL) as rig:
        await rig.submit(prompt, 77, request_id=100, num_choices=3)
        choices = rig.frontend.told
        await until(lambda: len(choices) == 3)
        await finished(*choices.values())
        expected = ids([choices[100 + choice] for choice in range(3)])
        cut = {0: expected[0][:20], 2: []}
        await rig.submit(
            prompt, 77, request_id=200, num_choices=3, resumed=[resumed(choice, had) for choice, had in cut.items()]
        )
        await until(lambda: 202 in choices)
        await finished(choices[200], choices[202])
        assert [cut[choice] + choices[200 + choice].ids for choice in cut] == [expected[0], expected[2]]
        assert 201 not in choices


def resumed(choice: int, received: list[int]) -> engine_pb2.Submit.Resumed:
    return engine_pb2.Submit.Resumed(choice=choice, token_ids=ids_column(received))
