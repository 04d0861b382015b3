"""The device's sampler draws what the CPU's does, through the CUDA kernel on the shim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.errors import StartError
from services.executor.device_sampler import NO_ID_LEFT, DeviceSampler
from services.executor.logprobs import Logprobs
from services.executor.sampler import Sampled, Sampler
from services.executor.sampling_columns import History
from services.executor.sampling_params import SamplingParams
from tests.executor.sample_rows import SampleRow, gathered, masks, row
from tests.executor.shim_device import ShimDevice

VOCAB = 300
PADDED = VOCAB + 20
"""Columns of the logits: ids past the vocabulary would win."""


def logits(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    made = 3 * torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed))
    made[:, VOCAB:] = 100.0
    return made.to(dtype)


def draw(made: torch.Tensor, rows: Sequence[SampleRow], newest: torch.Tensor | None = None) -> Sampled:
    """What the device's sampler told, as the CPU's does."""
    device = ShimDevice()
    sampler = DeviceSampler(device, VOCAB, made.dtype, threads=64)
    with torch.inference_mode():
        drawn = sampler.draw(made, gathered(rows, VOCAB), masks(rows, VOCAB), newest)
        logprobs = None if drawn.logprobs is None else drawn.logprobs.downloaded(device)
        ids, bad = device.download(drawn.token_ids), device.download(drawn.failed)
        device.record().wait()
    failed = bad.numpy() != 0
    good = ~failed[drawn.scored]
    told = Logprobs.none() if logprobs is None else logprobs.told(drawn.tops).where(good)
    return Sampled(ids.numpy(), failed, drawn.scored[good], told, bad.numpy() == NO_ID_LEFT)


def check(made: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Draws on both and compares all that is told."""
    expected = Sampler(VOCAB).sample(made, gathered(rows, VOCAB), masks(rows, VOCAB))
    got = draw(made, rows)
    np.testing.assert_array_equal(got.failed, expected.failed)
    np.testing.assert_array_equal(got.idless, expected.idless)
    np.testing.assert_array_equal(got.token_ids[~got.failed], expected.token_ids[~expected.failed])
    np.testing.assert_array_equal(got.scored, expected.scored)
    for name in ("ranks", "top_counts", "top_ids"):
        np.testing.assert_array_equal(getattr(got.logprobs, name), getattr(expected.logprobs, name))
    for name in ("own", "top"):
        np.testing.assert_allclose(getattr(got.logprobs, name), getattr(expected.logprobs, name), rtol=1e-6, atol=1e-6)
    return got


PLAIN = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, top_k=5, seed=2**63 + 5),
    SamplingParams(temperature=1.3, top_p=0.8, seed=5),
    SamplingParams(temperature=2.0, min_p=0.05, seed=6),
    SamplingParams(temperature=1.0, top_k=VOCAB + 7, top_p=0.9, min_p=0.01, seed=7),
    SamplingParams(temperature=1e-6, seed=8),
]
ADJUSTED = [
    SamplingParams(temperature=0.0, logit_bias=((7, 50.0), (9, -np.inf))),
    SamplingParams(temperature=0.0, logit_bias=((7, -3.0),), banned_ids=tuple(range(100, 300))),
    SamplingParams(temperature=1.0, allowed_ids=(3, 5, 250), seed=4),
    SamplingParams(temperature=1.0, stop_ids=(1, 2), min_tokens=9, seed=5),
    SamplingParams(temperature=1.1, repetition_penalty=1.7, seed=6),
    SamplingParams(temperature=1.1, repetition_penalty=0.6, presence_penalty=1.5, frequency_penalty=0.4, seed=7),
    SamplingParams(temperature=1.1, presence_penalty=-1.5, frequency_penalty=-0.4, top_p=0.9, seed=8),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_and_noise(dtype: torch.dtype) -> None:
    rows = [row(params, [1, 2], list(range(position))) for params in PLAIN for position in (0, 1, 17)]
    got = check(logits(len(rows), dtype), rows)
    assert len(set(got.token_ids.tolist())) > len(rows) // 3 and got.token_ids.max() < VOCAB


def test_bans_bias_and_penalties_beside_rows_without_any() -> None:
    history = [5, 5, 9, 17, 5]
    rows = [row(params, [5, 200, 9], history) for params in [*ADJUSTED, *PLAIN]]
    check(logits(len(rows)), rows)
    alone = [draw(logits(len(rows))[i : i + 1], [one]).token_ids[0] for i, one in enumerate(rows)]
    assert draw(logits(len(rows)), rows).token_ids.tolist() == alone, "a row does not depend on its neighbours"


def test_masks_alone_and_with_what_else_bans() -> None:
    allowed = [4, 40, 140, 299]
    rows = [
        row(SamplingParams(temperature=0.0), mask=allowed),
        row(SamplingParams(temperature=1.0, seed=2)),
        row(SamplingParams(temperature=1.0, seed=3, banned_ids=(4, 40)), mask=allowed),
        row(SamplingParams(temperature=1.0, seed=4, allowed_ids=(40, 41)), mask=allowed),
        row(SamplingParams(temperature=1.0, seed=5, allowed_ids=(41,)), mask=allowed),
    ]
    got = check(logits(len(rows)), rows)
    assert got.failed.tolist() == [False, False, False, False, True]
    assert got.token_ids[2] in (140, 299) and got.token_ids[3] == 40


def test_logprobs_ranks_and_alternatives_of_the_models_own_logits_the_lower_id_first_among_equals() -> None:
    made = logits(4).round()  # many equal ones
    made[1, :10] = -0.0
    made[1, 10:VOCAB] = 0.0
    params = [
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(temperature=1.0, seed=1, logprobs=VOCAB + 50),
        SamplingParams(temperature=0.0, logit_bias=((3, 100.0),), logprobs=0),
        SamplingParams(temperature=0.0),
    ]
    got = check(made, [row(one, [1]) for one in params])
    assert got.logprobs.top_counts.tolist() == [5, VOCAB, 0] and len(got.logprobs.ranks) == 3
    assert got.logprobs.top_ids[5:25].tolist() == list(range(20))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_a_number_fails_alone_also_where_a_ban_hides_it(bad: float) -> None:
    made = logits(4)
    made[1, 17] = made[2, 17] = bad
    params = [SamplingParams(temperature=1.0, logprobs=1), SamplingParams(temperature=1.0)]
    params += [SamplingParams(temperature=0.0, banned_ids=(17,), logprobs=2), SamplingParams(temperature=0.0)]
    got = check(made, [row(one, [1]) for one in params])
    assert got.failed.tolist() == [False, True, True, False] and got.scored.tolist() == [0]


def test_nothing_at_all_is_left_to_draw_from() -> None:
    made = torch.full((2, PADDED), -torch.inf)
    made[1, 4] = 0.0
    assert check(made, [row(SamplingParams(temperature=t), [1]) for t in (0.0, 1.0)]).failed.tolist() == [True, False]


def test_an_id_that_the_host_does_not_know_yet_counts_in_the_penalties() -> None:
    """The host has 0 where the newest id stands; the device knows better, but for a row that has drawn none: whatever
    is told of that one is not read."""
    params = [replace(one, temperature=0.0) for one in ADJUSTED[4:]]
    params.append(SamplingParams(temperature=0.0, presence_penalty=9.0))
    known = [row(one, [5, 200], [9, 17, 23]) for one in params]
    known.append(row(params[0], [5, 200, 23]))
    hidden = [row(one, [5, 200], [9, 17, 0]) for one in params]
    hidden.append(known[-1])
    made = logits(len(known))
    made[:, 23] = 50.0  # so that it matters
    newest = torch.tensor([23] * len(params) + [9])
    expected = Sampler(VOCAB).sample(made, gathered(known, VOCAB))
    np.testing.assert_array_equal(draw(made, hidden, newest).token_ids, expected.token_ids)


def test_a_row_without_history_of_its_own_gives_its_newest_id_to_no_other() -> None:
    """Rows with history need not be neighbours, and one may have none: presence_penalty at the first output id."""
    rows = [
        row(SamplingParams(temperature=0.0, presence_penalty=5.0), [1, 2]),
        row(SamplingParams(temperature=0.0), [1], [9]),
        row(SamplingParams(temperature=0.0, frequency_penalty=5.0), [1], [9, 9, 0]),
    ]
    assert isinstance(gathered(rows, VOCAB).history, History)
    made = logits(3)
    made[:, 33] = 40.0
    got = draw(made, rows, torch.tensor([-1, 33, 33]))
    again = [*rows[:2], row(SamplingParams(temperature=0.0, frequency_penalty=5.0), [1], [9, 9, 33])]
    np.testing.assert_array_equal(got.token_ids, Sampler(VOCAB).sample(made, gathered(again, VOCAB)).token_ids)


def test_logits_of_another_shape_and_vocabularies_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted \\(1, 300 or more\\)"):
        draw(logits(2), [row(SamplingParams(), [1])])
    with pytest.raises(StartError, match="600000 ids, the sampling kernel takes up to 524288"):
        DeviceSampler(ShimDevice(), 600_000, torch.float32)
