"""The host shim finds the faults it is there for, and is quiet where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.instances import Instance
from kernels.params import Params
from tests.kernels.hostshim.hostshim import HERE, HostDevice, ShimError

ORDERS = [("forward", 1), ("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]


NAMES = (
    "neighbours<WITH_BARRIER>",
    "neighbours<WITHOUT_BARRIER>",
    "neighbours<SHUFFLE_INSTEAD>",
    "copies<true>",
    "copies<false>",
    "half_of_them_wait",
    "one_lane_leaves",
    "half_mask",
    "past_the_buffer",
    "past_shared_memory",
    "never_written",
    "odd_copy",
    "overflows",
)


def run(name: str, *, shared_bytes: int = 1024, heads: int = 1, **device: object) -> np.ndarray:
    """What 64 threads of a kernel of faulty.cu write."""
    kernels = {each: Instance("faulty.cu", each, "DecodeParams", 64, shared_bytes) for each in NAMES}
    host = HostDevice(sources=HERE, together=tuple(kernels.values()), **device)  # type: ignore[arg-type]
    out, source = np.full(64, -1, np.float32), np.arange(256, dtype=np.float32)
    params = Params("DecodeParams")
    params.set(partial_out=host.pointer(out), partial_lse=host.pointer(source), heads=heads)
    host.launch(kernels[name], (1, 1, 1), params)
    return out


@pytest.mark.parametrize("sanitizer", [None, "address", pytest.param("thread", marks=pytest.mark.slow)])
def test_a_sound_kernel_passes(sanitizer: str | None) -> None:
    expected = np.roll(np.arange(64), -1)
    for order, seed in ORDERS[: 1 if sanitizer else None]:
        found = run("neighbours<WITH_BARRIER>", shared_bytes=256, order=order, seed=seed, sanitizer=sanitizer)
        np.testing.assert_array_equal(found, expected)


def test_a_missing_barrier_shows_in_some_order_of_threads() -> None:
    found = [run("neighbours<WITHOUT_BARRIER>", order=order, seed=seed) for order, seed in ORDERS]
    assert any(not np.array_equal(found[0], other) for other in found[1:]) or np.isnan(found[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neighbours<WITHOUT_BARRIER>", "neighbours<SHUFFLE_INSTEAD>"])
def test_unordered_memory_is_a_data_race(name: str) -> None:
    """A shuffle exchanges registers; it does not order memory."""
    with pytest.raises(ShimError, match="data race"):
        run(name, sanitizer="thread")


def test_a_copy_that_nobody_waits_for_has_not_landed() -> None:
    np.testing.assert_array_equal(run("copies<true>"), np.arange(64) * 4)
    assert np.isnan(run("copies<false>")).all()


def test_shared_memory_is_nan_until_written() -> None:
    assert np.isnan(run("never_written")).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half_of_them_wait", "two different __syncthreads"),
        ("one_lane_leaves", "left while others wait|has left or never was"),
        ("half_mask", "not in its mask"),
        ("odd_copy", "not 16-byte aligned"),
    ],
)
def test_misuse_is_named(name: str, message: str) -> None:
    with pytest.raises(ShimError, match=message):
        run(name)


def test_a_block_that_is_too_large_is_refused() -> None:
    with pytest.raises(ShimError, match="233472 bytes"):
        run("never_written", shared_bytes=228 * 1024)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("past_the_buffer", {}, "heap-buffer-overflow"),
        ("past_shared_memory", {"shared_bytes": 256}, "heap-buffer-overflow"),
        ("overflows", {"heads": 1 << 20}, "signed integer overflow"),
    ],
)
def test_sanitizers_watch_kernels(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ShimError, match=message):
        run(name, sanitizer="address", **options)
