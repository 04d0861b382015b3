"""What the frontend takes as a grammar: verdicts of a real worker process, its budgets, and who waits for whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from services.common.errors import RequestError
from services.common.grammar import Choices, Grammar, JsonSchema, Regex
from services.frontend import grammar_check
from services.frontend.grammar_check import Budget, GrammarCheck
from tests.support.checkpoints import EOS_ID

BUDGET = Budget(grammar_bytes=65536, compile_s=60.0, compile_bytes=256 << 20)
SLOW = Regex("a{1000000}")
"""A second of compiling."""
LARGE = Regex("(a{1000}){1000}")
"""More than 100 MB."""


@pytest.fixture
async def check(text_model: Path) -> AsyncIterator[GrammarCheck]:
    made = GrammarCheck(text_model, [EOS_ID], BUDGET)
    yield made
    await made.close()


def worker(check: GrammarCheck) -> int | None:
    """The worker's process id."""
    return None if check._worker._process is None else check._worker._process.pid


async def refusal(check: GrammarCheck, rule: Regex | JsonSchema | Choices) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await check.check(Grammar(rule))
    return caught.value


async def test_a_verdict_is_made_once_and_names_the_field(check: GrammarCheck) -> None:
    assert worker(check) is None  # until there is a grammar
    await check.check(Grammar(Choices(("a", "b"))))
    first = worker(check)
    for _ in range(2):
        error = await refusal(check, Regex("("))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "GRAMMAR")
        assert [violation.field for violation in error.violations] == ["options.grammar.regex"]
        assert "unclosed group" in error.message
    assert worker(check) == first and first is not None
    psutil.Process(first).kill()
    await refusal(check, Regex("("))  # known
    await check.check(Grammar(Choices(("a", "b")), forced_tokens=True))


async def test_a_grammar_over_its_time_is_refused_for_a_while_and_the_next_one_is_not(text_model: Path) -> None:
    """Whatever the worker does, here nothing at all: its time is up, and it is killed."""
    check = GrammarCheck(text_model, [EOS_ID], replace(BUDGET, compile_s=2.0))
    late = Choices(("late",))
    try:
        await check.check(Grammar(Choices(("a",))))
        pid = worker(check)
        psutil.Process(pid).suspend()
        error = await refusal(check, late)
        assert "options.grammar.choices: takes more than 2 s to compile (grammar_compile_s)" in error.message
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert worker(check) is None and not psutil.pid_exists(pid or 0)
        await check.check(Grammar(Choices(("b",))))
        assert (await refusal(check, late)).message == error.message  # known
        known = check._verdicts[Grammar(late).digest]
        check._verdicts[Grammar(late).digest] = replace(known, until_s=time.monotonic())
        await check.check(Grammar(late))
    finally:
        await check.close()


async def test_a_grammar_over_its_memory_is_refused_and_the_next_one_is_not(text_model: Path) -> None:
    check = GrammarCheck(text_model, [EOS_ID], replace(BUDGET, compile_bytes=32 << 20))
    try:
        await check.check(Grammar(Choices(("a",))))
        error = await refusal(check, LARGE)
        assert "takes more than 32 MiB to compile (grammar_compile_bytes)" in error.message
        await check.check(Grammar(Choices(("b",))))
    finally:
        await check.close()


async def test_who_asks_for_the_same_waits_for_one_compilation_and_may_leave_it(check: GrammarCheck) -> None:
    tasks = [asyncio.create_task(check.check(Grammar(Regex("[ab]{20}c")))) for _ in range(5)]
    await asyncio.sleep(0)
    assert len(check._pending) == 1
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [None] * 4
    assert tasks[0].cancelled() and not check._pending


async def test_the_event_loop_turns_while_a_grammar_is_compiled(check: GrammarCheck) -> None:
    await check.check(Grammar(Choices(("a",))))
    task = asyncio.create_task(refusal(check, SLOW))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    await task
    assert turns > 50


async def test_too_many_that_wait_and_too_long_ones_are_refused_at_once(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = await refusal(check, Choices(tuple("x" * 1000 for _ in range(66))))
    assert "has 66000 bytes of text, at most 65536 are taken (max_grammar_bytes)" in error.message
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 2)
    waiting = [asyncio.create_task(check.check(Grammar(Choices((word,))))) for word in ("a", "b")]
    await asyncio.sleep(0)
    error = await refusal(check, Choices(("c",)))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "GRAMMAR_QUEUE_FULL")
    assert error.retry_after_s
    await asyncio.gather(*waiting)


async def test_a_verdict_that_nobody_asks_for_is_forgotten(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "KEPT_VERDICTS", 2)
    for word in "abca":
        await check.check(Grammar(Choices((word,))))
    assert len(check._verdicts) == 2


async def test_without_a_tokenizer_that_can_be_read_the_refusal_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    check = GrammarCheck(tmp_path, [], BUDGET)
    error = await refusal(check, Regex("a"))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION and "cannot read" in error.message
    await check.close()


async def test_the_worker_ends_with_its_frontend(text_model: Path) -> None:
    check = GrammarCheck(text_model, [EOS_ID], BUDGET)
    await check.check(Grammar(Choices(("a",))))
    process = psutil.Process(worker(check))
    waiting = asyncio.create_task(check.check(Grammar(SLOW)))
    await asyncio.sleep(0.05)
    await check.close()
    assert not process.is_running()
    assert waiting.cancelled() or isinstance(
        (await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError
    )
