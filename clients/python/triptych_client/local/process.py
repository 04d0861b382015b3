"""The child process `triptych up`: started, awaited, its last lines kept, ended. It never outlives this process.

It is started by exec, never by fork alone, so that it does not matter which threads or channels this process has, and
it imports nothing of the program that starts it. It watches this process, so it ends even when this one is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import IO

LOG_LINES = 200
"""The last lines of the services that are kept."""

TOLD_LINES = 20
"""Of those, the ones an error shows."""

STOP_S = (40.0, 10.0)
"""Patience after the first SIGTERM (the services drain for 30 s at most by default) and after the second."""

_ENDING_S = 30.0
"""Once a service has ended by itself, the supervisor ends the others within this."""

_LINE_BYTES = 64 * 1024


class EngineError(RuntimeError):
    """The engine is not installed, did not start, or has ended; the message ends with the last lines of its log."""


class Process:
    """One `triptych up`. Raises EngineError where the engine is not installed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._output: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._broken = threading.Event()
        self._reason = ""
        self._owner_pid = os.getpid()
        self._child = _start(arguments)
        assert self._child.stdout is not None and self._child.stderr is not None
        self._pumps = [
            threading.Thread(target=self._listen, args=(self._child.stdout,), daemon=True),
            threading.Thread(target=_keep, args=(self._child.stderr, self._lines), daemon=True),
        ]
        for pump in self._pumps:
            pump.start()

    @property
    def pid(self) -> int:
        """Of the supervisor; the three services are its children."""
        return self._child.pid

    def log_tail(self) -> list[str]:
        """The last lines that the services wrote."""
        return list(self._lines)

    def wait_ready(self, timeout_s: float) -> tuple[str, str]:
        """Address and model name, once a token can be made. Raises EngineError."""
        try:
            line = self._output.get(timeout=timeout_s)
        except queue.Empty:
            raise self.error(f"the engine was not ready within {timeout_s:g} s; raise ready_timeout_s") from None
        if line is None:
            self.wait(_ENDING_S)
            raise self.error(f"the engine did not start: it {self._ending()}")
        try:
            told = json.loads(line)
            return str(told["address"]), str(told["model"])
        except (ValueError, KeyError, TypeError):
            raise self.error(f"the engine printed {line[:100]!r} in place of its address") from None

    def check(self, within_s: float = 0.0) -> None:
        """Raises EngineError when the engine or one of its services has ended, or does so within `within_s` seconds,
        or when it belongs to a parent."""
        if os.getpid() != self._owner_pid:
            raise EngineError(
                f"the engine belongs to process {self._owner_pid}, this is {os.getpid()}; start an Engine in each "
                "process, or use it in the first alone"
            )
        if self._broken.wait(within_s) or self._child.poll() is not None:
            self.wait(_ENDING_S)
            raise self.error(f"the engine {self._ending()}")

    def wait(self, timeout_s: float) -> bool:
        """Whether the process has ended, waiting for that as long as this."""
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Ends the services, with patience first; after it none is left. A second call, or one in a fork, is empty."""
        if os.getpid() != self._owner_pid:
            return
        try:
            for patience_s in STOP_S:
                if self._child.poll() is None:
                    self._child.terminate()  # twice means: hurry
                    self.wait(patience_s)
        finally:
            if self._child.poll() is None:
                self._child.kill()  # the kernel kills its children with it
                self._child.wait()
            for pump in self._pumps:
                pump.join(timeout=STOP_S[1])

    def error(self, what: str) -> EngineError:
        """With the last lines of the log."""
        self._pumps[1].join(timeout=1.0 if self._child.poll() is not None else 0)
        tail = self.log_tail()[-TOLD_LINES:]
        told = "\n  ".join(["; its last lines:", *tail]) if tail else "; it wrote no line"
        return EngineError(what + told)

    def _ending(self) -> str:
        how = _in_words(self._child.returncode)
        return f"{how} because {self._reason}" if self._reason else how

    def _listen(self, stream: IO[bytes]) -> None:
        """Standard output: lines go to `wait_ready`; one that tells of an end, and the end itself, are told to all."""
        with stream:
            while line := stream.readline(_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip("\n")
                if (reason := _reason_of(text)) is None:
                    self._output.put(text)
                else:
                    self._reason = reason
                    self._tell_broken()
        self._tell_broken()

    def _tell_broken(self) -> None:
        self._broken.set()
        self._output.put(None)


def _start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        distribution("triptych")
    except PackageNotFoundError:
        raise EngineError(
            "Engine runs the services of the package triptych, which is not installed: "
            "pip install 'triptych-client[local]'"
        ) from None
    # -P: a folder `services` where the program runs must not be taken for Triptych's.
    command = [sys.executable, "-P", "-m", "services.cli.main", "up", "--port", "0", "--ready-json"]
    return subprocess.Popen(
        [*command, "--parent", str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C reaches this process, which ends the other
    )


def _reason_of(line: str) -> str | None:
    """Of a line that tells why the engine ends; None: it is another one."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return str(told["ended"]) if isinstance(told, dict) and "ended" in told else None


def _in_words(code: int | None) -> str:
    """A return code; None: the process has not ended."""
    if code is None:
        return "is ending"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _keep(stream: IO[bytes], into: deque[str]) -> None:
    """Standard error; read to its end, so that the services never wait for room in the pipe."""
    with stream:
        while line := stream.readline(_LINE_BYTES):
            into.append(line.decode("utf-8", "replace").rstrip("\n"))
