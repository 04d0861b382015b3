"""`triptych top`: its figures, its lines at two sizes, and the terminal that it takes and gives back."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.screen import Screen
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.cli.main import main
from services.cli.top import _engines, _parser, shown
from services.cli.top.figures import Histogram, Span, Stats
from services.cli.top.fleet import Fleet
from services.cli.top.screen import drawn
from services.cli.top.view import View
from services.common.peer_names import PeerNames
from services.common.server import Access, Server
from services.common.tls import ServerTls
from services.scheduler.admin import ADMIN_SERVICE, OPEN_QUESTIONS
from tests.support.certificates import SERVER, Authority
from tests.support.cluster import free_port

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "fleet.json").read_text())
"""Four looks, a second apart, at each of two schedulers under load."""

BUSY, LIGHT = RECORDED
BEYOND = 10**15


def stats(address: str, look: int, **changes: Any) -> Stats:
    message = json_format.ParseDict(RECORDED[address][look], admin_pb2.GetStatsResponse())
    message.MergeFrom(admin_pb2.GetStatsResponse(**changes))
    return Stats.read(message, float(look))


@pytest.fixture
def fleet() -> Fleet:
    """The two, and one that does not answer."""
    found = Fleet([BUSY, LIGHT, "10.0.0.9:50052"])
    for engine in found.engines[:2]:
        for look in range(4):
            engine.take(stats(engine.address, look))
    found.engines[2]._lose("UNAVAILABLE")
    return found


def lines(fleet: Fleet, width: int, height: int, chosen: int = 0, **view: Any) -> list[str]:
    return [line.plain for line in View(fleet, **view).screen(width, height, chosen)]


# -- figures


def test_a_quantile_is_interpolated_in_its_bucket() -> None:
    histogram = Histogram((0.1, 0.2, 0.4), (2, 2, 4, 2))
    # 10 durations: the median is the 5th, the first of the 4 between 0.2 and 0.4.
    assert histogram.quantile_s(0.5) == pytest.approx(0.2 + 0.2 / 4)
    assert histogram.quantile_s(0.1) == pytest.approx(0.05)
    assert (histogram.quantile_s(0.99), histogram.is_beyond(0.99)) == (0.4, True)
    assert not histogram.is_beyond(0.8)
    assert Histogram().quantile_s(0.5) is None


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 1))
def test_quantiles_stay_in_the_bucket_that_the_rank_falls_into(counts: list[int], share: float) -> None:
    bounds_s = (1.0, 2.0, 3.0)
    found = Histogram(bounds_s, tuple(counts)).quantile_s(share)
    if not sum(counts):
        assert found is None
        return
    middles = [0.5, 1.5, 2.5, 3.0]  # of each bucket; what is beyond the last is told as the last bound
    durations = [middle for middle, count in zip(middles, counts, strict=True) for _ in range(count)]
    exact = durations[max(0, -int(-share * len(durations) // 1) - 1)]  # the ceil(share * n)-th
    assert found is not None
    assert abs(found - exact) <= 0.5 + 1e-9


def test_differences_are_of_one_scheduler_alone(fleet: Fleet) -> None:
    engine = fleet.engines[0]
    assert [look is None for look in engine.looks] == [True, False, False, False]
    look = engine.last_look
    assert look is not None
    made = int(RECORDED[BUSY][3]["output_tokens"]) - int(RECORDED[BUSY][2]["output_tokens"])
    assert look.output_tokens_per_s == pytest.approx(made)  # the looks are a second apart
    engine.take(stats(BUSY, 0, engine_id="another"))
    assert engine.last_look is None and engine.window is None
    engine.take(stats(BUSY, 1, engine_id="another"))
    assert engine.last_look is not None


def test_a_scheduler_that_loads_its_model_meanwhile_is_the_same() -> None:
    (engine,) = Fleet(["a:1"]).engines
    engine.take(Stats.read(admin_pb2.GetStatsResponse(uptime_s=1), 0.0))
    engine.take(Stats.read(admin_pb2.GetStatsResponse(uptime_s=2, engine_id="x", output_tokens=5), 1.0))
    assert engine.last_look is not None and engine.last_look.output_tokens_per_s == 5


def test_the_window_is_the_last_minute() -> None:
    (engine,) = Fleet(["a:1"]).engines
    for second in range(200):
        engine.take(Stats.read(admin_pb2.GetStatsResponse(uptime_s=second), float(second)))
    assert engine.window is not None and engine.window.seconds == 60


# -- numbers


@given(st.one_of(st.integers(0, 2**64), st.floats(0, 1e30), st.floats(allow_nan=True)))
def test_numbers_fit_their_width(value: float) -> None:
    assert len(shown.number(value)) <= shown.NUMBER_WIDTH


@given(st.floats(0, 1e12), st.booleans())
def test_latencies_fit_their_width(value: float, is_beyond: bool) -> None:
    assert len(shown.seconds(value, is_beyond=is_beyond)) <= shown.SECONDS_WIDTH


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (9_999, "9999"), (10_000, "10.0k"), (123_456, "123k"), (999_600, "1.0M"), (0.123, "0.12")),
        *((9.96, "10.0"), (99.96, "100.0"), (123.4, "123"), (12_345.6, "12.3k"), (None, "-"), (float("nan"), "-")),
    ],
)
def test_numbers_read_as_people_write_them(value: float | None, text: str) -> None:
    assert shown.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0003, "0.3ms"), (0.012, "12ms"), (0.52, "0.52s"), (12.34, "12.3s"), (640, "640s"), (0.0996, "0.10s")],
)
def test_latencies_read_as_people_write_them(value: float, text: str) -> None:
    assert shown.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4, "0s"), (62, "1min 2s"), (3_600, "1h"), (3_660, "1h 1min"), (90_000, "1d 1h"), (86_401, "1d")],
)
def test_spans_have_their_two_largest_units(value: float, text: str) -> None:
    assert shown.span(value) == text


def test_sparklines_show_the_last_values_and_the_gaps() -> None:
    assert shown.sparkline([1, None, 4, 8], 6) == "  ▂ ▅█"
    assert shown.sparkline([1, 8, 8, 8], 2) == "██"
    assert shown.sparkline([0, 0], 2) == "▁▁"
    assert shown.sparkline([0, 8], 2, ascii_only=True) == "_#"


def test_a_list_ends_with_how_many_did_not_fit() -> None:
    assert shown.listed(["one 1", "two 2", "three 3"], 30) == "one 1  two 2  three 3"
    assert shown.listed(["one 1", "two 2", "three 3"], 20) == "one 1  +2 more"


def test_of_an_address_the_port_stays() -> None:
    assert shown.fitted("scheduler-0.serving.svc:50052", 20) == "scheduler-0.s~:50052"


# -- lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
@pytest.mark.parametrize("chosen", [0, 1, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_recorded_fleet_fits_the_terminal(
    fleet: Fleet, width: int, height: int, chosen: int, ascii_only: bool
) -> None:
    made = lines(fleet, width, height, chosen, ascii_only=ascii_only)
    assert len(made) <= height and max(map(len, made)) <= width
    assert not ascii_only or all(line.isascii() for line in made)
    assert "2 of 3 engines answer" in made[0]
    rows = [line.split() for line in made[2:6]]
    assert rows[0][:4] == [BUSY, "serving", "14", "10"]
    assert rows[2][:3] == ["10.0.0.9:50052", "away", "0s"]
    assert rows[3][:4] == ["all", "3", "17", "10"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_what_a_terminal_shows_is_these_lines(fleet: Fleet, width: int, height: int) -> None:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, force_terminal=True)
    made = View(fleet).screen(width, height, 0)
    console.print(Screen(drawn(made)))
    seen = [line.rstrip() for line in console.export_text().splitlines()]
    assert [line for line in seen if line] == [line.plain.rstrip() for line in made if line.plain.strip()]


def test_one_engine_is_told_in_full(fleet: Fleet) -> None:
    made = "\n".join(lines(fleet, 80, 24))
    last = RECORDED[BUSY][3]
    beat = last["heartbeat"]
    held = int(beat["total_blocks"]) - int(beat["free_blocks"])
    phases = [f"{phase} {count}" for phase, count in last["requests"].items()]
    finished = [f"{reason} {count}" for reason, count in last["finished"].items()]
    for words in [f"epoch {beat['epoch']}", f"{held} of {beat['total_blocks']} blocks", *phases, *finished]:
        assert words in made
    window = Span(stats(BUSY, 0), stats(BUSY, 3))
    for share in (0.5, 0.9, 0.99):
        assert f"p{100 * share:g} {shown.seconds(window.ttft.quantile_s(share))}" in made
        assert f"p{100 * share:g} {shown.seconds(window.itl.quantile_s(share))}" in made
    for part, share in window.step_shares.items():
        assert f"{part} {shown.percent(share)}" in made


large = st.integers(0, 2**32 - 1)
huge = st.integers(0, 2**63)


@given(huge, large, large, st.dictionaries(st.text(max_size=60), huge, max_size=12), st.text(max_size=300))
@settings(max_examples=60, deadline=None)
def test_no_number_is_cut_or_wrapped_however_large(
    count: int, running: int, waiting: int, reasons: dict[str, int], address: str
) -> None:
    found = Fleet([f"{address}:1", LIGHT])
    with contextlib.suppress(UnicodeEncodeError):
        message = admin_pb2.GetStatsResponse(
            uptime_s=float(count),
            prompt_tokens=count,
            output_tokens=count,
            preemptions=count,
            prefix_query_tokens=count,
            failed=reasons,
            finished=reasons,
            step_s={"plan": 1e9, "execute": 1e-9},
        )
        beat = message.heartbeat
        beat.running_requests, beat.waiting_requests = running, waiting
        beat.total_blocks = beat.epoch = beat.step = count
        beat.state = 2
        message.time_to_first_token.bounds_s.extend([1.0, 640.0])
        message.time_to_first_token.counts.extend([0, 0, count])
        found.engines[0].take(Stats.read(admin_pb2.GetStatsResponse(), 0.0))
        found.engines[0].take(Stats.read(message, 1.0))
        for width, height in ((80, 24), (120, 40)):
            made = lines(found, width, height)
            assert len(made) <= height
            assert all(len(line) <= width and line.isprintable() for line in made)
            row = made[2].split()
            for value in (running, waiting, float(count)):
                assert shown.number(value) in row
            for name, value in reasons.items():
                told = [line for line in made if line.startswith("failed") and name and name.isalnum() and name in line]
                assert all("+" in line or shown.number(value) in line for line in told)


def test_more_engines_than_fit_are_scrolled_and_counted() -> None:
    found = Fleet([f"10.0.0.{number}:50052" for number in range(30)])
    for engine in found.engines:
        engine.take(stats(LIGHT, 3))
    for chosen in (0, 15, 29):
        made = lines(found, 80, 24, chosen)
        assert len(made) == 24
        assert any(line.startswith(f"10.0.0.{chosen}:50052 ") for line in made[2:9])
        assert any("all 30, 23 not shown" in line for line in made)
        assert made[11].startswith(f"10.0.0.{chosen}:50052  serving")


def test_a_terminal_that_is_too_small_is_told_so(fleet: Fleet) -> None:
    assert lines(fleet, 79, 24) == ["79x24 is too small: 80x24 is needed"]
    assert lines(fleet, 10, 5) == ["10x5 is to"]


# -- engines that answer, go and return


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Tells recorded looks, one after the other."""

    def __init__(self) -> None:
        self.asked = 0

    async def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:
        look = min(self.asked, 3)
        self.asked += 1
        return json_format.ParseDict(RECORDED[BUSY][look], admin_pb2.GetStatsResponse())


@contextlib.asynccontextmanager
async def scheduler(port: int, access: Access | None = None) -> AsyncIterator[Admin]:
    server, admin = Server("127.0.0.1", port, access=access), Admin()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server.grpc)
    await server.start([])
    try:
        yield admin
    finally:
        await server.stop()


@contextlib.contextmanager
def scheduler_in_thread(port: int, access: Access | None = None) -> Iterator[Admin]:
    """For tests that wait for a process."""
    loop, found = asyncio.new_event_loop(), []
    ready, end = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with scheduler(port, access) as admin:
            found.append(admin)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


async def test_an_engine_that_goes_away_and_returns_is_shown_so() -> None:
    port = free_port()
    fleet = Fleet([f"127.0.0.1:{port}"])
    try:
        await fleet.look()
        assert "away" in lines(fleet, 80, 24)[2] and "UNAVAILABLE" in lines(fleet, 80, 24)[2]
        async with scheduler(port):
            async with asyncio.timeout(20):
                while fleet.engines[0].now is None:
                    await fleet.look()
            await fleet.look()
            assert "serving" in lines(fleet, 80, 24)[2]
        await fleet.look()
        assert "away" in lines(fleet, 80, 24)[2]
        async with scheduler(port):
            async with asyncio.timeout(20):
                while fleet.engines[0].now is None:
                    await fleet.look()
            assert fleet.engines[0].last_look is None  # no rate over the gap
            await fleet.look()
            assert fleet.engines[0].last_look is not None
    finally:
        await fleet.close()


async def test_what_is_no_scheduler_is_told() -> None:
    server, port = grpc.aio.server(), free_port()
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    fleet = Fleet([f"127.0.0.1:{port}"])
    await fleet.look()
    assert fleet.engines[0].trouble == "UNIMPLEMENTED"
    await fleet.close()
    await server.stop(0)


# -- the command


def top(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_once_prints_every_engine_and_its_exit_code_says_whether_all_answer() -> None:
    port, away = free_port(), free_port()
    with scheduler_in_thread(port):
        ended = top("--once", "--interval-s", "0.1", f"127.0.0.1:{port}")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "serving" in ended.stdout and "since the start" in ended.stdout and "\x1b" not in ended.stdout
        assert max(map(len, ended.stdout.splitlines())) <= 80
        ended = top("--once", "--interval-s", "0.1", f"127.0.0.1:{port}", f"127.0.0.1:{away}")
        assert ended.returncode == 1 and "1 of 2 engines answer" in ended.stdout


def test_json_is_an_object_a_look() -> None:
    port = free_port()
    with scheduler_in_thread(port) as admin:
        ended = top("--once", "--json", "--interval-s", "0.1", f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}")
        assert admin.asked == 2
    told = json.loads(ended.stdout)
    busy, away = told["engines"]
    second = RECORDED[BUSY][1]
    assert busy["running_requests"] == second["heartbeat"]["running_requests"]
    assert busy["requests"] == second["requests"] and busy["output_tokens_per_s"] > 0
    assert busy["ttft_s"]["count"] == sum(map(int, second["time_to_first_token"]["counts"]))
    assert 0 < busy["ttft_s"]["p50"] <= busy["ttft_s"]["p90"] <= busy["ttft_s"]["p99"]
    assert away == {"address": away["address"], "state": "away", "error": "UNAVAILABLE"}
    assert ended.returncode == 1


def test_engines_with_mutual_tls_are_shown_to_a_certificate(tmp_path: Path) -> None:
    authority, port = Authority(tmp_path), free_port()
    server, mine = authority.issue("server", SERVER), authority.issue("mine", "spiffe://test/operator")
    names = PeerNames(["spiffe://test/frontend", "spiffe://test/operator"], (), ADMIN_SERVICE, OPEN_QUESTIONS)
    access = Access(ServerTls(server.cert, server.key, authority.ca), admit=names.admit)
    own = ["--tls-cert", str(mine.cert), "--tls-key", str(mine.key)]
    right = ["--tls-ca", str(authority.ca), *own, "--tls-server-name", SERVER]
    file = tmp_path / "triptych.yaml"
    dials = {"peer_ca": str(authority.ca), "peer_cert": str(mine.cert), "peer_key": str(mine.key)}
    frontend = {"engine": f"127.0.0.1:{port}", "peer_server_name": SERVER, **dials}
    file.write_text(json.dumps({"frontend": frontend}))
    look = ("--once", "--json", "--interval-s", "0.1")
    with scheduler_in_thread(port, access):
        by_flags = top(*look, f"127.0.0.1:{port}", *right)
        by_file = top(*look, "--config", str(file))
        plain = top(*look, f"127.0.0.1:{port}")
        unnamed = top(*look, f"127.0.0.1:{port}", "--tls-ca", str(authority.ca), *own)
    for ended in (by_flags, by_file):
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["engines"][0]["state"] == "serving"
    for ended in (plain, unnamed):
        assert ended.returncode == 1
        assert json.loads(ended.stdout)["engines"][0]["error"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "x"], "--tls-cert is given without --tls-ca"),
        (["--tls-ca", "/nowhere.pem"], "--tls-ca: cannot read /nowhere.pem: No such file"),
        (["--tls-ca", "x", "--tls-key", "x"], "--tls-cert and --tls-key go together"),
    ],
)
def test_flags_of_tls_that_cannot_be_used_are_told(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", *flags]) == main(["log-level", "info", *flags]) == 1
    assert capsys.readouterr().err.count(message) == 2


def test_json_without_once_goes_on_until_it_is_interrupted() -> None:
    port = free_port()
    with scheduler_in_thread(port):
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "top", "--json", "--interval-s", "0.1", f"127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert all(look["engines"][0]["state"] == "serving" for look in looks)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_without_a_terminal_it_names_the_ways_that_need_none() -> None:
    ended = top(stdin=subprocess.DEVNULL)
    assert ended.returncode == 1
    assert ended.stderr == (
        "triptych: error: triptych top needs a terminal for input and output; without one give --once or --json\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "'nowhere' is no HOST:PORT, such as 127.0.0.1:50052"),
        (["--interval-s", "0"], "'0' is no number of seconds from 0.1 to 60"),
        (["--interval-s", "nan"], "'nan' is no number of seconds"),
    ],
)
def test_wrong_flags_are_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def targets(*arguments: str) -> list[str]:
    return [peer.target for peer in _engines(_parser().parse_args(arguments))]


def test_all_engines_are_found_in_a_frontends_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text("frontend:\n  engine: 10.1.2.3:7\n")
    assert targets("--config", str(file)) == ["10.1.2.3:7"]
    file.write_text("frontend:\n  engine: 10.1.2.3:7\n  more_engines: [10.1.2.4:7, 10.1.2.5:7]\n")
    assert targets("--config", str(file)) == ["10.1.2.3:7", "10.1.2.4:7", "10.1.2.5:7"]
    assert targets("a:1", "b:2", "a:1") == ["a:1", "b:2"]
    assert main(["top", "--once", "--config", str(file), "a:1"]) == 1
    assert "give one of them" in capsys.readouterr().err


class Terminal:
    """A pseudoterminal with `triptych top` in it."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24) -> None:
        self.ours, self._theirs = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "top", "--interval-s", "0.2", *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        self.seen = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until(self, words: str, timeout_s: float = 40.0) -> None:
        """Reads until these come; what was seen before is forgotten."""
        end_s = time.monotonic() + timeout_s
        os.set_blocking(self.ours, False)
        self.seen = ""
        while words not in self.seen:
            assert time.monotonic() < end_s and self.process.poll() is None, self.seen[-3000:]
            with contextlib.suppress(BlockingIOError):
                self.seen += os.read(self.ours, 1 << 16).decode(errors="replace")
            time.sleep(0.02)

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def ended(self) -> int:
        """Its exit code, once the terminal is as it was."""
        code = self.process.wait(30)
        with contextlib.suppress(BlockingIOError):
            self.seen += os.read(self.ours, 1 << 20).decode(errors="replace")
        assert termios.tcgetattr(self._theirs) == self.before
        assert self.seen.rindex("\x1b[?1049l") > self.seen.rfind("\x1b[?1049h")  # the other screen is left
        assert self.seen.rindex("\x1b[?25h") > self.seen.rfind("\x1b[?25l")  # the cursor is shown
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Any]:
    opened: list[Terminal] = []

    def make(*arguments: str, **size: int) -> Terminal:
        opened.append(Terminal(*arguments, **size))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_keys_choose_an_engine_and_q_gives_the_terminal_back(terminal: Any) -> None:
    port, away = free_port(), free_port()
    with scheduler_in_thread(port):
        screen = terminal(f"127.0.0.1:{port}", f"127.0.0.1:{away}")
        screen.until("latencies and shares of steps are")
        screen.press("j")
        screen.until("it does not answer")
        screen.press("\x1b[A")
        screen.until("preemptions")
        screen.resize(60, 20)
        os.kill(screen.process.pid, signal.SIGWINCH)
        screen.until("60x20 is too small")
        screen.press("q")
        assert screen.ended() == 0
    assert not re.search("Traceback|Error", screen.seen)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_terminal_back(terminal: Any, number: signal.Signals) -> None:
    screen = terminal(f"127.0.0.1:{free_port()}")
    screen.until("it does not answer")
    os.kill(screen.process.pid, number)
    assert screen.ended() == 0
    assert not re.search("Traceback|Error", screen.seen)
