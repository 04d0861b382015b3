"""Lines of the log: what is in them, that nobody can forge one, and that a slow reader of them holds nothing up."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.common import audit
from services.common.logs import formats
from services.common.logs.delivery import Deliverer, Writer
from services.common.logs.formats import CONTINUED, JsonFormatter, TextFormatter
from services.common.logs.logger_levels import Levels

HOSTILE = "\n2026-12-01 02:13:00,123 E frontend x: forged\r\x1b[2K\u2028\u2029\x85\u202e\u2066\ud800\x00\x9b"

MAX_LINE_CHARS = 12 * (formats.MESSAGE_CHARS + 4 * formats.FIELD_CHARS) + 1024
"""An escape takes at most 12 characters; the hostile records below have up to 4 texts in their fields."""


def record(message: str, *arguments: object, error: BaseException | None = None, **fields: object) -> Any:
    made = logging.LogRecord("services.x", logging.INFO, __file__, 1, message, arguments, None)
    made.fields = fields
    if error is not None:
        made.exc_info = (type(error), error, error.__traceback__)
    return made


def text(made: logging.LogRecord) -> str:
    return TextFormatter("frontend").format(made)


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("frontend").format(made)
    assert line.isascii() and line.isprintable()
    return dict(json.loads(line))


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def is_harmless(line: str) -> bool:
    """No character moves the cursor, ends a line, turns the direction of writing, or is invisible."""
    return all(unicodedata.category(character)[0] not in "C" for character in line) and len(line.splitlines()) == 1


def paired(string: str) -> str:
    """As JSON gives it back: two surrogates side by side that make a pair are the one character they encode."""
    return string.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


clients = st.one_of(
    st.text(),
    st.text(alphabet=st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Co"])),
    st.just(HOSTILE),
    st.just("\u202ex\n" * 300_000),
)


@given(clients, clients)
@settings(max_examples=300, deadline=None)
def test_a_client_string_cannot_forge_or_flood_a_line_of_text(one: str, other: str) -> None:
    line = text(record("refused %s", one, label=one, model=other, reasons={one: 1}))
    assert is_harmless(line)
    assert len(line) <= MAX_LINE_CHARS


@given(clients, clients)
@example("\ud800\udc00", "")
@settings(max_examples=300, deadline=None)
def test_a_client_string_cannot_forge_or_flood_a_line_of_json(one: str, other: str) -> None:
    line = JsonFormatter("frontend").format(record("refused %s", one, label=one, model=other, reasons={one: 1}))
    assert is_harmless(line) and line.isascii()
    assert len(line) <= MAX_LINE_CHARS
    told = json.loads(line)
    assert told["level"] == "info"
    if len(one) < formats.FIELD_CHARS:
        assert (told["label"], told["reasons"]) == (paired(one), {paired(one): 1})


@given(clients)
@settings(max_examples=100, deadline=None)
def test_the_words_of_an_exception_begin_no_record(words: str) -> None:
    first, *rest = text(record("failed", error=raised(words))).split("\n")
    assert first.endswith("services.x: failed")
    assert rest and all(line.startswith(CONTINUED) and is_harmless(line) for line in rest)
    assert sum(map(len, rest)) < 20 * formats.STACK_CHARS
    told = as_json(record("failed", error=raised(words)))["exception"]
    assert told["type"] == "ValueError"
    assert len(told["message"]) <= formats.FIELD_CHARS and len(told["stacktrace"]) <= 2 * formats.STACK_CHARS


@given(clients, clients)
@settings(max_examples=100, deadline=None)
def test_a_field_of_text_cannot_pass_for_another_field(label: str, model: str) -> None:
    """Read as the documentation says: a value is plain, or a JSON string."""
    line = text(record("m", label=label, model=model, status="OK"))
    rest, seen = line.split(": m ", 1)[1], {}
    while rest:
        name, rest = rest.split("=", 1)
        if rest.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(rest)
        else:
            value, end = rest.split(" ", 1)[0], len(rest.split(" ", 1)[0])
        seen[name], rest = value, rest[end:].lstrip(" ")
    assert list(seen) == ["label", "model", "status"]
    assert seen["status"] == "OK"


def test_json_has_the_documented_keys() -> None:
    made = record("took %d", 3, request_id="ab", duration_s=0.1234567, status=None, finish_reasons={"stop": 2})
    made.created = datetime(2026, 12, 1, 2, 13, 0, 123456, UTC).timestamp()
    assert as_json(made) == {
        "time": "2026-12-01T02:13:00.123456Z",
        "level": "info",
        "service": "frontend",
        "pid": os.getpid(),
        "logger": "services.x",
        "message": "took 3",
        "request_id": "ab",
        "duration_s": 0.123457,
        "status": None,
        "finish_reasons": {"stop": 2},
    }


def test_fields_do_not_replace_the_keys_of_every_record() -> None:
    told = as_json(record("m", level="error", logger="forged"))
    assert (told["level"], told["logger"]) == ("info", "services.x")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_null(number: float) -> None:
    assert as_json(record("m", ttft_s=number))["ttft_s"] is None


def test_text_shows_fields_after_the_message() -> None:
    line = text(record("done", label="a b", model="m", duration_s=0.5, finish_reasons={"stop": 2, "length": 1}))
    assert line.endswith('services.x: done label="a b" model=m duration_s=0.5 finish_reasons=stop:2,length:1')


def test_a_record_whose_arguments_do_not_fit_is_told_all_the_same() -> None:
    assert "has other arguments than it needs" in as_json(record("%d%d", 1))["message"]


def test_an_exception_without_words_is_told_all_the_same() -> None:
    class WordlessError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert as_json(record("failed", error=WordlessError()))["exception"]["message"] == "an exception without words"


# -- delivery


def test_a_reader_that_stands_still_costs_records_and_no_time_and_is_told_how_many() -> None:
    read_end, write_end = os.pipe()
    writer = Writer(write_end, max_pending_bytes=100_000)
    handler = Deliverer(writer, TextFormatter("frontend"))
    begun_s = time.monotonic()
    for number in range(5_000):
        handler.emit(record("%d %s", number, "x" * 200))
    assert time.monotonic() - begun_s < 60  # it would wait for ever
    assert handler.dropped > 3_000
    assert not writer.flush(0.01)
    data = b""
    while not writer.flush(0.0):
        if select.select([read_end], [], [], 0.01)[0]:  # what is read may be the last, and not yet counted as written
            data += os.read(read_end, 1 << 16)
    os.set_blocking(read_end, False)
    while True:
        try:
            data += os.read(read_end, 1 << 16)
        except BlockingIOError:
            break
    *lines, last = data.decode().splitlines()
    numbers = [int(line.split(": ")[1].split(" ")[0]) for line in lines if "dropped" not in line]
    assert numbers == list(range(len(numbers)))
    told = [line for line in [*lines, last] if "records were dropped: standard error is not read in time" in line]
    assert sum(int(line.split(": ")[1].split(" ")[0]) for line in told) == handler.dropped == 5_000 - len(numbers)
    handler.close()


def test_what_is_logged_when_nobody_reads_any_more_is_counted() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    writer = Writer(write_end)
    writer.write("a line")
    assert writer.flush(5.0)
    assert writer.dropped == 1
    writer.close()
    writer.write("too late")
    assert writer.dropped == 2


def test_a_pipe_that_does_not_block_is_waited_for_by_the_writer_alone() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    writer = Writer(write_end)
    for _ in range(100):
        writer.write("x" * 4095)
    data = b""
    while len(data) < 100 * 4096:
        data += os.read(read_end, 1 << 16)
    assert writer.flush(5.0) and writer.dropped == 0
    writer.close()


def run(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import logging, os, sys\nfrom services.common import logs\n" + code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])},
        check=False,
        **options,
    )


def test_the_last_lines_are_written_as_a_process_ends_in_their_order() -> None:
    ended = run("logs.setup('s', 'info')\nfor i in range(2000): logging.info('line %d', i)\nlogs.fatal('why')\n")
    lines = ended.stderr.splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines[:-1]] == [str(i) for i in range(2000)]
    assert lines[-1] == "triptych: error: why"


@pytest.mark.parametrize("name", ["uncaught", "thread", "warning", "fatal"])
def test_with_json_every_line_is_json_also_what_nobody_caught(name: str) -> None:
    code = {
        "uncaught": "raise ValueError('a\\nb')",
        "thread": "import threading; t = threading.Thread(target=lambda: 1 / 0, name='T'); t.start(); t.join()",
        "warning": "import warnings; warnings.warn('old\\nthing')",
        "fatal": "logs.fatal('no port')",
    }[name]
    ended = run(f"logs.setup('s', 'info', 'json')\nlogging.info('begun')\n{code}\n")
    told = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["message"] for line in told[:-1]] == ["begun"]
    expected = {
        "uncaught": ("critical", "this process ends: nobody caught an exception"),
        "thread": ("critical", "thread T ends: nobody caught an exception"),
        "fatal": ("critical", "no port"),
    }
    if name == "warning":
        assert told[1]["level"] == "warning" and "old\nthing" in told[1]["message"]
    else:
        assert (told[1]["level"], told[1]["message"]) == expected[name]
    if name == "uncaught":
        assert (ended.returncode, told[1]["exception"]["message"]) == (1, "a\nb")


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    read_end, write_end = os.pipe()
    code = "import logging\nfrom services.common import logs\nlogs.setup('s', 'info')\n"
    code += "for i in range(1000): logging.info('x' * 1000)\n"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=write_end)
    os.close(write_end)
    assert process.wait(60) == 0
    os.close(read_end)


# -- levels


@pytest.fixture
def levels() -> Any:
    before = logging.root.level, logging.getLogger("grpc").level
    for name in ("zq.a", "zq.a.b"):
        logging.getLogger(name)
    yield Levels("info")
    logging.root.setLevel(before[0])
    logging.getLogger("grpc").setLevel(before[1])
    for name in ("zq", "zq.a", "zq.a.b"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def effective(name: str) -> str:
    return logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower()


def test_a_level_is_set_for_a_prefix_and_taken_back(levels: Levels) -> None:
    levels.set("debug", "zq.a")
    assert [effective(name) for name in ("zq", "zq.a", "zq.a.b")] == ["info", "debug", "debug"]
    levels.set("error", "zq.a.b")
    levels.set("warning")
    assert [effective(name) for name in ("zq", "zq.a", "zq.a.b")] == ["warning", "debug", "error"]
    for name in ("", "zq.a", "zq.a.b"):
        levels.set("", name)
    assert [effective(name) for name in ("zq", "zq.a", "zq.a.b")] == ["info"] * 3


def test_records_of_grpc_stay_out_of_debug_unless_they_are_asked_for(levels: Levels) -> None:
    logging.getLogger("grpc")
    levels.set("debug")
    assert (effective("zq"), effective("grpc")) == ("debug", "info")
    levels.set("error")
    assert effective("grpc") == "error"
    levels.set("debug", "grpc")
    assert effective("grpc") == "debug"
    levels.set("", "grpc")
    assert effective("grpc") == "error"


def test_a_level_with_a_duration_ends_and_one_that_is_set_anew_begins_anew(
    levels: Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[FakeTimer] = []

    class FakeTimer:
        def __init__(self, after_s: float, end: Any) -> None:
            self.after_s, self.end, self.is_cancelled = after_s, end, False
            timers.append(self)

        def start(self) -> None: ...

        def cancel(self) -> None:
            self.is_cancelled = True

    monkeypatch.setattr("services.common.logs.logger_levels.threading.Timer", FakeTimer)
    levels.set("debug", "zq.a", 60)
    levels.set("error", "zq.a", 120)
    assert [(timer.after_s, timer.is_cancelled) for timer in timers] == [(60, True), (120, False)]
    timers[0].end()  # it was under way already
    assert effective("zq.a") == "error"
    timers[1].end()
    assert effective("zq.a") == "info"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("loud",), "level is 'loud'; it is one of debug, info, warning, error, or empty"),
        (("DEBUG",), "level is 'DEBUG'"),
        (("debug", "no.such"), "logger is 'no.such', and this process has none"),
        (("error", "services.common.audit"), "whose lines are always told"),
        (("debug", "", 0.5), r"duration_s is 0.5; it must be in \[1, 604800\]"),
        (("debug", "", float("nan")), "duration_s is nan"),
        (("", "", 5), "duration_s is set without a level"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(levels: Levels, arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        levels.set(*arguments)
    assert effective(audit.__name__) == "info"
    assert effective("zq.a") == "info"


def test_without_a_set_up_nothing_is_written_and_nothing_fails() -> None:
    ended = run("logs.flush(); print(logs.dropped()); logs.levels().set('debug'); print(logging.root.level)")
    assert (ended.stdout.split(), ended.stderr) == (["0", "10"], "")
