"""Threads that share the pieces of phases: each is done once, and no phase begins before the last is done."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numba import njit

from kernels.cpu import phases

PHASES, PIECES = 200, 7


@njit(nogil=True)
def _count_up(counters: np.ndarray, numbers: np.ndarray) -> None:
    """numbers[p + 1, i] becomes 1 more than the sum of numbers[p]; each time that a piece is done."""
    for phase in range(numbers.shape[0] - 1):
        pieces = numbers.shape[1]
        piece = phases.take(counters, phase, pieces)
        while piece >= 0:
            numbers[phase + 1, piece] += numbers[phase].sum() % 1009 + 1
            phases.give(counters, phase)
            piece = phases.take(counters, phase, pieces)
        phases.wait(counters, phase, pieces)


@njit(nogil=True)
def _finish_first(counters: np.ndarray) -> None:
    phases.wait(counters, 0, 1)


def expected() -> np.ndarray:
    numbers = np.zeros((PHASES + 1, PIECES), np.int64)
    for phase in range(PHASES):
        numbers[phase + 1] = numbers[phase].sum() % 1009 + 1
    return numbers


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_is_done_once_after_all_of_the_phase_before(threads: int) -> None:
    """With more threads than cores too, where who waits must let others run."""
    for _ in range(20):
        counters, numbers = phases.counters(PHASES), np.zeros((PHASES + 1, PIECES), np.int64)
        workers = [threading.Thread(target=_count_up, args=(counters, numbers)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert (numbers == expected()).all()


def test_a_thread_that_comes_when_all_is_done_passes_through() -> None:
    counters, numbers = phases.counters(PHASES), np.zeros((PHASES + 1, PIECES), np.int64)
    for _ in range(3):
        _count_up(counters, numbers)
        assert (numbers == expected()).all()


def test_a_piece_that_was_taken_and_is_not_done_is_waited_for() -> None:
    counters = phases.counters(1)
    _finish_first(counters + 1)  # compiled before the clock counts
    worker = threading.Thread(target=_finish_first, args=(counters,))
    worker.start()
    time.sleep(0.05)
    assert worker.is_alive()
    counters[0, 1, 0] = 1
    worker.join(10)
    assert not worker.is_alive()
