"""`triptych up`: its plan, and three real processes under one supervisor that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from services.cli import up, up_plan
from services.cli.main import main
from services.cli.parts import config_type
from services.cli.processes import Command, Processes, ending
from services.common.config import resolve
from services.common.errors import StartError
from tests.support.checkpoints import tiny_llama
from triptych_client import Client

PATIENCE_S = 100


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")


def _flag(plan: up_plan.Plan, service: str, flag: str) -> str:
    """Its last value, which is the one that holds."""
    arguments = plan.commands[service].arguments
    return [value for name, value in itertools.pairwise(arguments) if name == flag][-1]


def test_the_plan_ties_the_three_together_on_ports_of_their_own() -> None:
    plan = up_plan.read(["--port", "0", "--model", "/m"])
    ports = {name: address.rpartition(":")[2] for name, address in plan.addresses.items()}
    assert len(set(ports.values())) == 3
    assert _flag(plan, "frontend", "--engine") == plan.addresses["scheduler"]
    assert _flag(plan, "scheduler", "--executor") == plan.addresses["executor"]
    assert {_flag(plan, name, "--port") for name in plan.commands} == set(ports.values())
    assert {_flag(plan, name, "--model") for name in plan.commands} == {"/m"}


def test_dotted_flags_reach_their_service_and_no_other() -> None:
    plan = up_plan.read(["--port=0", "--scheduler.block-size", "32", "--executor.threads=2", "--frontend.drain-s", "7"])
    assert _flag(plan, "scheduler", "--block-size") == "32"
    assert "--threads=2" in plan.commands["executor"].arguments
    assert "--block-size" not in plan.commands["executor"].arguments
    assert plan.commands["frontend"].stop_s == 7 + up_plan.STOP_MARGIN_S


def test_ranks_are_told_to_scheduler_and_executor_at_once() -> None:
    plan = up_plan.read(["--port=0", "--tp", "2"])
    assert {name: one.model_dump().get("tp_size") for name, one in plan.configs.items()} == {
        "frontend": None,
        "scheduler": 2,
        "executor": 2,
    }


def test_all_three_are_told_the_revision_and_to_stay_offline() -> None:
    plan = up_plan.read(["--port=0", "--model", "org/tiny", "--revision", "v1", "--offline"])
    assert {(one.model, one.revision, one.offline) for one in plan.configs.values()} == {("org/tiny", "v1", True)}


def test_services_are_pinned_to_the_commit_that_was_found_and_ask_no_hub(tiny: Path, tmp_path: Path) -> None:
    commit = "0123456789" * 4
    path = tmp_path / "models--org--tiny" / "snapshots" / commit
    plan = up_plan.read(["--port=0", "--model", "org/tiny", "--revision", "v1", "--frontend.model", str(tiny)])
    pinned = up_plan.pinned(plan, {"frontend": tiny, "scheduler": path, "executor": path})
    for name in ("scheduler", "executor"):
        config = resolve(config_type(name), pinned.commands[name].arguments).config
        assert (config.model, config.revision, config.offline) == ("org/tiny", commit, True)
    assert pinned.commands["frontend"] == plan.commands["frontend"]  # a folder has no commit
    assert pinned.served_name == tiny.name
    assert up_plan.pinned(plan, dict.fromkeys(plan.commands, path)).served_name == "org/tiny"


def test_an_internal_port_that_was_chosen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = str(probe.getsockname()[1])
    assert up_plan.read(["--port=0", "--scheduler.port", free]).addresses["scheduler"] == f"127.0.0.1:{free}"
    monkeypatch.setenv("TRIPTYCH_EXECUTOR__PORT", free)
    assert up_plan.read(["--port=0"]).addresses["executor"] == f"127.0.0.1:{free}"


def test_a_listener_on_every_address_is_dialled_on_loopback() -> None:
    plan = up_plan.read(["--port=0", "--host", "0.0.0.0"])
    assert plan.addresses["frontend"].startswith("127.0.0.1:")
    assert _flag(plan, "frontend", "--host") == "0.0.0.0"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gateway.port", "1"], "no service 'gateway'"),
        (["--scheduler.block-size", "0"], "scheduler: block_size"),
        (["--scheduler.executor", "h:1"], r"scheduler\.executor \(from flag\)"),
        (["--frontend.engine=h:1"], r"frontend\.engine \(from flag\)"),
        (["--config", "/no/such.yaml"], "cannot read /no/such.yaml"),
    ],
)
def test_what_cannot_be_started_is_told_before_anything_is(argv: list[str], says: str) -> None:
    with pytest.raises(StartError, match=says):
        up_plan.read(argv)


@pytest.mark.parametrize(
    ("argv", "says"), [(["--prot", "1"], "--prot"), (["--scheduler.block", "1"], "--block"), (["stray"], "stray")]
)
def test_an_unknown_flag_is_a_usage_error(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        up_plan.read(argv)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {says}" in capsys.readouterr().err


def test_print_config_prints_a_file_that_up_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        up_plan.read(["--port", "0", "--scheduler.block-size", "32", "--print-config"])
    shown = capsys.readouterr().out
    assert "block_size: 32  # flag" in shown
    file = tmp_path / "config.yaml"
    file.write_text(shown)
    assert yaml.safe_load(shown)["scheduler"]["block_size"] == 32
    with pytest.raises(SystemExit):
        up_plan.read(["--config", str(file), "--print-config"])
    assert "block_size: 32  # file" in capsys.readouterr().out


def test_a_port_in_use_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["up", "--port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"triptych: error: the frontend cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another with --port\n"
    )


def test_a_model_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "0", "--model", "/no/such"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("triptych: error: no model at '/no/such'")
    assert error.count("\n") == 1


def test_the_embedded_model_is_fetched_first_and_a_failure_of_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    assert main(["up", "--port", "0"]) == 1
    *reason, last = capfd.readouterr().err.splitlines()
    assert any(line.startswith("triptych: error: ") and str(tmp_path) in line for line in reason)
    assert last == "triptych: error: SmolLM2-135M-Instruct could not be fetched; the reason is above"


def test_lines_that_nobody_reads_do_not_stop_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        up._show("frontend", "a line")
        with pytest.raises(BrokenPipeError):
            gone.write("the pipe is broken indeed\n")
        with contextlib.suppress(BrokenPipeError):
            gone.close()


def test_endings_in_words() -> None:
    assert ending(3) == "ended with exit code 3"
    assert ending(-9) == "was ended by SIGKILL"


async def test_what_a_child_writes_is_shown_line_by_line_to_the_last() -> None:
    shown: list[tuple[str, str]] = []
    processes = Processes(lambda name, line: shown.append((name, line)))
    await processes.start(Command("nonsense", (), 5))
    assert await asyncio.wait_for(processes.first_exit(), 30) == ("nonsense", 2)
    await processes.stop(["nonsense"])
    assert shown[0][0] == "nonsense"
    assert "unknown command 'nonsense'" in shown[0][1]


async def test_the_first_exit_may_be_of_a_child_that_is_started_later() -> None:
    processes = Processes(lambda name, line: None)
    first = asyncio.create_task(processes.first_exit())
    await asyncio.sleep(0)
    await processes.start(Command("nonsense", (), 5))
    assert await asyncio.wait_for(first, 30) == ("nonsense", 2)
    await processes.stop(["nonsense"])


async def test_a_child_that_does_not_end_is_killed_after_the_time_that_it_is_given() -> None:
    processes = Processes(lambda name, line: None)
    await processes.start(Command("nonsense", (), 1000))
    await processes.first_exit()
    stuck = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(100)",
        stdout=PIPE,
    )
    assert stuck.stdout is not None
    await stuck.stdout.readline()
    processes._children["nonsense"] = stuck
    await asyncio.wait_for(processes.stop(["nonsense"], at_most_s=0.1), 30)
    assert stuck.returncode == -signal.SIGKILL


def test_a_process_dies_with_its_parent_however_that_ends() -> None:
    child = (
        "import time; from services.common.dying import die_with\n"
        "die_with({}); print('tied', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"code = {child!r}.format(os.getpid())\n"
        "process = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "process.stdout.readline(); print(process.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert _alive(pid)
        process.kill()
    _wait_gone([pid])


def test_a_process_whose_parent_has_gone_already_ends_at_once() -> None:
    code = f"from services.common.dying import die_with; die_with({os.getpid() + 1}); print('lives on')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"")


async def test_up_serves_until_ctrl_c_lets_a_stream_end_and_leaves_nothing(tiny: Path) -> None:
    async with _up(tiny, "--prompt", "Hi") as (process, lines):
        shown = await _until(lines, "is served on")
        served = re.match(r"(.*) is served on (\S+); Ctrl-C", shown[-1])
        assert served is not None
        address = served[2]
        assert served[1] == tiny.name
        assert any(line.startswith("triptych  | the executor") for line in shown)
        assert "> Hi" in shown
        assert any(line.startswith("scheduler |") for line in shown)
        pids = _children(process.pid)
        assert len(pids) == 3
        async with Client(address) as client:
            stream = client.generate([5, 6, 7], max_tokens=300, ignore_eos=True, temperature=0)
            await anext(stream)
            process.send_signal(signal.SIGINT)
            rest = [delta async for delta in stream]
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens == 300
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        _wait_gone(pids)


async def test_a_child_that_dies_takes_all_down(tiny: Path) -> None:
    async with _up(tiny) as (process, lines):
        await _until(lines, "frontend  | ")
        pids = _children(process.pid)
        (scheduler,) = [pid for pid in pids if "scheduler" in _command_line(pid)]
        os.kill(scheduler, signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 1
        shown = await _until(lines, "triptych: error")
        assert shown[-1] == "triptych: error: the scheduler was ended by SIGKILL; its last lines are above"
        _wait_gone(pids)


async def test_a_dead_executor_is_told_to_a_program_at_once_and_is_not_waited_for(tiny: Path) -> None:
    async with _up(tiny, "--ready-json") as (process, lines):
        await _until(lines, "frontend  | ")
        pids = _children(process.pid)
        (executor,) = [pid for pid in pids if "executor" in _command_line(pid).split()]
        (frontend,) = [pid for pid in pids if "frontend" in _command_line(pid)]
        os.kill(frontend, signal.SIGSTOP)  # as one whose drain would last
        os.kill(executor, signal.SIGKILL)
        shown = await _until(lines, '{"ended"')
        assert json.loads(shown[-1]) == {"ended": "the executor was ended by SIGKILL"}
        assert _alive(frontend)
        async with asyncio.timeout(2 * up.BROKEN_STOP_S + 10):  # its drain alone would be given 35 s
            assert await process.wait() == 1
        _wait_gone(pids)


async def test_a_service_that_cannot_start_takes_all_down_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with _up(tmp_path) as (process, lines):
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 1
        shown = await _until(lines, "triptych: error: the ")
        assert any(re.match(r"\w+ +\| triptych: error: ", line) for line in shown)
        assert "Traceback" not in "".join(shown)


async def test_a_killed_supervisor_leaves_nothing(tiny: Path) -> None:
    async with _up(tiny) as (process, lines):
        await _until(lines, "frontend  | ")
        pids = _children(process.pid)
        assert len(pids) == 3
        process.kill()
        await process.wait()
        await asyncio.to_thread(_wait_gone, pids)


async def test_a_second_ctrl_c_does_not_wait(tiny: Path) -> None:
    async with _up(tiny) as (process, lines):
        await _until(lines, "frontend  | ")
        pids = _children(process.pid)
        (frontend,) = [pid for pid in pids if "frontend" in _command_line(pid)]
        os.kill(frontend, signal.SIGSTOP)  # so that it does not answer SIGTERM
        process.send_signal(signal.SIGINT)
        await _until(lines, "stopping")
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        _wait_gone(pids)


@asynccontextmanager
async def _up(model: Path, *arguments: str) -> AsyncIterator[tuple[Process, asyncio.StreamReader]]:
    command = (sys.executable, "-m", "services.cli.main", "up", "--port", "0", "--model", str(model), *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _until(lines: asyncio.StreamReader, text: str) -> list[str]:
    """The lines up to the first that holds `text`."""
    shown: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while line := await lines.readline():
            shown.append(line.decode().rstrip("\n"))
            if text in shown[-1]:
                return shown
    raise AssertionError(f"{text!r} was not among\n" + "\n".join(shown))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie waits for whoever reaps orphans


def _wait_gone(pids: list[int], within_s: float = 15) -> None:
    deadline_s = time.monotonic() + within_s
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if not any(_alive(pid) for pid in pids):
        return
    raise AssertionError(f"still there: {[_command_line(pid) for pid in pids if _alive(pid)]}")
