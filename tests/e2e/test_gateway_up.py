"""`triptych up --gateway`: the embedded model over HTTP, with the `openai` package as client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import grpc
import psutil
import pytest
from openai import AsyncOpenAI
from triptych.inference.v1 import inference_pb2

from tests.frontend.harness import user
from tests.support.calls import chat, greedy

PATIENCE_S = 200
GATEWAY_PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
ADDRESS = "http://127.0.0.1:8000"
QUESTION = "What is the capital of France?"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_the_embedded_model_is_served_over_http_and_all_ends_together(embedded: Path, tmp_path: Path) -> None:
    model = embedded.name
    with (tmp_path / "up.log").open("wb") as log:
        up = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli.main", "up", "--model", str(embedded), "--port", "0"),
            *("--gateway", "--ready-json"),
            stdout=PIPE,
            stderr=log,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        assert up.stdout is not None
        line = await asyncio.wait_for(up.stdout.readline(), PATIENCE_S)
        assert line, (tmp_path / "up.log").read_text(errors="replace")[-3000:]
        told = json.loads(line)
        children = psutil.Process(up.pid).children(recursive=True)
        assert told["model"] == model and told["http"].startswith("http://127.0.0.1:")
        assert len([child for child in children if child.ppid() == up.pid]) == 4
        assert "sky" in await _run_the_documents_program(told["http"])
        await _ask(AsyncOpenAI(base_url=f"{told['http']}/v1", api_key="none", max_retries=0), told["address"], model)
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(up.wait(), PATIENCE_S) == 0
    assert not psutil.wait_procs(children, timeout=5)[1]


async def _run_the_documents_program(url: str) -> str:
    (program,) = re.findall(r"^```python\n(.*?)^```", GATEWAY_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert ADDRESS in program
    command = [sys.executable, "-c", program.replace(ADDRESS, url)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0
    return out.decode()


async def _ask(http: AsyncOpenAI, address: str, model: str) -> None:
    """Over HTTP and over our own API: the same ids, so the same text and usage."""
    assert [each.id for each in (await http.models.list()).data] == [model]
    asked = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    async with grpc.aio.insecure_channel(address) as channel:
        request = inference_pb2.ChatRequest(messages=[user(QUESTION)], options=greedy(max_tokens=24))
        own = await chat(channel, request)
    whole = await http.chat.completions.create(**asked)
    assert whole.choices[0].message.content.strip() == own.text.strip() and "Paris" in own.text
    assert whole.usage.prompt_tokens == own.usage.prompt_tokens
    assert whole.usage.completion_tokens == own.usage.completion_tokens
    stream = await http.chat.completions.create(**asked, stream=True)
    pieces = [each.delta.content or "" for chunk in [c async for c in stream] for each in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content and len([piece for piece in pieces if piece]) > 5
    completion = await http.completions.create(model=model, prompt="1, 2, 3, 4,", stop=["7"], temperature=0)
    assert completion.choices[0].text == " 5, 6, " and completion.choices[0].finish_reason == "stop"
