"""What every test run shares: the case table, shards of the slow tests, few threads."""

from __future__ import annotations

import os

import pytest

# Two cores are shared by what a test starts; set before numpy or torch is imported here, and inherited by processes.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "2")

pytest_plugins = ["tests.support.case_table"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="of the slow tests, run every N-th, beginning with number I from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are not slow are in every shard, for -m to choose."""
    shard = config.getoption("--shard")
    if shard is None:
        return
    index, count = _shard(shard)
    slow = sorted(item.nodeid for item in items if item.get_closest_marker("slow"))
    mine = set(slow[index::count])
    left_out = [item for item in items if item.get_closest_marker("slow") and item.nodeid not in mine]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or not int(index) < int(count):
        raise pytest.UsageError(f"--shard {text}: wanted I/N with 0 <= I < N, such as 0/3")
    return int(index), int(count)
