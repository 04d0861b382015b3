"""Shards of the slow tests: each slow test is in exactly one, whatever the order of collection."""

from __future__ import annotations

import re

import pytest

pytest_plugins = ["pytester"]

SOURCE = """
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("i", range(7))
def test_slow(i): pass
def test_fast(): pass
"""


def _run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(SOURCE)
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    one_shard\nasyncio_default_fixture_loop_scope = function")
    return pytester.runpytest_inprocess("-p", "tests.support.shards", "-v", *arguments)


def _passed(result: pytest.RunResult) -> list[str]:
    return re.findall(r"::(\S+) PASSED", result.stdout.str())


def test_the_shards_together_are_all_slow_tests_once(pytester: pytest.Pytester) -> None:
    shards = [_passed(_run(pytester, "-m", "slow", "--shard", f"{i}/3")) for i in range(3)]
    assert sorted(name for shard in shards for name in shard) == [f"test_slow[{i}]" for i in range(7)]
    assert [len(shard) for shard in shards] == [3, 2, 2]


def test_tests_that_are_not_slow_are_in_every_shard(pytester: pytest.Pytester) -> None:
    assert all("test_fast" in _passed(_run(pytester, "--shard", f"{i}/3")) for i in range(3))


def test_the_slow_tests_of_a_marked_file_are_in_one_shard(pytester: pytest.Pytester) -> None:
    marked = SOURCE + "\npytestmark = pytest.mark.one_shard\n"
    shards = []
    for i in range(3):
        pytester.makepyfile(test_marked=marked)
        shards.append(_passed(_run(pytester, "-m", "slow", "--shard", f"{i}/3")))
    assert sorted(len(shard) for shard in shards) == [2, 3, 9]


def test_without_a_shard_everything_runs(pytester: pytest.Pytester) -> None:
    assert len(_passed(_run(pytester))) == 8


@pytest.mark.parametrize("shard", ["3/3", "0", "a/b", "-1/3", "0/0"])
def test_a_shard_that_is_none_is_refused(pytester: pytest.Pytester, shard: str) -> None:
    assert _run(pytester, f"--shard={shard}").ret == pytest.ExitCode.USAGE_ERROR
