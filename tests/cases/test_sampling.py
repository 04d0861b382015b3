"""Rows S2, S3 and S4 of the case table, at the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.executor.sampler import SamplingParams
from tests.executor import reference_sampler as ref
from tests.executor import sample_rows
from tests.executor.sample_rows import SampleRow, row

VOCAB = 400
TINY = (0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3)


def draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    sampled = sample_rows.sample(logits, rows)
    assert not sampled.failed.any()
    return list(sampled.token_ids.tolist())


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_S2_tiny_temperatures_behave_as_greedy_beside_a_greedy_row_with_a_ban() -> None:
    logits = random_logits(1).expand(len(TINY) + 1, -1)
    first, second = logits[0].topk(2).indices.tolist()
    banned = SamplingParams(temperature=0.0, logit_bias=((first, -float("inf")),))
    rows = [row(SamplingParams(temperature=t, seed=i)) for i, t in enumerate(TINY)]
    # The gap between the two likeliest is over 0.05, so at 1e-3 the second has less than exp(-50) of the probability.
    assert logits[0, first] - logits[0, second] > 0.05
    assert draw(logits, [*rows, row(banned)]) == [first] * len(TINY) + [second]


@pytest.mark.parametrize("seed", range(5))
def test_S2_each_row_is_what_it_is_alone(seed: int) -> None:
    temperatures = (*TINY, 0.7, 1.0, 100.0)
    logits = random_logits(len(temperatures), seed)
    rows = [row(SamplingParams(temperature=t, seed=seed + i)) for i, t in enumerate(temperatures)]
    rows[3] = row(replace(rows[3].params, logit_bias=((0, -float("inf")), (5, 100.0))))
    assert draw(logits, rows) == [draw(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]


def test_S2_just_below_the_threshold_an_exact_tie_goes_to_the_lower_id_and_at_it_to_either() -> None:
    logits = torch.zeros(100, 2)
    below = [row(SamplingParams(temperature=0.9999e-3, seed=seed)) for seed in range(100)]
    at = [row(SamplingParams(temperature=1e-3, seed=seed)) for seed in range(100)]
    assert set(draw(logits, below)) == {0}
    assert set(draw(logits, at)) == {0, 1}


def test_S2_rows_with_lists_of_ids_and_masks_leave_the_others_what_they_are_alone() -> None:
    logits = random_logits(8, seed=9)
    lists = SamplingParams(allowed_ids=tuple(range(0, VOCAB, 3)), banned_ids=(3, 9), seed=3, temperature=0.9)
    rows = [
        row(SamplingParams(temperature=0.0)),
        row(lists),
        row(SamplingParams(seed=5, top_p=0.9)),
        row(replace(lists, temperature=1e-4), mask=range(0, VOCAB, 2)),
        row(SamplingParams(temperature=0.0, banned_ids=tuple(range(1, VOCAB)))),
        row(SamplingParams(seed=6), mask=(7,)),
        row(replace(lists, logit_bias=((3, 100.0),), min_tokens=1, stop_ids=(0, 6)), [1], [2]),
        row(SamplingParams(seed=8, repetition_penalty=1.5), [1, 2, 3], [4]),
    ]
    together = draw(logits, rows)
    assert together == [draw(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    assert (together[4], together[5]) == (0, 7) and together[3] % 6 == 0
    assert all(token % 3 == 0 and token not in (3, 9) for token in (together[1], together[3], together[6]))


OFF = (-1, 0, VOCAB, VOCAB + 1, 9_999_999)


def test_S3_every_value_that_means_off_draws_what_no_top_k_draws() -> None:
    logits = random_logits(20)
    without = draw(logits, [row(SamplingParams(seed=i)) for i in range(20)])
    for top_k in OFF:
        assert draw(logits, [row(SamplingParams(seed=i, top_k=top_k)) for i in range(20)]) == without


def test_S3_one_is_the_likeliest_id_at_any_temperature() -> None:
    logits = random_logits(20)
    rows = [row(SamplingParams(seed=i, top_k=1, temperature=1.0 + 5 * i)) for i in range(20)]
    assert draw(logits, rows) == logits.argmax(dim=-1).tolist()


def test_S3_all_values_mixed_in_one_batch_are_each_what_they_are_alone() -> None:
    values = (*OFF, 1, 2, 50, VOCAB - 1)
    logits = random_logits(len(values))
    rows = [row(SamplingParams(seed=i, top_k=top_k)) for i, top_k in enumerate(values)]
    assert draw(logits, rows) == [draw(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]


@pytest.mark.parametrize("top_k", [-1, 0, 1, 3, VOCAB - 1, VOCAB, VOCAB + 1, 9_999_999])
def test_S3_the_k_likeliest_and_no_others_are_drawn(top_k: int) -> None:
    logits = torch.zeros(4000, VOCAB)
    likely = torch.arange(VOCAB).flip(0)[: top_k if 0 < top_k < VOCAB else VOCAB]
    logits[:, likely] = 0.5
    ids = set(draw(logits, [row(SamplingParams(seed=i, top_k=top_k)) for i in range(4000)]))
    assert ids <= set(likely.tolist())
    # 4,000 even draws miss one of 400 ids with probability 4.5e-5, 60 of them never.
    assert len(ids) > 0.85 * len(likely)


def test_S3_top_p_counts_from_what_top_k_left() -> None:
    # 0.4, 0.3, 0.2, 0.1: two are left by top_k, 4/7 and 3/7; the first alone reaches 0.5, which it does not of all.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(300, -1)
    ids = draw(logits, [row(SamplingParams(seed=i, top_k=2, top_p=0.5)) for i in range(300)])
    assert set(ids) == {0}
    assert set(draw(logits, [row(SamplingParams(seed=i, top_p=0.5)) for i in range(300)])) == {0, 1}


def test_S4_repetition_sees_prompt_and_output_presence_and_frequency_the_output_alone() -> None:
    # Greedy; the first id leads by 1.0. Each penalty is enough to lose the lead where it applies.
    logits = torch.tensor([[4.0, 3.0, 2.0]])
    greedy = SamplingParams(temperature=0.0)
    repetition, presence = replace(greedy, repetition_penalty=2.0), replace(greedy, presence_penalty=1.5)
    frequency = replace(greedy, frequency_penalty=0.6)
    for params, prompt, output, expected in (
        (repetition, [0], [], 1),
        (repetition, [], [0], 1),
        (repetition, [0, 0, 0], [], 1),
        (presence, [0, 0], [], 0),
        (presence, [], [0], 1),
        (frequency, [0, 0], [], 0),
        (frequency, [0, 0], [0], 0),
        (frequency, [], [0, 0], 1),
    ):
        assert draw(logits, [row(params, prompt, output)]) == [expected], (params, prompt, output)


def test_S4_prompts_of_different_lengths_in_one_batch_never_count_for_one_another_nor_as_padding() -> None:
    random = np.random.default_rng(4)
    rows = []
    for i, (prompt, output) in enumerate([(0, 0), (1, 300), (700, 0), (7, 7), (50, 1), (3, 40), (1200, 90), (2, 0)]):
        params = SamplingParams(
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
            repetition_penalty=(1.0, 1.8, 0.6)[i % 3],
            presence_penalty=(0.0, 1.2)[i // 4],
            frequency_penalty=(0.3, -0.2)[i % 2],
        )
        rows.append(row(params, random.integers(0, VOCAB, prompt), random.integers(0, VOCAB, output)))
    logits = random_logits(len(rows))
    together = draw(logits, rows)
    assert together == [draw(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    for i, one in enumerate(rows):
        if one.params.is_greedy:
            scores = ref.adjusted(logits[i].tolist(), one.params, one.prompt_ids.tolist(), one.output_ids.tolist())
            assert together[i] == ref.likeliest(scores)


def test_S4_id_zero_is_not_penalized_in_a_row_whose_prompt_is_short() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 0] = 1.0
    params = SamplingParams(temperature=0.0, repetition_penalty=5.0, frequency_penalty=2.0)
    assert draw(logits, [row(params, [3], [4]), row(params, [5] * 500, [6] * 200)]) == [0, 0]
