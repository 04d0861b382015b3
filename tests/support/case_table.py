"""A pytest plugin that prints the case table: each row's id as passed, failed, slow, later or missing.

A test belongs to row T6 when its name starts with `test_T6_`. With --case-table a served row without a test fails the
run; without it (a run of a few files) the table is not printed. Where processes share the tests out (pytest-xdist),
reports reach the first one by themselves; which tests were deselected is told at each process's end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.cases.rows import LATER, ROWS

_SLOW_ROWS = "case-table-slow-rows"
_NAME = re.compile(r"test_([A-Z]\d+)_")


class CaseTable:
    """Collects the outcomes of the tests of each row."""

    def __init__(self) -> None:
        self.outcomes: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        unknown = {row for item in items if (row := row_of(item.name)) and row not in ROWS}
        if unknown:
            raise pytest.UsageError(f"tests are named after rows that tests/cases/rows.py does not have: {unknown}")

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            if (row := row_of(item.name)) and item.get_closest_marker("slow"):
                self.outcomes[row].add("slow")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = row_of(report.nodeid.rsplit("::", 1)[-1])
        if row and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[row].add(report.outcome)

    def state(self, row: str) -> str:
        """A skipped test proves nothing, so a row of which nothing else ran is missing."""
        seen = self.outcomes.get(row, set())
        for outcome in ("failed", "passed", "slow"):
            if outcome in seen:
                return outcome
        return "later" if row in LATER else "missing"

    def states(self) -> dict[str, list[str]]:
        """Row ids by state."""
        by_state: dict[str, list[str]] = defaultdict(list)
        for row in ROWS:
            by_state[self.state(row)].append(row)
        return by_state

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for row in getattr(node, "workeroutput", {}).get(_SLOW_ROWS, ()):
            self.outcomes[row].add("slow")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (told := getattr(session.config, "workeroutput", None)) is not None:
            told[_SLOW_ROWS] = sorted(row for row, seen in self.outcomes.items() if "slow" in seen)
            return
        if "missing" in self.states() and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("case table")
        by_state = self.states()
        for state in ("passed", "failed", "slow", "later", "missing"):
            if by_state[state]:
                terminalreporter.write_line(
                    f"{state:8} {' '.join(by_state[state])}", red=state in ("failed", "missing")
                )


def row_of(name: str) -> str | None:
    """The row a test name belongs to, if any."""
    match = _NAME.match(name)
    return match[1] if match else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case-table", action="store_true", help="print the case table; a row without its test fails")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--case-table"):
        config.pluginmanager.register(CaseTable(), "case-table-rows")
