"""`triptych chat` and `triptych generate` as processes, against a server that says what the test wrote down."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

import pytest
from triptych.inference.v1 import generation_pb2
from triptych.inference.v1 import inference_pb2 as pb

from services.common.errors import invalid, unavailable
from tests.client.scripted import Scripted, scripted_server

PATIENCE_S = 30


@pytest.fixture
async def server() -> AsyncIterator[tuple[Scripted, str]]:
    async with scripted_server() as (scripted, address):
        scripted.messages = _answer("Hello", " there")
        yield scripted, address


def _answer(*pieces: str) -> list[pb.ChatResponse]:
    finish = pb.Finish(reason=generation_pb2.FINISH_REASON_STOP, eos_token_id=2)
    choices = [pb.Choice(text=piece, token_ids=[i]) for i, piece in enumerate(pieces)]
    choices[-1].finish.CopyFrom(finish)
    return [
        pb.ChatResponse(prompt=pb.PromptInfo(prompt_tokens=3)),
        *(pb.ChatResponse(choices=[choice]) for choice in choices),
        pb.ChatResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=len(pieces))),
    ]


async def _start(*arguments: str, stdin: int = DEVNULL, stdout: int = PIPE) -> Process:
    command = (sys.executable, "-m", "services.cli.main", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=stdout, stderr=PIPE)


async def _run(*arguments: str, text: str | None = None) -> tuple[int, str, str]:
    process = await _start(*arguments, stdin=DEVNULL if text is None else PIPE)
    out, err = await asyncio.wait_for(process.communicate(text and text.encode()), PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_one_question_is_answered_on_standard_output_and_its_speed_on_standard_error(
    server: tuple[Scripted, str],
) -> None:
    scripted, address = server
    code, out, err = await _run("chat", "Hi", "--address", address, "--system", "Be brief.", "--max-tokens", "7")
    assert (code, out) == (0, "Hello there\n")
    assert re.fullmatch(r"\[2 tokens, first after [\d.]+ s, then [\d.]+ tokens/s; end of the answer\]\n", err)
    request = scripted.requests[0]
    assert [m.content[0].text for m in request.messages] == ["Be brief.", "Hi"]
    assert request.options == pb.Options(max_tokens=7)


async def test_flags_become_options(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    flags = ["--temperature", "0", "--top-p", "0.5", "--seed", "3", "--stop", "A", "--stop", "B", "--ignore-eos"]
    await _run("chat", "Hi", "--address", address, "--model", "m", *flags)
    sampling = generation_pb2.Sampling(temperature=0, top_p=0.5)
    assert scripted.requests[0].options == pb.Options(sampling=sampling, seed=3, stop=["A", "B"], ignore_eos=True)
    assert scripted.requests[0].model == "m"


@pytest.mark.parametrize("piped", [False, True])
async def test_generate_sends_the_prompt_as_it_is(server: tuple[Scripted, str], piped: bool) -> None:
    scripted, address = server
    scripted.messages = [pb.GenerateResponse.FromString(m.SerializeToString()) for m in scripted.messages]
    prompt = "One\ntwo "
    if piped:
        code, out, _ = await _run("generate", "--address", address, text=prompt)
    else:
        code, out, _ = await _run("generate", prompt, "--address", address)
    assert (code, out) == (0, "Hello there\n")
    assert scripted.requests[0].text == prompt


async def test_several_choices_are_printed_whole_in_the_order_in_which_they_end(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    stop, length = (
        pb.Finish(reason=generation_pb2.FINISH_REASON_STOP, eos_token_id=2),
        pb.Finish(reason=generation_pb2.FINISH_REASON_LENGTH),
    )
    scripted.messages = [
        pb.GenerateResponse(prompt=pb.PromptInfo(prompt_tokens=3)),
        pb.GenerateResponse(
            choices=[pb.Choice(text="He", token_ids=[1]), pb.Choice(index=1, text="Wo", token_ids=[2])]
        ),
        pb.GenerateResponse(choices=[pb.Choice(index=1, text="rld", token_ids=[3], finish=length)]),
        pb.GenerateResponse(choices=[pb.Choice(text="llo", token_ids=[4, 5], finish=stop)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=5)),
    ]
    code, out, err = await _run("generate", "Hi", "-n", "2", "--address", address)
    assert (code, out) == (0, "--- choice 1, length\nWorld\n--- choice 0, end of the answer\nHello\n")
    assert re.fullmatch(r"\[5 tokens of all choices in [\d.]+ s\]\n", err)
    assert scripted.requests[0].options == pb.Options(n=2)


async def test_lines_of_a_pipe_are_the_turns_of_one_conversation(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    code, out, _ = await _run("chat", "--address", address, text="A\n\nB\n/clear\nC\n/quit\nD\n")
    assert (code, out) == (0, "Hello there\n" * 3)
    turns = [[m.content[0].text for m in request.messages] for request in scripted.requests]
    assert turns == [["A"], ["A", "Hello there", "B"], ["C"]]


async def test_an_error_is_one_line_and_exit_code_1(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    scripted.messages, scripted.error = [], invalid("options.top_p", "must be in (0, 1], not 2")
    code, out, err = await _run("chat", "Hi", "--address", address, "--top-p", "2")
    assert (code, out) == (1, "")
    assert err == "triptych: error: INVALID_ARGUMENT: options.top_p: must be in (0, 1], not 2\n"


async def test_a_retry_is_named(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    scripted.messages, scripted.error = [], unavailable("NO_ENGINE", "no engine", retry_after_s=1.5)
    assert (await _run("generate", "Hi", "--address", address))[2] == (
        "triptych: error: UNAVAILABLE: no engine (try again in 1.5 s)\n"
    )


async def test_a_conversation_goes_on_after_an_error_without_the_failed_turn(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    scripted.messages, scripted.error = [], invalid("messages", "too long")
    process = await _start("chat", "--address", address, stdin=PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"A\n")
    assert b"too long" in await asyncio.wait_for(process.stderr.readline(), PATIENCE_S)
    scripted.messages, scripted.error = _answer("Hello", " there"), None
    out, _ = await asyncio.wait_for(process.communicate(b"B\n"), PATIENCE_S)
    assert out == b"Hello there\n"
    assert [m.content[0].text for m in scripted.requests[1].messages] == ["B"]


async def test_no_server_is_one_line_that_says_how_to_start_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = await _run("chat", "Hi", "--address", address)
    assert code == 1
    assert err.startswith(f"triptych: error: nothing answers at {address}; start a server with `triptych up`")
    assert err.count("\n") == 1


async def test_a_value_that_no_message_can_hold_is_one_line(server: tuple[Scripted, str]) -> None:
    code, _, err = await _run("chat", "Hi", "--address", server[1], "--max-tokens", "-1")
    assert code == 1
    assert err.startswith("triptych: error: max_tokens: ")
    assert err.count("\n") == 1


async def test_ctrl_c_ends_one_answer_and_tells_the_server(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    scripted.messages, scripted.hang = scripted.messages[:2], True
    process = await _start("chat", "Hi", "--address", address)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(5), PATIENCE_S) == b"Hello"
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 130
    await asyncio.wait_for(scripted.left.wait(), 5)
    assert process.stderr is not None
    assert b"Traceback" not in await process.stderr.read()


async def test_a_reader_that_leaves_is_no_traceback(server: tuple[Scripted, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = await _start("chat", "Hi", "--address", server[1], stdout=writer)
    os.close(writer)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert (process.returncode, err) == (1, b"")


class Terminal:
    """A pseudo-terminal: what is written to it is typed, what is read from it was shown."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.shown = ""
        os.set_blocking(self.master, False)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    async def until(self, text: str) -> None:
        """Returns once `text` was shown after what earlier calls waited for."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.shown:
                await self._readable()
                self.shown += os.read(self.master, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    async def _readable(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self.master, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            asyncio.get_running_loop().remove_reader(self.master)

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


async def _interrupt_until(process: Process, terminal: Terminal, text: str) -> None:
    """CPython loses a signal that comes between the prompt and its wait for a key; a person presses again."""
    waiting = asyncio.create_task(terminal.until(text))
    while not waiting.done():
        process.send_signal(signal.SIGINT)
        await asyncio.wait([waiting], timeout=1)
    await waiting


async def test_ctrl_c_stops_the_answer_not_the_chat(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    scripted.messages, scripted.hang = scripted.messages[:2], True
    terminal = Terminal()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli.main", "chat", "--address", address),
            stdin=terminal.slave,
            stdout=terminal.slave,
            stderr=terminal.slave,
            start_new_session=True,
        )
        await terminal.until("> ")
        terminal.type("A\n")
        await terminal.until("Hello")
        process.send_signal(signal.SIGINT)
        await terminal.until("[stopped]")
        await asyncio.wait_for(scripted.left.wait(), 5)
        await terminal.until("> ")
        await _interrupt_until(process, terminal, "Ctrl-D")  # at the prompt it ends nothing either
        scripted.messages, scripted.hang = _answer("Fine"), False
        terminal.type("B\n")
        await terminal.until("Fine")
        await terminal.until("> ")
        terminal.type("\x04")
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    finally:
        terminal.close()
    assert [m.content[0].text for m in scripted.requests[1].messages] == ["A", "Hello", "B"]
