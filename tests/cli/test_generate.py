"""`triptych generate --prompt-logprobs` and `--echo` on a terminal."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest
from triptych.inference.v1 import generation_pb2
from triptych.inference.v1 import inference_pb2 as pb

from services.common.server import Server
from tests.client.scripted import scripted_server

LENGTH = generation_pb2.FINISH_REASON_LENGTH


def entry(token_id: int, logprob: float, rank: int, raw: bytes) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(token=pb.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, raw=raw))


def told(start: int, *positions: pb.PositionLogprobs) -> pb.GenerateResponse:
    return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(start=start, positions=positions))


async def run(address: str, *flags: str) -> tuple[str, str]:
    command = (sys.executable, "-m", "services.cli.main", "generate", "A small", "--address", address, *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err
    return out.decode(), err.decode()


@pytest.mark.parametrize("length", [1, 3])
async def test_a_prompt_is_shown_with_each_ids_logprob_and_its_perplexity(length: int) -> None:
    scores = [pb.PositionLogprobs(), entry(70, -0.5, 2, b" sm"), entry(71, -1.5, 7, b"\xc3")]
    messages = [
        pb.GenerateResponse(prompt=pb.PromptInfo(prompt_tokens=3, text="A small")),
        told(0, *scores[:2][:length]),
        *([told(2, scores[2])] if length == 3 else []),
        pb.GenerateResponse(choices=[pb.Choice(text=" town", token_ids=[9], finish=pb.Finish(reason=LENGTH))]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=1)),
    ]
    async with scripted_server() as (scripted, address):
        scripted.messages = messages
        out, err = await run(address, "--prompt-logprobs", "--echo", "--max-tokens", "1")
        lines = [line.split() for line in out.splitlines()]
        assert lines[0] == ["position", "id", "logprob", "rank", "bytes"]
        assert lines[1][:4] == ["0", "-", "-", "-"]
        if length == 3:
            assert lines[2] == ["1", "70", "-0.5000", "2", "'", "sm'"]
            assert lines[3] == ["2", "71", "-1.5000", "7", r"'\\xc3'"]
            # exp(mean of 0.5 and 1.5) = e
            assert err.startswith("[2 prompt ids scored, logprob -2.0000, perplexity 2.718]\n")
        else:
            assert err.startswith("[no prompt id has another before it]\n")
        assert out.endswith("\nA small town\n")
        options = scripted.requests[0].options
        assert options.HasField("prompt_logprobs") and options.prompt_logprobs == 0 and options.echo
        out, _ = await run(address, "--max-tokens", "1")
        assert out == " town\n" and not scripted.requests[1].options.HasField("prompt_logprobs")


@pytest.mark.parametrize("command", ["generate", "chat"])
async def test_the_port_of_another_service_is_told_from_a_frontends(command: str) -> None:
    server = Server("127.0.0.1", 0)  # as a scheduler's: health and reflection, no InferenceService
    await server.start([])
    try:
        address = f"127.0.0.1:{server.port}"
        flags = (command, "Hi", "--address", address)
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.cli.main", *flags, stderr=PIPE)
        _, err = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 1
        assert err.decode().startswith(f"triptych: error: {address} answers, but it is no frontend of Triptych")
    finally:
        await server.stop()


async def test_choices_stand_below_an_echoed_prompt() -> None:
    town = [pb.Choice(index=i, text=" town", token_ids=[9], finish=pb.Finish(reason=LENGTH)) for i in (0, 1)]
    async with scripted_server() as (scripted, address):
        scripted.messages = [
            pb.GenerateResponse(prompt=pb.PromptInfo(prompt_tokens=3, text="A small")),
            pb.GenerateResponse(choices=town),
            pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=2)),
        ]
        out, _ = await run(address, "--echo", "-n", "2", "--max-tokens", "1")
        assert out == "A small\n--- choice 0, length\n town\n--- choice 1, length\n town\n"
