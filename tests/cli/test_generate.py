"""`triptych generate --prompt-logprobs` and `--echo` on a terminal."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest
from triptych.inference.v1 import generation_pb2
from triptych.inference.v1 import inference_pb2 as pb

from services.cli.main import main
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


async def test_an_answer_is_followed_by_each_ids_logprob_and_its_alternatives() -> None:
    top = [pb.TokenLogprob(token_id=9, logprob=-0.25, rank=1, raw=b" town"), pb.TokenLogprob(token_id=8, logprob=-2)]
    position = pb.PositionLogprobs(token=top[0], top=top)
    last = pb.Choice(text=" town", token_ids=[9], logprobs=[position], finish=pb.Finish(reason=LENGTH))
    async with scripted_server() as (scripted, address):
        scripted.messages = [
            pb.GenerateResponse(prompt=pb.PromptInfo(prompt_tokens=3)),
            pb.GenerateResponse(choices=[last]),
            pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=1)),
        ]
        out, err = await run(
            address, "--logprobs", "--top-logprobs", "2", "--allowed-token-ids", "9,8", "--banned-token-ids", "7"
        )
        assert out == " town\n"
        lines = [line.split() for line in err.splitlines()]
        assert lines[0] == ["position", "id", "logprob", "rank", "bytes"]
        assert lines[1] == ["0", "9", "-0.2500", "1", "'", "town'"]
        assert lines[2] == lines[1][1:] and lines[3][:2] == ["8", "-2.0000"]
        options = scripted.requests[0].options
        assert options.logprobs == 2 and not options.HasField("prompt_logprobs")
        assert list(options.sampling.allowed_token_ids) == [9, 8] and list(options.sampling.banned_token_ids) == [7]
        await run(address, "--prompt-logprobs", "--top-logprobs", "3")
        options = scripted.requests[1].options
        assert options.prompt_logprobs == 3 and not options.HasField("logprobs")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--top-logprobs", "3"], "--top-logprobs stands beside --logprobs"),
        (["--allowed-token-ids", "5;6"], "'5;6' is no list of ids such as 5,17"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["generate", "Hi", "--address", "127.0.0.1:9", *flags])
    except SystemExit as exit_:  # argparse's way
        status = int(exit_.code or 0)
    assert status != 0
    assert says in capsys.readouterr().err


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
