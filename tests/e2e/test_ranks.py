"""`triptych up --tp 2`: two processes share a model; ids stay the reference's, nothing is left of either."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from tests.e2e.test_same_ids import SHORT, prompts
from tests.support.calls import by_ids, generate, greedy
from tests.support.checkpoints import check_same_ids, reference_ids, tiny_llama

PATIENCE_S = 110
PEER = "services.executor.ranks.main"


@contextmanager
def up(model: Path, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `triptych up --tp 2`, and the address of its frontend."""
    command = [sys.executable, "-m", "services.cli.main", "up", "--tp", "2", "--port", "0", "--ready-json"]
    command += ["--executor.device", "auto"]  # here: the CPU
    with log.open("w") as lines:
        process = subprocess.Popen(
            [*command, "--model", str(model)], stdout=subprocess.PIPE, stderr=lines, text=True, env=os.environ
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield process, json.loads(line)["address"]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def check_loopback_alone(processes: list[psutil.Process]) -> None:
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def check_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


async def ids(address: str, asked: list[list[int]], new_tokens: int) -> list[list[int]]:
    options = greedy(max_tokens=new_tokens, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        answers = await asyncio.gather(*(generate(channel, by_ids(p, options), timeout_s=300) for p in asked))
    return [answer.ids for answer in answers]


@pytest.mark.timeout(240)
def test_two_ranks_answer_like_transformers_listen_on_loopback_and_end_together(tmp_path: Path) -> None:
    """9 query heads on 3, as the embedded model has them: rank 0 holds two thirds of the attention."""
    model = tiny_llama(tmp_path / "m", hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
    asked = [[5 + i, 6, 7 + 2 * i, *range(20, 20 + 9 * i)] for i in range(8)]
    with up(model, tmp_path / "log") as (process, address):
        check_same_ids(
            model, asked, asyncio.run(ids(address, asked, 16)), reference_ids(model, asked, 16, ignore_eos=True)
        )
        children = psutil.Process(process.pid).children(recursive=True)
        (peer,) = [child for child in children if PEER in child.cmdline()]
        check_loopback_alone(children)
        peer.kill()  # the executor ends with its rank, and `up` with its executor
        assert process.wait(PATIENCE_S) == 1
        check_gone(children)
    log = (tmp_path / "log").read_text()
    assert "rank 1 was ended by SIGKILL" in log and "the executor ended with exit code 1" in log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_by_two_ranks(embedded: Path, tmp_path: Path) -> None:
    asked = [prompt for prompt in prompts(embedded) if len(prompt) in SHORT]
    expected = reference_ids(embedded, asked, 64, ignore_eos=True)
    with up(embedded, tmp_path / "log") as (process, address):
        check_same_ids(embedded, asked, asyncio.run(ids(address, asked, 64)), expected)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        check_gone(children)
