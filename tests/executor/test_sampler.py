"""The sampler against one written out in plain Python, and what a row may never depend on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import paged_attention
from services.executor import noise
from services.executor.sampler import LOWEST_LOGPROB, Sampled, Sampler, SamplingParams
from tests.executor import reference_sampler as ref
from tests.executor import sample_rows
from tests.executor.sample_rows import SampleRow, row

NONE = np.zeros(0, np.uint32)
INF = math.inf


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = paged_attention.get_num_threads()
    paged_attention.set_num_threads(1)
    yield
    paged_attention.set_num_threads(threads)


def sample(logits: Any, rows: Sequence[SampleRow], vocab_size: int | None = None) -> Sampled:
    return sample_rows.sample(torch.as_tensor(logits, dtype=torch.float32), rows, vocab_size)


def check_against_reference(logits: np.ndarray[Any, Any], rows: Sequence[SampleRow]) -> int:
    """Returns how many random rows were far enough from every border (1e-9) for float64 to tell."""
    sampled, told = sample(logits, rows), 0
    for i, one in enumerate(rows):
        history = one.prompt_ids.tolist(), one.output_ids.tolist()
        expected = ref.reference(logits[i].tolist(), one.params, *history, one.allowed_by_mask)
        if max(expected.scores) == -INF:
            assert sampled.failed[i]
            continue
        assert not sampled.failed[i]
        drawn = int(sampled.token_ids[i])
        if one.params.is_greedy:
            assert drawn == ref.likeliest(expected.scores)
            continue
        seed, position = np.array([one.params.seed], np.uint64), np.array([one.position], np.uint64)
        token, distance = ref.draw(expected.probabilities, float(noise.uniform(seed, position)[0]))
        if min(expected.slack, distance) > 1e-9:
            assert drawn == token, (one, expected)
            told += 1
    return told


def logit_values() -> st.SearchStrategy[float]:
    """Small whole numbers (ties), any moderate float32, and -inf, but for a first one that is finite."""
    return st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32), st.just(-INF))


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[SampleRow]]:
    vocab_size = draw(st.integers(2, 12))
    ids = st.integers(0, vocab_size - 1)
    single = st.floats(-2, 2, width=32)
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-4, 1e-3, 0.25, 0.7, 1.0, 2.0, 100.0]),
        top_k=st.one_of(st.sampled_from([-1, 0, 1, 2, 3]), st.integers(1, 14)),
        top_p=st.one_of(st.just(1.0), st.floats(2**-7, 1.0, width=32)),
        min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
        repetition_penalty=st.one_of(st.just(1.0), st.floats(0.125, 10, width=32)),
        presence_penalty=st.one_of(st.just(0.0), single),
        frequency_penalty=st.one_of(st.just(0.0), single),
        logit_bias=st.dictionaries(ids, st.one_of(st.floats(-100, 100, width=32), st.just(-INF)), max_size=4).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        seed=st.integers(0, 2**64 - 1),
        min_tokens=st.integers(0, 4),
        stop_ids=st.lists(ids, max_size=3).map(tuple),
        logprobs=st.one_of(st.none(), st.integers(0, 13)),
        allowed_ids=st.one_of(st.just(()), st.lists(ids, min_size=1, unique=True).map(tuple)),
        banned_ids=st.lists(ids, max_size=3, unique=True).map(tuple),
    )
    histories = st.lists(ids, max_size=6)
    masks = st.one_of(st.none(), st.lists(ids, unique=True))
    rows = draw(st.lists(st.builds(row, params, histories, histories, masks), min_size=1, max_size=5))
    values = st.lists(logit_values(), min_size=vocab_size - 1, max_size=vocab_size - 1)
    first = st.integers(-3, 3).map(float)
    return np.array([[draw(first), *draw(values)] for _ in rows], dtype=np.float32), rows


@settings(max_examples=200, deadline=None)
@given(batches())
def test_any_row_is_drawn_as_the_reference_draws_it(batch: tuple[np.ndarray[Any, Any], list[SampleRow]]) -> None:
    check_against_reference(*batch)


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 6.0])
def test_rows_that_keep_few_many_or_all_of_a_large_vocabulary_are_drawn_as_the_reference_draws_them(
    spread: float,
) -> None:
    random = np.random.default_rng(5)
    settings_ = [
        SamplingParams(top_p=0.1),
        SamplingParams(top_p=0.97),
        SamplingParams(top_p=0.9999, temperature=1.5),
        SamplingParams(min_p=0.001, temperature=0.8),
        SamplingParams(min_p=0.3),
        SamplingParams(top_k=255),
        SamplingParams(top_k=257, top_p=0.9),
        SamplingParams(top_k=4095, top_p=0.5, min_p=0.01),
        SamplingParams(top_k=4500, top_p=0.99),
        SamplingParams(top_k=4999),
        SamplingParams(),
    ]
    rows = [row(replace(params, seed=seed)) for seed, params in enumerate(settings_)]
    logits = (random.standard_normal((len(rows), 5000)) * spread).astype(np.float32)
    # Where all are equal, the same ids fall on a border again and again; float64 cannot tell which side.
    assert check_against_reference(logits, rows) >= (len(rows) - 3 if spread else 3)


DRAWS, SMALL = 20_000, 50
PROMPT, OUTPUT = list(range(10)), [5, 5, 12]
ALLOWED = (0, 3, 5, 12, 13, 20, 21, 33, 40, 49)
SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=2.5),
    "top-k": SamplingParams(top_k=7, temperature=1.2),
    "top-p": SamplingParams(top_p=0.85),
    "min-p": SamplingParams(min_p=0.04, temperature=1.4),
    "all filters": SamplingParams(top_k=20, top_p=0.9, min_p=0.01, temperature=1.3),
    "penalties and bias": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6, logit_bias=((3, 2.0), (4, -INF), (5, 1.5))
    ),
    "allowed, banned and a mask": SamplingParams(
        allowed_ids=ALLOWED, banned_ids=(3, 40), stop_ids=(20,), min_tokens=9, temperature=1.5
    ),
}


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_twenty_thousand_draws_have_the_references_frequencies(setting: str, vary: str) -> None:
    logits = np.random.default_rng(11).standard_normal(SMALL).astype(np.float32) * 2
    one = row(SETTINGS[setting], PROMPT, OUTPUT, range(2, 45) if "mask" in setting else None)
    rows, masks = sample_rows.repeated(one, SMALL, DRAWS)
    if vary == "position":
        rows.columns["seed"] = 2**40
        rows = replace(rows, positions=np.arange(DRAWS))
    sampled = Sampler(SMALL).sample(torch.from_numpy(logits).expand(DRAWS, -1), rows, masks)
    probabilities = ref.reference(logits.tolist(), one.params, PROMPT, OUTPUT, one.allowed_by_mask).probabilities
    expected = np.array(probabilities) / sum(probabilities) * DRAWS
    counts = np.bincount(sampled.token_ids, minlength=SMALL)
    assert not sampled.failed.any() and (counts[expected == 0] == 0).all()
    common = expected >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    chi_square = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0)
    freedom = sum(w > 0 for w in wanted) - 1
    # Wilson-Hilferty: the value that chance passes once in 10,000 times (3.719 standard deviations).
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom >= 3 and chi_square < limit, (chi_square, limit, freedom)


MIXED = [
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logit_bias=((0, -INF), (7, 5.0))),
    SamplingParams(temperature=0.8, seed=1, logprobs=0),
    SamplingParams(top_k=40, seed=2),
    SamplingParams(top_p=0.95, seed=3, logprobs=0),
    SamplingParams(min_p=0.02, seed=4, presence_penalty=1.5),
    SamplingParams(top_k=600, top_p=0.8, seed=5, repetition_penalty=1.7, frequency_penalty=-0.5, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, min_tokens=9, stop_ids=(1, 2)),
    SamplingParams(seed=6, allowed_ids=tuple(range(0, 300, 7)), logprobs=5, logit_bias=((7, 3.0),)),
    SamplingParams(seed=7, banned_ids=(3, 4, 5), top_p=0.5, logprobs=20),
]


def mixed_batch(vocab_size: int) -> tuple[torch.Tensor, list[SampleRow]]:
    random = np.random.default_rng(vocab_size)
    rows = [
        row(
            params,
            random.integers(0, vocab_size, 3 * i),
            random.integers(0, vocab_size, i),
            range(i, vocab_size, 2) if i % 4 == 2 else None,
        )
        for i, params in enumerate(MIXED)
    ]
    return torch.from_numpy(random.standard_normal((len(rows), vocab_size)).astype(np.float32)) * 3, rows


def bits(sampled: Sampled, i: int) -> tuple[int, bool, bytes]:
    """All that is told of a row."""
    own = sampled.logprobs.where(sampled.scored == i)
    columns = (own.own, own.ranks, own.top_counts, own.top_ids, own.top)
    return int(sampled.token_ids[i]), bool(sampled.failed[i]), b"".join(column.tobytes() for column in columns)


@pytest.mark.parametrize("vocab_size", [997, 8192])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_is_to_the_bit_the_row_among_any_neighbours(vocab_size: int, threads: int) -> None:
    logits, rows = mixed_batch(vocab_size)
    paged_attention.set_num_threads(1)
    alone = [bits(sample(logits[i : i + 1], rows[i : i + 1]), 0) for i in range(len(rows))]
    paged_attention.set_num_threads(min(threads, len(os.sched_getaffinity(0))))
    random = np.random.default_rng(0)
    for _ in range(6):
        chosen = random.permutation(len(rows))[: random.integers(1, len(rows) + 1)]
        sampled = sample(logits[chosen], [rows[i] for i in chosen])
        assert [bits(sampled, at) for at in range(len(chosen))] == [alone[i] for i in chosen]
    crowd = sample(logits[[2] * 64 + [4]], [rows[2]] * 64 + [rows[4]])
    assert {bits(crowd, at) for at in range(64)} == {alone[2]} and bits(crowd, 64) == alone[4]


def test_greedy_takes_the_lowest_of_equal_ids_with_and_without_adjustments() -> None:
    logits = [[1.0, 3.0, 3.0, 2.0], [1.0, 3.0, 3.0, 2.0], [5.0, 3.0, 3.0, 2.0]]
    greedy = SamplingParams(temperature=0.0)
    rows = [row(greedy), row(replace(greedy, logit_bias=((3, 1.0),))), row(replace(greedy, logit_bias=((0, -INF),)))]
    assert sample(logits, rows).token_ids.tolist() == [1, 1, 1]


def test_top_k_and_top_p_keep_the_lower_of_equal_ids() -> None:
    draws = [row(SamplingParams(top_k=2, seed=seed)) for seed in range(200)]
    assert set(sample(torch.zeros(200, 4), draws).token_ids.tolist()) == {0, 1}
    draws = [row(SamplingParams(top_p=0.75, seed=seed)) for seed in range(200)]  # 4 quarters, all exact
    assert set(sample(torch.zeros(200, 4), draws).token_ids.tolist()) == {0, 1, 2}


def test_at_least_one_id_is_kept() -> None:
    draws = [row(SamplingParams(top_p=1e-6, min_p=1.0, top_k=3, seed=seed)) for seed in range(50)]
    assert set(sample(torch.tensor([[0.0, 2.0, 1.0]]).expand(50, -1), draws).token_ids.tolist()) == {1}


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF]])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, logprobs=0)])
def test_logits_that_no_id_can_be_drawn_from_fail_their_row_alone(bad: list[float], params: SamplingParams) -> None:
    good = [0.5, 1.5, 0.25]
    rows = [row(replace(params, seed=i)) for i in range(3)]
    sampled = sample([good, bad, good], rows)
    without = sample([good, good], [rows[0], rows[2]])
    assert sampled.failed.tolist() == [False, True, False]
    assert [bits(sampled, 0), bits(sampled, 2)] == [bits(without, 0), bits(without, 1)]
    assert sampled.scored.tolist() == ([] if params.logprobs is None else [0, 2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_ids_are_all_banned_fails_alone(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=9)
    rows = [
        row(replace(params, logit_bias=tuple((i, -INF) for i in range(3)))),
        row(params),
        row(replace(params, min_tokens=1, stop_ids=(0, 1, 2))),
    ]
    sampled = sample(torch.zeros(3, 3), rows)
    assert sampled.failed.tolist() == sampled.idless.tolist() == [True, False, True]
    assert bits(sampled, 1) == bits(sample(torch.zeros(1, 3), rows[1:2]), 0)


def test_minus_infinity_in_the_models_logits_is_an_id_that_cannot_be_drawn() -> None:
    draws = [row(SamplingParams(seed=seed, repetition_penalty=2.0), [1]) for seed in range(100)]
    sampled = sample(torch.tensor([[0.0, -INF, 0.0]]).expand(100, -1), draws)
    assert not sampled.failed.any() and set(sampled.token_ids.tolist()) == {0, 2}


def test_columns_past_the_vocabulary_are_never_drawn_and_never_seen() -> None:
    logits, rows = mixed_batch(500)
    padded = torch.cat([logits, torch.full((len(rows), 12), 1e4)], dim=1)
    padded[::2, 505] = math.nan
    own, wide = sample(logits, rows), sample(padded, rows, vocab_size=500)
    assert [bits(wide, i) for i in range(len(rows))] == [bits(own, i) for i in range(len(rows))]


def test_logits_are_left_as_they_were() -> None:
    logits, rows = mixed_batch(300)
    before = logits.clone()
    sample(logits, rows)
    assert torch.equal(logits, before)


def test_logits_may_be_bfloat16() -> None:
    logits, rows = mixed_batch(300)
    short = sample_rows.sample(logits.bfloat16(), rows)
    long = sample_rows.sample(logits.bfloat16().float(), rows)
    assert [bits(short, i) for i in range(len(rows))] == [bits(long, i) for i in range(len(rows))]


def test_stop_ids_are_not_drawn_before_min_tokens_and_may_be_from_there_on() -> None:
    likes_stop = torch.tensor([[0.0, 9.0, 1.0, 8.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_ids=(1, 3))
    ids = [sample(likes_stop, [row(params, [1], [0] * n)]).token_ids[0] for n in range(4)]
    assert ids == [2, 2, 1, 1]


def test_a_bias_of_minus_infinity_bans_and_any_other_is_added() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    greedy = SamplingParams(temperature=0.0)
    for bias, expected in (((0, -INF),), 1), (((2, 2.5),), 2), (((2, 1.5),), 0), (((0, -1.5), (2, 0.5)), 1):
        assert sample(logits, [row(replace(greedy, logit_bias=bias))]).token_ids.tolist() == [expected]
    draws = [row(SamplingParams(seed=seed, logit_bias=((0, -INF),))) for seed in range(200)]
    assert 0 not in sample(logits.expand(200, -1), draws).token_ids


def test_the_same_seed_and_position_draw_the_same_id_and_others_do_not() -> None:
    logits = torch.zeros(1, 1000)

    def stream(seed: int) -> list[int]:
        output: list[int] = []
        for _ in range(8):
            output.append(int(sample(logits, [row(SamplingParams(seed=seed), [1, 2], output)]).token_ids[0]))
        return output

    assert stream(5) == stream(5)
    assert len(set(stream(5))) > 4
    # 8 ids of 1,000 alike by chance: once in 10**24.
    assert stream(5) != stream(6) and stream(5) != stream(5 + 2**32)
    # A preempted request comes back with its output so far: the draw at a position does not know how it got there.
    whole = stream(7)
    assert sample(logits, [row(SamplingParams(seed=7), [9] * 50, whole[:5])]).token_ids[0] == whole[5]


def test_logprob_and_rank_are_the_models_own_whatever_the_request_asks_for() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.0]])
    log_sum = math.log(sum(math.exp(x) for x in logits[0].tolist()))
    for params, token, rank in (
        (SamplingParams(temperature=0.0), 0, 1),
        (SamplingParams(temperature=0.0, logit_bias=((2, 50.0),)), 2, 4),
        (SamplingParams(temperature=5.0, top_k=1, logit_bias=((0, -INF),)), 1, 2),
        (SamplingParams(temperature=0.0, logit_bias=((3, 9.0),)), 3, 2),  # equal to id 1: none between is likelier
    ):
        sampled = sample(logits, [row(replace(params, logprobs=0))])
        assert sampled.token_ids.tolist() == [token] and sampled.logprobs.ranks.tolist() == [rank]
        assert sampled.logprobs.own[0] == pytest.approx(logits[0, token].item() - log_sum, abs=1e-6)
        assert (sampled.logprobs.own.dtype, sampled.logprobs.ranks.dtype) == (np.float32, np.uint32)


def test_the_likeliest_ids_are_told_beside_the_drawn_one_each_row_as_many_as_it_asks_for() -> None:
    random = np.random.default_rng(8)
    logits = random.integers(-4, 5, (7, 300)).astype(np.float32)  # many ties
    logits[5, :290] = -INF
    wanted = [3, 0, None, 20, 299, 12, 1000]
    rows = [row(SamplingParams(temperature=2.0, seed=i, logprobs=k)) for i, k in enumerate(wanted)]
    rows[3] = row(SamplingParams(seed=3, logprobs=20, allowed_ids=(299,)))  # not among the likeliest
    sampled = sample(logits, rows)
    assert sampled.scored.tolist() == [0, 1, 3, 4, 5, 6]
    at = 0
    for place, i in enumerate(sampled.scored.tolist()):
        expected = ref.alternatives(logits[i].tolist(), wanted[i] or 0)
        count = int(sampled.logprobs.top_counts[place])
        assert count == len(expected) == min(wanted[i] or 0, 300)
        assert sampled.logprobs.top_ids[at : at + count].tolist() == [token for token, _ in expected]
        told = sampled.logprobs.top[at : at + count]
        np.testing.assert_allclose(told, [logprob for _, logprob in expected], atol=1e-5)
        drawn, rank = int(sampled.token_ids[i]), int(sampled.logprobs.ranks[place])
        if drawn in sampled.logprobs.top_ids[at : at + count]:
            which = sampled.logprobs.top_ids[at : at + count].tolist().index(drawn)
            assert told[which] == sampled.logprobs.own[place] and rank <= which + 1
        at += count
    assert at == len(sampled.logprobs.top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_allowed_ids_are_stop_ids_fails_alone_until_min_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_ids=(1, 2), stop_ids=(1, 2), min_tokens=2)
    rows = [row(params, [0], [0]), row(SamplingParams(temperature=temperature)), row(params, [0], [0, 0])]
    sampled = sample(torch.zeros(3, 4), rows)
    assert sampled.failed.tolist() == [True, False, False]
    assert sampled.token_ids[2] in (1, 2)
    assert bits(sampled, 1) == bits(sample(torch.zeros(1, 4), rows[1:2]), 0)


def test_bans_hold_whatever_a_bias_or_a_negative_penalty_adds() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    pushed = SamplingParams(temperature=0.0, logit_bias=((3, 100.0),), frequency_penalty=-2.0, presence_penalty=-2.0)
    history = {"prompt": [3], "output": [3, 3]}
    for bans, mask, expected in (
        ({"banned_ids": (3,)}, None, 2),
        ({"allowed_ids": (0, 1)}, None, 1),
        ({"allowed_ids": (0, 3), "banned_ids": (3,)}, None, 0),
        ({"stop_ids": (3,), "min_tokens": 3}, None, 2),
        ({}, (0, 2), 2),
        ({"allowed_ids": (0, 1, 3)}, (0, 2, 1), 1),
        ({"allowed_ids": (1, 3)}, (3,), 3),
    ):
        assert sample(logits, [row(replace(pushed, **bans), **history, mask=mask)]).token_ids.tolist() == [expected]
    sampled = sample(logits, [row(replace(pushed, allowed_ids=(1, 3)), **history, mask=(0, 2))])
    assert sampled.failed.tolist() == [True]


def test_a_logprob_below_the_floor_is_the_floor() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((0, -INF),), logprobs=0)
    assert sample([[0.0, -30000.0]], [row(params)]).logprobs.own.tolist() == [LOWEST_LOGPROB]


def test_no_rows_are_no_ids() -> None:
    assert sample(torch.zeros(0, 5), []).token_ids.shape == (0,)


@pytest.mark.parametrize("shape", [(1, 10), (3, 10), (2, 9)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"wanted \(2, 10 or more\)"):
        Sampler(10).sample(torch.zeros(shape), sample_rows.gathered([row(SamplingParams())] * 2, 10))


def test_an_id_past_the_vocabulary_in_a_history_never_lands_in_a_neighbours_row() -> None:
    rows = [row(SamplingParams(repetition_penalty=2.0), [11]), row(SamplingParams(repetition_penalty=2.0), [1])]
    with pytest.raises(IndexError):
        sample(torch.zeros(2, 10), rows)
