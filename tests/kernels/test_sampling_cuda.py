"""The sampling kernel on the CPU: the ids of the CPU sampler, whatever the order of threads and the neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.sampling import MOST_IDS, Row, Sampling, pack
from services.executor import noise
from services.executor.sampler import Sampler
from services.executor.sampling_params import SamplingParams
from tests.executor import sample_rows
from tests.kernels.hostshim.hostshim import HostDevice, ShimError
from tests.kernels.memory import untouched
from tests.kernels.paged import loaded, stored
from tests.kernels.sampling import UNTOUCHED, check, draw, mixed_logits, mixed_rows

ORDERS = [("forward", 1), ("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 63, 64, 65, 1000, 2049, 4099])
def test_ids_kept_and_drawn_are_those_of_the_written_out_filters(vocab: int) -> None:
    logits, rows = mixed_logits(24, vocab, seed=vocab), mixed_rows(24, vocab, seed=vocab)
    check(logits, rows, draw(HostDevice(), logits, rows))


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16"))]
)
def test_ids_are_those_of_the_cpu_sampler_for_the_same_seeds(dtype: str) -> None:
    count, vocab = 200, 1009
    logits = loaded(stored(mixed_logits(count, vocab), dtype), dtype).astype(np.float32)
    rows = mixed_rows(count, vocab)
    drawn = draw(HostDevice(), logits, rows, dtype=dtype)
    assert (drawn.ids == cpu_ids(logits, rows)).all()


def cpu_ids(logits: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    def params(row: Row) -> SamplingParams:
        return SamplingParams(row.temperature or 0.0, row.top_k, row.top_p, row.min_p, seed=row.seed)

    vocab_size = logits.shape[1]
    made = sample_rows.gathered([sample_rows.row(params(row)) for row in rows], vocab_size)
    # The position is part of a row's noise alone, so it is laid over: outputs of 2^40 ids are long.
    placed = replace(made, positions=np.array([row.position for row in rows], np.int64))
    return Sampler(vocab_size).sample(torch.from_numpy(logits), placed).token_ids


@pytest.mark.parametrize("threads", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_results_are_the_same_bits_in_five_orders_of_threads(threads: int) -> None:
    logits, rows = mixed_logits(8, 1500), mixed_rows(8, 1500)
    first, *others = (draw(HostDevice(order=order, seed=seed), logits, rows, threads=threads) for order, seed in ORDERS)
    assert all(first.same_bits(other) for other in others)
    check(logits, rows, first)


def test_a_block_of_1024_threads_draws_as_one_of_64() -> None:
    logits, rows = mixed_logits(3, 5000, seed=2), mixed_rows(3, 5000, seed=2)
    assert draw(HostDevice(), logits, rows, threads=1024).same_bits(draw(HostDevice(), logits, rows))


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    logits, rows = mixed_logits(12, 700), mixed_rows(12, 700)
    together = draw(HostDevice(), logits, rows)
    for at in (0, 5, 11):
        alone = draw(HostDevice(), logits[at : at + 1], [rows[at]])
        assert alone.ids[0] == together.ids[at] and (alone.kept[0] == together.kept[at]).all()


def test_among_equals_the_lower_ids_are_kept() -> None:
    """By top-k and by top-p, with so few ids that a block gathers them and with more; -0 and +0 are equals."""
    for vocab in (50, 700):
        logits = np.zeros((3, vocab), np.float32)
        logits[:, ::3] = -0.0
        logits[1, [7, 11]] = 1
        rows = [Row(1.0, top_k=20), Row(1.0, top_k=20), Row(1.0, top_p=10.5 / vocab)]
        kept = draw(HostDevice(), logits, rows).kept
        assert np.flatnonzero(kept[0]).tolist() == list(range(20))
        assert np.flatnonzero(kept[1]).tolist() == list(range(20)), "7 and 11 are among the first 20 as it is"
        assert np.flatnonzero(kept[2]).tolist() == list(range(11))


def test_the_cut_is_right_between_any_two_neighbouring_floats() -> None:
    check_neighbouring_floats(HostDevice())


def check_neighbouring_floats(device: HostDevice) -> None:
    """700 scores of which each is the next float after another, and a third of all numbers to keep."""
    vocab = 700
    order = np.random.default_rng(9).permutation(vocab)
    logits = (1 + order * 2.0**-23).astype(np.float32)
    counts = list(range(1, vocab, 3))
    kept = draw(device, np.tile(logits, (len(counts), 1)), [Row(1.0, top_k=count) for count in counts]).kept
    for count, ids in zip(counts, kept, strict=True):
        assert (ids == (order >= vocab - count)).all(), count


def test_a_weight_has_twelve_digits() -> None:
    check_weights(HostDevice())


def check_weights(device: HostDevice) -> None:
    """Of two ids the likelier one alone is kept up to its own share, to 1e-12 on both sides."""
    behind = np.linspace(0.05, 20, 60).astype(np.float32)
    logits = np.stack([np.zeros_like(behind), -behind], axis=1)
    for temperature in (0.9, 1.0):
        shares = 1 / (1 + np.exp(-behind.astype(np.longdouble) / np.longdouble(temperature)))
        for nudge, count in ((-1e-12, 1), (1e-12, 2)):
            rows = [Row(temperature, top_p=float(share + nudge)) for share in shares]
            assert (draw(device, logits, rows).kept.sum(axis=1) == count).all()


def test_top_p_counts_on_what_top_k_left() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    rows = [Row(1.0, top_k=2, top_p=0.57), Row(1.0, top_k=2, top_p=0.58), Row(1.0, top_p=0.41)]
    kept = draw(HostDevice(), np.repeat(logits, 3, axis=0), rows).kept
    assert kept.sum(axis=1).tolist() == [1, 2, 2]  # 0.4 / 0.7 = 0.571


def test_a_mask_leaves_what_it_allows() -> None:
    vocab = 333
    rng = np.random.default_rng(3)
    logits = mixed_logits(8, vocab, seed=3)
    masks = rng.random((4, vocab)) < 0.2
    masks[:, 0] = True
    masks[2] = False
    masks[2, 332] = True  # one id
    logits[2] = rng.standard_normal(vocab)
    rows = [replace(row, mask_row=at % 4 if at < 7 else None) for at, row in enumerate(mixed_rows(8, vocab, seed=3))]
    rows[2] = Row(1.0, top_k=5, top_p=0.5, mask_row=2)
    logits[6] = logits[2]
    drawn = draw(HostDevice(), logits, rows, masks=masks)
    check(logits, rows, drawn, masks)
    assert drawn.ids[2] == 332


def test_greedy_rows_take_the_likeliest_id_allowed_and_the_lower_among_equals() -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[0, [70, 30]] = 2
    logits[1, [70, 30]] = 2
    logits[3] = -np.inf
    logits[3, 99] = -3e38
    masks = np.ones((1, 100), bool)
    masks[0, 30] = False
    rows = [Row(None), Row(None, mask_row=0), Row(None), Row(None)]
    drawn = draw(HostDevice(), logits, rows, masks=masks)
    assert drawn.ids.tolist() == [30, 70, 0, 99]
    assert not drawn.failed.any()


def test_a_row_without_an_answer_is_flagged_and_its_neighbours_are_not() -> None:
    """NaN or +infinity anywhere, masked or not, as in the CPU sampler; or nothing to draw from."""
    vocab = 130
    logits = np.tile(np.linspace(-1, 1, vocab, dtype=np.float32), (7, 1))
    logits[0, 129] = np.nan
    logits[1, 64] = np.inf
    logits[2] = -np.inf
    logits[4, 3] = -np.nan
    logits[6, 5] = np.nan
    masks = np.ones((2, vocab), bool)
    masks[0] = False
    masks[1, 5] = False
    rows = [Row(1.0), Row(None), Row(1.0, top_k=3), Row(1.0, mask_row=0), Row(None), Row(1.0), Row(None, mask_row=1)]
    drawn = draw(HostDevice(), logits, rows, masks=masks)
    assert drawn.failed.tolist() == [1, 1, 1, 1, 1, 0, 1]
    assert drawn.ids[drawn.failed == 1].tolist() == [0] * 6


def test_an_idle_row_writes_nothing() -> None:
    logits = mixed_logits(3, 40)
    drawn = draw(HostDevice(), logits, [Row(1.0), None, Row(None)])
    assert drawn.ids[1] == UNTOUCHED and drawn.failed[1] == UNTOUCHED
    assert UNTOUCHED not in drawn.ids[[0, 2]]


def test_the_noise_is_the_samplers() -> None:
    """256 ids of one score: the drawn id is the first byte of the number; all 64 bits of seed and position count."""
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF, 5, 5, 5], np.uint64)
    positions = np.array([0, 0, 0, 0, 7, 1, 2**32, 2**64 - 1], np.uint64)
    rows = [Row(1.0, seed=int(s), position=int(p)) for s, p in zip(seeds, positions, strict=True)]
    drawn = draw(HostDevice(), np.zeros((8, 256), np.float32), rows)
    wanted = (noise.uniform(seeds, positions) * 256).astype(int)
    assert drawn.ids.tolist() == wanted.tolist()
    assert len(set(wanted)) > 5


def test_draws_are_distributed_as_the_probabilities() -> None:
    """Chi-square of 3000 seeds, 9 ids kept of 12: below the 99.99% point of 8 degrees of freedom (31.8)."""
    rng = np.random.default_rng(11)
    logits = rng.standard_normal(12).astype(np.float32)
    rows = [Row(0.8, top_k=9, seed=seed, position=3) for seed in range(3000)]
    ids = draw(HostDevice(), np.tile(logits, (len(rows), 1)), rows).ids
    kept = np.argsort(-logits)[:9]
    shares = np.exp(logits[kept].astype(float) / 0.8)
    wanted = shares / shares.sum() * len(rows)
    counts = Counter(ids.tolist())
    assert set(counts) <= set(kept.tolist())
    assert sum((counts[i] - want) ** 2 / want for i, want in zip(kept.tolist(), wanted, strict=True)) < 31.8


def test_extreme_logits_and_temperatures() -> None:
    """From the largest float to the smallest: the search for a cut ends, and finds what sorting finds."""
    rng = np.random.default_rng(5)
    exponents = rng.uniform(-149, 127, (4, 900))
    logits = (np.exp2(exponents) * rng.choice([-1, 1], exponents.shape)).astype(np.float32)
    logits[1, :500] = np.arange(500) * 1.401298464324817e-45  # subnormals, all below the smallest normal
    logits[1, 500:] = -np.float32(3.4e38)
    logits[2] = np.nextafter(np.float32(1), np.float32(2)) - (np.arange(900) % 2) * np.float32(2**-23)
    rows = [Row(1e30, top_k=300), Row(1.0, top_k=300), Row(0.001, top_k=451, top_p=0.999), Row(100.0, top_p=0.5)]
    kept = draw(HostDevice(), logits, rows).kept
    for at in (0, 1, 2):
        order = np.lexsort((np.arange(900), -logits[at]))[: rows[at].top_k]
        assert set(np.flatnonzero(kept[at])) <= set(order)
        if rows[at].top_p == 1:
            assert kept[at].sum() == rows[at].top_k
    assert kept[3].sum() == 1, "the largest is far ahead at any temperature that is allowed"


def test_X8_offsets_past_two_to_the_31_elements() -> None:
    """Rows of logits and of masks that lie 2^31 elements apart; memory is only taken where it is touched."""
    vocab, stride = 64, (1 << 31) + 64
    logits, masks = untouched(stride + vocab, np.float32), untouched(stride + 2, np.uint32)
    logits[stride + 40], logits[stride + 9] = 5, 4
    logits[3] = 1
    masks[:2], masks[stride : stride + 2] = 0xFFFFFFFF, [0xFFFFFFFF, 0]
    device, packed = HostDevice(), pack([Row(None, mask_row=0), Row(None, mask_row=1)])
    ids, failed = np.zeros(2, np.int64), np.zeros(2, np.int32)
    call = Sampling(device, dtype="float32", threads=64)
    call.params.set(logits=device.pointer(logits), rows=device.pointer(packed), masks=device.pointer(masks))
    call.params.set(token_ids=device.pointer(ids), failed=device.pointer(failed))
    call.params.set(logits_stride=stride, mask_stride=stride, vocab=vocab)
    call(2)
    assert ids.tolist() == [3, 9]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """Buffers of exact size; 65 ids are no whole word, and 300 more than a block gathers."""
    for vocab in (65, 300):
        logits, rows = mixed_logits(4, vocab, seed=vocab)[:, :vocab], mixed_rows(4, vocab, seed=vocab)
        rows[0] = Row(1.0, top_k=100, top_p=0.9, mask_row=0)
        rows[1] = Row(3.0, top_k=100, mask_row=1)
        masks = np.random.default_rng(1).random((2, vocab)) < 0.9
        masks[:, 0] = True
        check(logits, rows, draw(HostDevice(sanitizer=sanitizer), logits, rows, masks=masks), masks)


def test_shared_memory_is_what_the_instance_says() -> None:
    logits, rows = mixed_logits(1, 300), [Row(1.0, top_k=100, top_p=0.9)]
    with pytest.raises(ShimError, match="heap-buffer-overflow"):
        draw(HostDevice(sanitizer="address", shared_bytes_less=8), logits, rows)


def test_what_the_launcher_refuses() -> None:
    with pytest.raises(ValueError, match="no kernel draws from logits in float64"):
        Sampling(HostDevice(), dtype="float64")
    call = Sampling(HostDevice(), dtype="float32")
    call.params.set(vocab=MOST_IDS + 1)
    with pytest.raises(ValueError, match=f"the vocabulary has {MOST_IDS + 1} ids: 1 to {MOST_IDS}"):
        call(1)
    call.params.set(vocab=MOST_IDS)
    call(0)  # no rows: nothing is launched
