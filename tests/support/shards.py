"""A pytest plugin that runs a share of the slow tests: --shard I/N takes every N-th, beginning with number I from 0.

The tests of a file that is marked `one_shard` count as one: what they share takes longer than they do.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="of the slow tests, run every N-th, beginning with number I from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are not slow are in every shard, for -m to choose."""
    if config.getoption("--shard") is None:
        return
    index, count = _parse(config.getoption("--shard"))
    slow = sorted({_unit(item) for item in items if item.get_closest_marker("slow")})
    own = set(slow[index::count])
    others = {item for item in items if item.get_closest_marker("slow") and _unit(item) not in own}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def _unit(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0] if item.get_closest_marker("one_shard") else item.nodeid


def _parse(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or not int(index) < int(count):
        raise pytest.UsageError(f"--shard {text}: wanted I/N with 0 <= I < N, such as 0/3")
    return int(index), int(count)
