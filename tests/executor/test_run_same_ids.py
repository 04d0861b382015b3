"""Greedy ids through the executor's real server equal transformers' generate, however the work is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from triptych.executor.v1 import executor_pb2 as pb

from tests.executor.mini_scheduler import GREEDY, MiniScheduler, Request, RunStream, column, read, serve
from tests.support.checkpoints import check_same_ids, reference_ids

NEW_TOKENS = 24


def prompts(*lengths: int, vocab: int = 512) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab, length).tolist() for length in lengths]


async def generate(
    path: Path,
    asked: list[list[int]],
    *,
    block_tokens: int = 16,
    budget: int = 256,
    slots: int = 8,
    preempt: int = 0,
    in_flight: int = 1,
) -> list[list[int]]:
    blocks = 1 + sum(-(-(len(prompt) + NEW_TOKENS) // block_tokens) for prompt in asked)
    async with serve(path, num_blocks=blocks, block_tokens=block_tokens, max_slots=slots) as rig:
        run = await RunStream.open(rig)
        requests = [Request(prompt, NEW_TOKENS) for prompt in asked]
        scheduler = MiniScheduler(run, rig.config, blocks, budget=budget, max_in_flight=in_flight)
        await scheduler.finish(requests, preempt_every=preempt)
        assert scheduler.most_in_flight == in_flight
        await run.close()
    return [request.output for request in requests]


def check(path: Path, asked: list[list[int]], got: list[list[int]]) -> None:
    check_same_ids(path, asked, got, reference_ids(path, asked, NEW_TOKENS, ignore_eos=True))


@pytest.mark.parametrize("block_tokens", [1, 16, 32])
async def test_interleaved_requests_whatever_the_block_size(tiny: Path, block_tokens: int) -> None:
    asked = prompts(1, 2, 15, 16, 17, 64, 100)
    check(tiny, asked, await generate(tiny, asked, block_tokens=block_tokens))


@pytest.mark.parametrize("budget", [7, 16, 64])
async def test_prompts_cut_into_chunks(tiny: Path, budget: int) -> None:
    asked = prompts(1, 63, 64, 65, 200)
    check(tiny, asked, await generate(tiny, asked, budget=budget))


async def test_more_requests_than_slots_reuse_them(tiny: Path) -> None:
    asked = prompts(*range(3, 12))
    check(tiny, asked, await generate(tiny, asked, slots=2))


@pytest.mark.parametrize("block_tokens", [1, 16])
@pytest.mark.parametrize("in_flight", [1, 2])
async def test_preempted_requests_come_back_with_their_output(tiny: Path, block_tokens: int, in_flight: int) -> None:
    asked = prompts(5, 40, 90)
    got = await generate(tiny, asked, block_tokens=block_tokens, budget=64, preempt=5, in_flight=in_flight)
    check(tiny, asked, got)


@pytest.mark.parametrize(("budget", "slots"), [(256, 8), (7, 8), (64, 2)])
async def test_decodes_planned_before_the_previous_id_is_known(tiny: Path, budget: int, slots: int) -> None:
    asked = prompts(1, 15, 16, 17, 64, 65)
    check(tiny, asked, await generate(tiny, asked, budget=budget, slots=slots, in_flight=2))


async def test_what_was_computed_after_a_stop_is_discarded_and_disturbs_nobody(tiny: Path) -> None:
    asked = prompts(5, 9, 17, 33)
    expected = reference_ids(tiny, asked, NEW_TOKENS, ignore_eos=True)
    blocks = 12  # small: blocks of a request that has stopped go to the next at once
    async with serve(tiny, num_blocks=blocks, max_slots=3) as rig:
        run = await RunStream.open(rig)
        stops = [ids[5 + 3 * i] for i, ids in enumerate(expected)]
        requests = [Request(p, NEW_TOKENS, stop_id=stop) for p, stop in zip(asked, stops, strict=True)]
        await MiniScheduler(run, rig.config, blocks, max_in_flight=2).finish(requests)
        await run.close()
    cut = [ids[: ids.index(stop) + 1] for ids, stop in zip(expected, stops, strict=True)]
    check_same_ids(tiny, asked, [request.output for request in requests], cut)
    assert [request.overran for request in requests] == [1] * 4


def whole(slot: int, ids: list[int], blocks: list[int], computed: int = 0) -> pb.NewRequest:
    return pb.NewRequest(
        slot=slot,
        token_ids=column(*ids),
        prompt_tokens=len(ids),
        computed_tokens=computed,
        block_ids=[column(*blocks)],
        sampling=GREEDY,
    )


async def test_tokens_whose_kv_is_there_are_not_computed_and_copied_blocks_are_read(tiny: Path) -> None:
    """Slot 0 computes 40 ids in blocks 1, 2, 3. Others with the same beginning share 1 and 2, and copy what is in 3.

    The copies are of the step that writes the last of block 3: they must see its writes of before, not its own.
    """
    (prompt,) = prompts(40)
    other = [*prompt[:36], 9, 8, 7]
    expected = reference_ids(tiny, [prompt, other, prompt], 3, ignore_eos=True)
    async with serve(tiny, num_blocks=12) as rig:
        run = await RunStream.open(rig)
        await run.send(started=[whole(0, prompt, [1, 2, 3])], slots=column(0), token_counts=column(40))
        await run.send(
            started=[whole(1, other, [1, 2, 7], computed=36), whole(2, prompt, [1, 2, 8], computed=39)],
            # Block 3 goes to both; 9 is given to slot 0, and what 3 held before this step stays in it.
            groups=[pb.GroupUpdate(new_blocks=column(0, 9), copies=column(3, 7, 3, 8, 3, 9))],
            slots=column(0, 2, 1),
            token_counts=column(3),
            computed_tokens=40 + 36 + 39,
        )
        got: list[list[int]] = [[], [], []]
        got[0] += read((await run.result()).token_ids)
        for slot, token_id in zip((0, 2, 1), read((await run.result()).token_ids), strict=True):
            got[slot].append(token_id)
        for slot, token_id in zip((1, 2), read((await run.step(slots=column(1, 2))).token_ids), strict=True):
            got[slot].append(token_id)
        await run.close()
    check_same_ids(tiny, [prompt, other, prompt], got, [ids[:2] for ids in expected])


async def test_blocks_that_change_places_are_read_before_they_are_written(tiny: Path) -> None:
    """Two requests swap their only block in one plan and go on with each other's table."""
    asked = prompts(5, 7)
    expected = reference_ids(tiny, asked, 2, ignore_eos=True)
    async with serve(tiny, num_blocks=12) as rig:
        run = await RunStream.open(rig)
        await run.step(
            started=[whole(0, asked[0], [1]), whole(1, asked[1], [2])], slots=column(0, 1), token_counts=column(5, 7)
        )
        again = [whole(2, [*asked[0], expected[0][0]], [2], 5), whole(3, [*asked[1], expected[1][0]], [1], 7)]
        result = await run.step(
            freed_slots=column(0, 1),
            started=again,
            groups=[pb.GroupUpdate(copies=column(1, 2, 2, 1))],
            slots=column(2, 3),
        )
        assert read(result.token_ids) == [expected[0][1], expected[1][1]]
        await run.close()
