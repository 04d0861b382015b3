"""`triptych_client.local.Engine`: a real engine under a Python program, in every way such a program may run or end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from triptych.inference.v1 import inference_pb2 as pb
from triptych.inference.v1 import inference_pb2_grpc

from services.cli import up_plan
from services.cli.doctor import machine
from services.common.errors import StartError
from tests.client.scripted import scripted_server
from tests.support.checkpoints import check_same_ids, reference_ids, tiny_llama
from triptych_client import Client, Completion, Message, TriptychError
from triptych_client.local import Engine, EngineError, batch, process

ROOT = Path(__file__).parents[2]
PROMPTS = [[5 + i, 6, 7 + 2 * i, *range(20, 20 + i)] for i in range(12)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("local") / "tiny-local")


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine(tiny, flags=["--executor.threads", "1"]) as engine:
        assert _of(tiny)
        yield engine
    assert _of(tiny) == []
    with pytest.raises(EngineError, match="is not running"):
        engine.generate(["a"])


def test_answers_are_those_of_transformers_in_the_order_of_the_prompts(engine: Engine, tiny: Path) -> None:
    answers = engine.generate(PROMPTS, max_tokens=16, temperature=0, ignore_eos=True, max_in_flight=5)
    expected = reference_ids(tiny, PROMPTS, 16, ignore_eos=True)
    check_same_ids(tiny, PROMPTS, [answer.token_ids for answer in answers], expected)
    assert [answer.usage.prompt_tokens for answer in answers] == [len(prompt) for prompt in PROMPTS]
    assert len({answer.request_id for answer in answers}) == len(PROMPTS)


async def test_a_running_event_loop_with_a_client_of_its_own_does_not_matter(engine: Engine) -> None:
    async with Client(engine.address) as client:
        stream = client.generate("The quick", max_tokens=8, temperature=0, ignore_eos=True)
        blocking = engine.generate(["The quick", iter([5, 6])], max_tokens=8, temperature=0, ignore_eos=True)
        assert (await stream.collect()).token_ids == blocking[0].token_ids
        ids = await client.tokenize("The quick")
    assert engine.generate([ids], max_tokens=8, temperature=0, ignore_eos=True)[0].text == blocking[0].text
    assert engine.model == "tiny-local"


def test_conversations_are_answered_by_the_template(engine: Engine) -> None:
    one, same, other = engine.chat(
        [
            "Hi",
            [Message("user", "Hi")],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        ],
        max_tokens=6,
        temperature=0,
    )
    assert (one.text, one.usage.prompt_tokens) == (same.text, same.usage.prompt_tokens)
    assert other.usage.prompt_tokens > one.usage.prompt_tokens
    with pytest.raises(TriptychError, match="takes no tools"):
        engine.chat(["Hi"], tools=[pb.Tool(name="t")])


def test_threads_share_an_engine(engine: Engine) -> None:
    alone = [engine.generate([prompt], max_tokens=8, temperature=0)[0].token_ids for prompt in PROMPTS[:4]]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        batches = [pool.submit(engine.generate, [prompt], max_tokens=8, temperature=0) for prompt in PROMPTS[:4]]
        assert [found.result()[0].token_ids for found in batches] == alone


def test_a_prompts_error_stands_in_its_place_where_that_is_asked_for(engine: Engine) -> None:
    first, wrong, last = engine.generate(["a", [99_999], "b"], errors="return", max_tokens=3, ignore_eos=True)
    assert isinstance(wrong, TriptychError)
    assert wrong.code is grpc.StatusCode.INVALID_ARGUMENT
    for answer in (first, last):
        assert isinstance(answer, Completion)
        assert answer.usage.completion_tokens == 3


def test_else_it_is_raised_with_its_index_and_cancels_the_others(engine: Engine) -> None:
    begun_s = time.monotonic()
    with pytest.raises(TriptychError, match="INVALID_ARGUMENT") as raised:
        engine.generate([*PROMPTS[:3], [99_999], *PROMPTS[3:]] * 8, max_tokens=900, ignore_eos=True)
    took_s = time.monotonic() - begun_s
    assert raised.value.__notes__ == ["prompt 3 (from 0) of 104"]
    begun_s = time.monotonic()
    engine.generate(PROMPTS[:1], max_tokens=900, ignore_eos=True)  # 100 of them at once take longer than one alone
    assert took_s < max(2.0, time.monotonic() - begun_s)


def test_a_deadline_holds_for_each_call(engine: Engine) -> None:
    (late,) = engine.generate([[5, 6]], errors="return", max_tokens=1000, ignore_eos=True, timeout_s=0.001)
    assert isinstance(late, TriptychError)
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"prompts": "one"}, TypeError, r"give \[prompt\]"),
        ({"prompts": ["a"], "max_token": 3}, TypeError, "'max_token' is not an option"),
        ({"prompts": ["a"], "tools": ()}, TypeError, "'tools' is not an option"),
        ({"prompts": [[-1]]}, ValueError, "-1"),
        ({"prompts": ["a"], "errors": "ignore"}, ValueError, "errors is 'ignore'"),
        ({"prompts": ["a"], "max_in_flight": 0}, ValueError, "max_in_flight is 0"),
    ],
)
def test_arguments_are_checked_before_anything_is_sent(
    engine: Engine, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        engine.generate(**arguments)


def test_doctor_counts_no_fewer_threads_than_an_engine_has(engine: Engine) -> None:
    pids = [engine.pid, *map(int, Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split())]
    threads = sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)
    assert len(pids) == machine.PROCESSES
    assert len(pids) < threads <= machine.threads_needed(os.cpu_count() or 1, 1)


def test_no_prompts_are_no_answers(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_a_fork_may_not_use_or_end_the_engine_of_its_parent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    child = engine._process
    assert child is not None
    monkeypatch.setattr(child, "_owner_pid", os.getpid() + 1)
    with pytest.raises(EngineError, match="belongs to process"):
        engine.generate(["a"])
    child.close()
    monkeypatch.undo()
    assert len(engine.generate(["a"], max_tokens=1)) == 1


class _Counting(inference_pb2_grpc.InferenceServiceServicer):
    """Counts the calls that run at once."""

    def __init__(self) -> None:
        self.lock, self.running, self.most = threading.Lock(), 0, 0

    def GenerateUnary(self, request: Any, context: Any) -> pb.GenerateUnaryResponse:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.02)
        with self.lock:
            self.running -= 1
        return pb.GenerateUnaryResponse()


def test_no_more_calls_run_at_once_than_the_limit() -> None:
    counting = _Counting()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(counting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    told: list[batch.Outcome] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).GenerateUnary
        start = lambda _: call.future(pb.GenerateUnaryRequest())  # noqa: E731
        assert len(batch.run(start, 24, limit=4, keep_errors=False, told=told.append)) == 24
    server.stop(0)
    assert 2 <= counting.most <= 4
    assert len(told) == 24


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _told(shown: bool | None) -> None:
    with batch.progress(2, shown) as told:
        told(TriptychError(grpc.StatusCode.INTERNAL, "", "one"))
        told(TriptychError(grpc.StatusCode.INTERNAL, "", "two"))


async def test_a_batch_names_its_tenant_in_every_call() -> None:
    async with scripted_server() as (scripted, address):
        scripted.answer = pb.GenerateUnaryResponse(
            response=pb.GenerateResponse(choices=[pb.Choice(), pb.Choice(index=1)])
        )
        engine = Engine()
        engine._process = cast("process.Process", SimpleNamespace(check=lambda within_s=0.0: None, close=lambda: None))
        engine._channel = grpc.insecure_channel(address)
        (answer,) = await asyncio.to_thread(engine.generate, ["x"], n=2, tenant="acme")
        assert scripted.metadata["triptych-tenant"] == "acme" and scripted.requests[0].request.options.n == 2
        assert [choice.index for choice in answer.choices] == [0, 1]
        await asyncio.to_thread(engine.generate, ["x"])
        assert "triptych-tenant" not in scripted.metadata
        engine.close()


def test_progress_is_shown_on_a_terminal_or_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown, seen in [
        (_Terminal(), None, True),
        (_Terminal(), False, False),
        (io.StringIO(), None, False),
        (io.StringIO(), True, True),
    ]:
        monkeypatch.setattr(sys, "stderr", stream)
        _told(shown)
        assert ("2/2" in stream.getvalue()) == seen


def test_without_tqdm_a_bar_that_is_asked_for_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", _Terminal())
    _told(None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'triptych-client\[local\]'"):
        _told(True)


def test_without_the_engines_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(process, "distribution", not_there)
    with pytest.raises(EngineError, match=r"triptych, which is not installed: pip install 'triptych-client\[local\]'"):
        Engine("m").start()


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(EngineError, match="did not start: it ended with exit code 1") as raised:
        Engine("/no/such").start()
    assert "triptych: error: no model at '/no/such'" in str(raised.value)


def test_an_engine_that_is_late_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "late"
    model.symlink_to(tiny)
    with pytest.raises(EngineError, match="not ready within 1 s"), Engine(model, ready_timeout_s=1):
        raise AssertionError("it started")
    _wait_none(model)


_ENDING = """
import json, signal, sys, time

print(json.dumps({"address": "127.0.0.1:1", "model": "m"}), flush=True)
sys.stdin.readline()
print(json.dumps({"ended": "the executor was ended by SIGKILL"}), flush=True)
print("its log", file=sys.stderr, flush=True)
sys.stdin.readline()
sys.exit(1)
"""


def test_a_service_that_has_ended_is_told_before_the_others_have_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    monkeypatch.setattr(process, "_start", lambda _: supervisor)
    monkeypatch.setattr(process, "_ENDING_S", 0.1)
    with supervisor, contextlib.closing(process.Process([])) as child:
        assert supervisor.stdin is not None
        assert child.wait_ready(30) == ("127.0.0.1:1", "m")
        child.check()
        supervisor.stdin.write(b"\n")
        supervisor.stdin.flush()
        with pytest.raises(EngineError, match="the engine is ending because the executor was ended by SIGKILL"):
            child.check(within_s=30)
        supervisor.stdin.write(b"\n")
        supervisor.stdin.flush()
        assert child.wait(30)
        with pytest.raises(EngineError, match=r"ended with exit code 1 because the executor .*\n  its log"):
            child.check()


def test_flags_are_words() -> None:
    with pytest.raises(TypeError, match=r"give \['--executor\.threads', '1'\]"):
        Engine(flags="--executor.threads 1")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--ready-json", "--prompt", "Hi"], "--ready-json and --prompt both write"),
        (["--parent", "1"], "--parent is 1, but process"),
    ],
)
def test_up_refuses_what_a_program_must_not_ask_of_it(argv: list[str], says: str) -> None:
    with pytest.raises(StartError, match=says):
        up_plan.read(["--port", "0", *argv])


_SCRIPT = """
import sys, threading, time
from triptych_client.local import Engine

engine = Engine(sys.argv[1])
starter = threading.Thread(target=engine.start)  # the engine lives on when this thread has ended
starter.start()
starter.join()
time.sleep(1)
print(engine.generate(["Hi"], max_tokens=3, ignore_eos=True)[0].usage.completion_tokens, flush=True)
"""
_ENDS = {
    "kill": "time.sleep(300)",
    "forget": "",
    "raise": "engine.close()\nwith engine:\n    raise ValueError('mine')",
}


def test_a_program_that_is_killed_while_it_starts_an_engine_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "killed"
    model.symlink_to(tiny)
    code = "import sys; from triptych_client.local import Engine; Engine(sys.argv[1]).start()"
    with subprocess.Popen([sys.executable, "-c", code, str(model)]) as program:
        deadline_s = time.monotonic() + 60
        while len(_of(model)) < machine.PROCESSES and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert len(_of(model)) == machine.PROCESSES
        program.kill()
    _wait_none(model)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "forget", "raise"])
def test_a_script_without_a_guard_leaves_nothing_however_it_ends(end: str, tiny: Path, tmp_path: Path) -> None:
    _run_script(tiny, tmp_path, end)


def _run_script(tiny: Path, tmp_path: Path, end: str) -> None:
    model = tmp_path / f"scripted-{end}"
    model.symlink_to(tiny)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT + _ENDS[end])
    command = [sys.executable, str(script), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        told = run.stdout.readline()
        assert told == b"3\n", run.stderr.read().decode()
        if end == "kill":
            assert _of(model)
            run.kill()
        code = run.wait(100)
    assert code == {"kill": -signal.SIGKILL, "forget": 0, "raise": 1}[end]
    _wait_none(model)


@pytest.mark.slow
def test_an_engine_that_dies_is_told_as_that_and_may_be_started_again(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "dying"
    model.symlink_to(tiny)
    with Engine(model) as engine:
        (executor,) = [pid for pid in _of(model) if _is_service(pid, "executor")]
        killer = threading.Timer(1.0, os.kill, (executor, signal.SIGKILL))
        killer.start()
        with pytest.raises((EngineError, TriptychError)) as raised:
            engine.generate(PROMPTS * 20, max_tokens=900, ignore_eos=True)
        assert isinstance(raised.value, EngineError), raised.value
        assert "the executor was ended by SIGKILL" in str(raised.value)
        with pytest.raises(EngineError, match="ended with exit code 1"):
            engine.generate(["a"])
        engine.close()
        _wait_none(model)
        engine.start()
        assert len(engine.generate(["a"], max_tokens=1)) == 1
        with pytest.raises(EngineError, match="started already"):
            engine.start()
    _wait_none(model)


@pytest.mark.slow
async def test_the_program_of_the_clients_page_runs(tiny: Path) -> None:
    page = (ROOT / "clients/python/README.md").read_text()
    (program,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "Engine" in block]
    program = program.replace("path/to/checkpoint", str(tiny))
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(run.communicate(), 100)
    assert run.returncode == 0
    assert out


def _of(model: Path) -> list[int]:
    """Processes whose command line names the model's folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if str(model).encode() in words and b"services.cli." in b" ".join(words):
                found.append(int(folder.name))
    return found


def _is_service(pid: int, name: str) -> bool:
    return name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _wait_none(model: Path, within_s: float = 20) -> None:
    deadline_s = time.monotonic() + within_s
    while _of(model) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert _of(model) == []
