"""Logprobs of prompt ids through the executor's real server: log-softmax of transformers' float64 logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from triptych.executor.v1 import executor_pb2 as pb

from services.executor import scorer
from services.executor.batch import PersistentBatch, ScoredSpan
from services.executor.plan import Settings
from tests.executor.mini_scheduler import MiniScheduler, Request, RunStream, column, read, serve
from tests.executor.test_batch import begin, started
from tests.support.checkpoints import check_scores, check_tops, tiny_model

BLOCK = 16
VOCAB = 512


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


async def scored(
    path: Path, asked: Sequence[Sequence[int]], *, budget: int = 256, preempt: int = 0, beside: int = 0
) -> list[list[tuple[float, int]]]:
    """What is told of each prompt, `beside` of them unscored neighbours of the same ids.

    Every prompt asks for another number of alternatives, which are checked here.
    """
    requests = [Request(list(prompt), 6, scored=(0, 3, 20)[i % 3]) for i, prompt in enumerate(asked)]
    neighbours = [Request(list(prompt), 6) for prompt in asked[:beside]]
    blocks = 2 + sum(-(-(len(request.prompt) + 6) // BLOCK) for request in [*requests, *neighbours])
    async with serve(path, num_blocks=blocks, block_tokens=BLOCK, max_slots=16) as rig:
        run = await RunStream.open(rig)
        together = [request for pair in zip(requests, neighbours, strict=False) for request in pair]
        scheduler = MiniScheduler(run, rig.config, blocks, budget=budget)
        await scheduler.finish([*together, *requests[len(neighbours) :]], preempt_every=preempt)
        await run.close()
    for request, neighbour in zip(requests, neighbours, strict=False):
        assert neighbour.scores == {} and neighbour.output == request.output
    for request in requests:
        assert list(request.scores) == sorted(request.scores) == list(range(1, len(request.prompt)))
        if request.scored:
            assert list(request.tops) == list(request.scores)
            check_tops(path, request.prompt, 1, list(request.tops.values()), request.scored)
    return [list(request.scores.values()) for request in requests]


@pytest.mark.parametrize("budget", [7, 16, 64, 256])
async def test_scores_are_those_of_the_reference_whatever_the_chunks(tiny: Path, budget: int) -> None:
    asked = prompts(1, 2, 3, 15, 16, 17, 63, 64, 65, 200)
    check_scores(tiny, asked, await scored(tiny, asked, budget=budget, beside=3))


async def test_scores_after_preemptions_are_the_same(tiny: Path) -> None:
    asked = prompts(5, 40, 90)
    check_scores(tiny, asked, await scored(tiny, asked, budget=32, preempt=3))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 40, "final_logit_softcapping": 3.0}),
        ("gemma3_text", {"head_dim": 24, "query_pre_attn_scalar": 40}),
        ("phi", {}),  # its head has a bias
        ("gpt_neox", {"num_key_value_heads": None}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    ],
)
async def test_the_familys_own_head_is_used(tmp_path: Path, model_type: str, settings: dict[str, object]) -> None:
    path = tiny_model(tmp_path, model_type, **settings)
    asked = prompts(2, 40)
    check_scores(path, asked, await scored(path, asked, budget=24))


async def test_scores_do_not_depend_on_how_the_head_is_cut_into_pieces(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(65, 30, 2)
    whole = await scored(tiny, asked)
    monkeypatch.setattr(scorer, "PIECE_BYTES", 5 * 4 * VOCAB)
    span = ScoredSpan(slot=0, start=1, first_token=3, token_ids=np.zeros(12, np.int64))
    assert [tokens.tolist() for tokens in scorer.pieces([span], VOCAB)] == [[*range(3, 8)], [*range(8, 13)], [13, 14]]
    cut = await scored(tiny, asked)
    check_scores(tiny, asked, cut)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose([s for s, _ in one], [s for s, _ in other], atol=1e-4)


def test_the_logits_of_a_long_prompt_never_exist_at_once() -> None:
    rows: list[int] = []
    vocab, hidden = 49_152, torch.zeros(8192, 4)

    def head(piece: torch.Tensor) -> torch.Tensor:
        rows.append(len(piece))
        return torch.zeros(len(piece), vocab)

    span = ScoredSpan(slot=0, start=1, first_token=0, token_ids=np.zeros(200, np.int64))
    told = scorer.score([span], hidden, head, vocab)
    assert sum(rows) == 200 and max(rows) * vocab * 4 <= scorer.PIECE_BYTES
    np.testing.assert_allclose(told.scores[0].logprobs.own, -np.log(vocab), rtol=1e-6)
    assert set(told.scores[0].logprobs.ranks.tolist()) == {1}
    assert [len(tokens) for tokens in scorer.pieces([span], 1 << 30)] == [1] * 200


def test_padding_of_the_head_counts_neither_in_probability_nor_in_rank() -> None:
    logits = torch.tensor([[0.0, 1.0, 50.0], [1.0, 0.0, 50.0]])
    spans = [ScoredSpan(slot=4, start=7, first_token=0, token_ids=np.array([0, 0]))]
    (scores,) = scorer.score(spans, torch.eye(2), lambda hidden: hidden @ logits, 2).scores
    assert (scores.slot, scores.start, scores.logprobs.ranks.tolist()) == (4, 7, [2, 1])
    np.testing.assert_allclose(scores.logprobs.own, [-1 - np.log1p(np.exp(-1)), -np.log1p(np.exp(-1))], rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_own_slot_alone(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0], [bad, 1.0], [-torch.inf, 0.0]])
    spans = [ScoredSpan(1, 1, 0, np.array([0, 1])), ScoredSpan(2, 1, 2, np.array([0]))]
    told = scorer.score(spans, torch.eye(3), lambda hidden: logits[hidden.argmax(-1)], 2)
    assert told.failed_slots == (1,)
    (scores,) = told.scores
    assert scores.slot == 2 and scores.logprobs.own.tolist() == [-9999] and scores.logprobs.ranks.tolist() == [2]


async def test_a_row_whose_prompt_has_bad_logits_fails_samples_nothing_and_spares_its_neighbour(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_score = scorer.score

    def poisoned(spans: Sequence[ScoredSpan], *rest: object) -> scorer.Scored:
        told = true_score(spans, *rest)  # type: ignore[arg-type]
        return scorer.Scored(told.scores[1:], (spans[0].slot,))

    monkeypatch.setattr("services.executor.executor.score", poisoned)
    async with serve(tiny, num_blocks=9) as rig:
        run = await RunStream.open(rig)
        requests = [
            started(slot, prompt_tokens=3, block_ids=[column(slot + 1)], prompt_logprobs=0, logprobs=0)
            for slot in (0, 1)
        ]
        result = await run.step(started=requests, slots=column(0, 1), token_counts=column(3, 3))
        assert [row.slot for row in result.failed] == [0] and read(result.token_counts) == [0, 1]
        assert len(read(result.token_ids)) == 1 and [entry.slot for entry in result.prompt_logprobs] == [1]
        result = await run.step(freed_slots=column(0), slots=column(1), computed_tokens=3)
        assert len(read(result.token_ids)) == 1 and not result.prompt_logprobs
        await run.close()


async def test_a_failed_prompt_ends_no_neighbour_though_the_step_behind_it_waits_for_its_mask(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in flight was planned while the prompt still was to sample; the epoch once ended with it."""

    def poisoned(spans: Sequence[ScoredSpan], *_: object) -> scorer.Scored:
        return scorer.Scored((), tuple(span.slot for span in spans))

    monkeypatch.setattr("services.executor.executor.score", poisoned)
    async with serve(tiny, num_blocks=9) as rig:
        run = await RunStream.open(rig)
        requests = [
            started(0, token_ids=column(*range(5, 15)), prompt_tokens=10, block_ids=[column(1)], prompt_logprobs=0),
            started(1, prompt_tokens=3, block_ids=[column(2)]),
        ]
        await run.send(started=requests, slots=column(1, 0), token_counts=column(3, 4))
        await run.send(slots=column(1, 0), token_counts=column(6), masked_slots=column(0), computed_tokens=7)
        assert [row.slot for row in (await run.result()).failed] == [0]
        await run.send(slots=column(1, 0), masked_slots=column(0), computed_tokens=14)
        for step in (2, 3):
            mask = pb.Mask(slot=0, allowed_ids=column(9))
            await run.call.write(pb.RunRequest(masks=pb.Masks(step=step, masks=[mask])))
            result = await run.result()
            assert [row.slot for row in result.failed] == [0] and len(read(result.token_ids)) == 1
        await run.close()


def test_spans_are_gathered_for_the_slots_that_asked_up_to_the_prompts_end() -> None:
    batch = PersistentBatch(Settings(128, BLOCK, 8, 64), 20, VOCAB)
    ids = list(range(100, 120))
    asking = {"prompt_logprobs": 0, "prompt_tokens": 10}
    inputs = begin(
        batch,
        step=1,
        started=[
            started(1, token_ids=column(*ids), block_ids=[column(1, 2)], **asking),
            started(2, token_ids=column(*ids), block_ids=[column(3, 4)], prompt_tokens=20),
        ],
        slots=column(2, 1),
        token_counts=column(3, 4),
    )
    (span,) = inputs.scored
    assert (span.slot, span.start, span.first_token, span.token_ids.tolist()) == (1, 1, 3, ids[1:5])
    (span,) = begin(batch, step=2, slots=column(1), token_counts=column(5)).scored
    assert (span.start, span.token_ids.tolist()) == (5, ids[5:10])  # the last of the prompt's ten
    assert begin(batch, step=3, slots=column(1), token_counts=column(11)).scored == ()  # the output so far
    again = started(3, token_ids=column(*ids), block_ids=[column(5, 6)], computed_tokens=8, **asking)
    (span,) = begin(batch, step=4, started=[again], slots=column(3), token_counts=column(2)).scored
    assert (span.start, span.token_ids.tolist()) == (9, ids[9:10])
    begin(batch, step=5, freed_slots=column(3))
    unasked = started(3, token_ids=column(*ids), block_ids=[column(5, 6)], prompt_tokens=10)
    assert begin(batch, step=7, started=[unasked], slots=column(3), token_counts=column(9)).scored == ()
