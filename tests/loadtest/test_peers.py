"""Peers: found by a variable, asked with the same clock, ended with all they started."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtest import peer_process, peer_vllm, peers
from loadtest.open_loop import CallError
from loadtest.workload import Planned
from services.common.errors import StartError

REQUEST = Planned(0.0, (5, 6, 7), 3)


def test_a_peer_is_left_out_by_name_where_its_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIPTYCH_PEER_VLLM", raising=False)
    monkeypatch.setenv("TRIPTYCH_PEER_TRANSFORMERS", sys.executable)
    assert peers.python_of("VLLM") is None
    assert str(peers.python_of("TRANSFORMERS")) == sys.executable
    assert peers.absent_line(("VLLM", "TRANSFORMERS")) == "left out: vllm (set TRIPTYCH_PEER_VLLM)"


@pytest.mark.parametrize("value", ["/nowhere/bin/python", "/tmp", __file__])
def test_a_variable_that_names_no_program_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_PEER_VLLM", value)
    with pytest.raises(StartError, match=f"TRIPTYCH_PEER_VLLM={value} is no program"):
        peers.python_of("VLLM")


@asynccontextmanager
async def answering(answer: str, asked: list[tuple[str, dict[str, object]]]) -> AsyncIterator[int]:
    """An HTTP server that keeps what it is asked and gives one answer; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        asked.append((head.splitlines()[0], json.loads(await reader.readexactly(length))))
        writer.write(answer.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def events(*bodies: str) -> str:
    return "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + "".join(f"data: {b}\n\n" for b in bodies)


async def test_a_completions_stream_is_counted_by_the_ids_of_its_events() -> None:
    asked: list[tuple[str, dict[str, object]]] = []
    answer = events(
        '{"choices": [{"text": "a", "token_ids": [1]}]}',
        '{"choices": [{"text": "", "token_ids": null}]}',
        '{"choices": [{"text": "bc", "token_ids": [2, 3]}]}',
        "[DONE]",
    )
    async with answering(answer, asked) as port:
        assert [count async for count in peer_vllm.over_http(port)(REQUEST, 5.0)] == [1, 2]
    (line, body) = asked[0]
    assert line == "POST /v1/completions HTTP/1.0"
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ([5, 6, 7], 3, True, 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("HTTP/1.1 400 Bad Request\r\n\r\ntoo long", "400 Bad Request: too long"),
        (events('{"choices": [{"token_ids": [1]}]}'), "broke off"),
        (events('{"error": {"message": "out of memory"}}'), "out of memory"),
    ],
)
async def test_an_answer_that_fails_is_a_failure(answer: str, said: str) -> None:
    async with answering(answer, []) as port:
        with pytest.raises(CallError, match=said):
            [count async for count in peer_vllm.over_http(port)(REQUEST, 5.0)]


async def test_a_peer_ends_with_the_processes_it_started() -> None:
    child = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    async with peer_process.running([sys.executable, "-c", child], {}, pipe=False) as peer:
        async with asyncio.timeout(20):
            while not peer.lines:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        grandchild = int(peer.lines[0])
        os.kill(grandchild, 0)
    assert peer.process.returncode is not None
    async with asyncio.timeout(10):
        while _runs(grandchild):  # noqa: ASYNC110 (whoever adopts it may take a moment to reap it)
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
