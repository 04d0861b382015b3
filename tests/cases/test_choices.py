"""Rows G2, S5 and K7 at the frontend: several choices, held deltas, and who shares blocks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from loadtest.stub_engine import StubEngine
from tests.frontend.harness import VOCAB_SIZE, scripted, serving, text_checkpoint
from tests.support.calls import EVERY_CALL, STREAM_AND_UNARY, ask, by_ids, generate, greedy

LONG_PROMPT = [3 + i % 400 for i in range(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("choices") / "tiny-text")


@STREAM_AND_UNARY
@pytest.mark.parametrize("ids_per_step", [1, 7])
async def test_G2_usage_equals_the_ids_however_they_were_cut(model: Path, ids_per_step: int, rpc: str) -> None:
    async with serving(model, scripted([50, 51, 52, 53], ids_per_step=ids_per_step)) as served:
        stop = [served.decode([53])]
        holds = ({}, {"min_delta_tokens": 6}, {"min_delta_interval_ms": 5}, {"min_delta_tokens": 4096})
        for n, max_tokens, stops, hold in itertools.product((1, 3), (1, 20), ([], stop), holds):
            for prompt in ([10], LONG_PROMPT):
                options = greedy(n=n, max_tokens=max_tokens, stop=stops, **hold)
                answer = await generate(served.channel, by_ids(prompt, options), rpc=rpc)
                assert answer.usage.completion_tokens == len(answer.ids) and len(answer.finishes) == n
                assert answer.usage.prompt_tokens == len(prompt)
                # 53 is the 4th id of choice 0, the 3rd of choice 1, the 2nd of choice 2; none has it before.
                kept = [min(max_tokens, 4 - choice) if stops else max_tokens for choice in range(n)]
                assert answer.usage.completion_tokens == sum(kept)


@EVERY_CALL
async def test_G2_usage_of_every_call_counts_all_choices(model: Path, rpc: str) -> None:
    async with serving(model, scripted([50, 51, 52], ids_per_step=2)) as served:
        answer = await ask(served.channel, rpc, greedy(n=3, max_tokens=5, ignore_eos=True))
        assert answer.usage.completion_tokens == len(answer.ids) == 15 and len(answer.finishes) == 3


@EVERY_CALL
async def test_S5_a_seed_is_the_callers_or_drawn_anew(model: Path, rpc: str) -> None:
    async with serving(model, scripted([50])) as served:
        for seed in ({"seed": 7}, {"seed": 7}, {"seed": 0}, {}, {}):
            await ask(served.channel, rpc, greedy(max_tokens=1, **seed))
        seeds = [submit.seed for submit in served.engine.submits]
        assert seeds[:3] == [7, 7, 0] and len(set(seeds)) == 4


@EVERY_CALL
async def test_S5_the_choices_of_a_request_differ_and_carry_its_one_seed(model: Path, rpc: str) -> None:
    async with serving(model, StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024)) as served:
        answer = await ask(served.channel, rpc, greedy(n=3, max_tokens=8, seed=5, ignore_eos=True))
        of_choice = [
            tuple(i for m in answer.messages for c in m.choices if c.index == index for i in c.token_ids)
            for index in range(3)
        ]
        assert len(set(of_choice)) == 3 and {len(ids) for ids in of_choice} == {8}
        (submit,) = served.engine.submits
        assert (submit.seed, submit.num_choices) == (5, 3), "the engine makes the choices' seeds of the request's"


async def test_K7_tenants_and_salts_share_no_block_and_their_own_all(model: Path) -> None:
    who = [("", ""), ("a", ""), ("", "a"), ("b", ""), ("a", "b"), ("b", "a"), ("ab", "")]
    async with serving(model, scripted([50])) as served:
        cached = []
        for tenant, salt in who + who:
            request = by_ids([10] * 64, greedy(max_tokens=1, cache_salt=salt))
            async for message in served.stub.Generate(request, metadata=[("triptych-tenant", tenant)]):
                last = message
            cached.append(last.usage.cached_tokens)
        # The first time nothing is found, the second all but the block that holds the last id.
        assert cached == [0] * len(who) + [48] * len(who)
        submits = served.engine.submits[: len(who)]
        assert len({submit.root_digest for submit in submits}) == len(who)
        blocks = [submit.block_digests[i : i + 32] for submit in submits for i in range(0, 128, 32)]
        assert len(set(blocks)) == len(who) * 4
