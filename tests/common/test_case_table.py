"""The case table: a served row without a test, or whose tests were all skipped, fails the run."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    from tests.support import case_table

    monkeypatch.setattr(case_table, "ROWS", {"T1": "", "T2": "", "T3": "", "T4": "", "T5": ""})
    monkeypatch.setattr(case_table, "LATER", frozenset({"T5"}))

    def run(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        pytester.makeini("[pytest]\nmarkers = slow")
        return pytester.runpytest_inprocess(
            "-p", "tests.support.case_table", "--case-table", "-m", "not slow", *arguments
        )

    return run


COMPLETE = """
import pytest
def test_T1_a(): pass
def test_T1_b(): pass
@pytest.mark.slow
def test_T2_a(): pass
def test_T3_a(): pass
def test_T4_a(): pass
"""


def test_every_row_is_printed_under_its_state(run):
    result = run(COMPLETE)
    result.stdout.fnmatch_lines(["passed   T1 T3 T4", "slow     T2", "later    T5"])
    assert result.ret == pytest.ExitCode.OK


def test_processes_that_share_the_tests_print_one_table(run):
    result = run(COMPLETE, "-n", "2", "--dist", "loadfile")
    result.stdout.fnmatch_lines(["passed   T1 T3 T4", "slow     T2", "later    T5"])
    assert result.ret == pytest.ExitCode.OK
    result = run(COMPLETE.replace("test_T2", "test_other"), "-n", "2")
    result.stdout.fnmatch_lines(["missing  T2"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_row_without_a_test_fails_the_run(run):
    result = run(COMPLETE.replace("test_T4", "test_other"))
    result.stdout.fnmatch_lines(["missing  T4"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_row_whose_tests_were_skipped_is_missing(run):
    result = run(COMPLETE.replace("def test_T4", "@pytest.mark.skip\ndef test_T4"))
    result.stdout.fnmatch_lines(["missing  T4"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_test_named_after_no_row_is_refused(run):
    assert run("def test_Q9_a(): pass").ret == pytest.ExitCode.USAGE_ERROR
