"""A trace as a backend shows it: Arize Phoenix, a real one, before which the real model answers through a gateway.

`make phoenix` installs it below ~/.cache, which the test does where it is not there; TRIPTYCH_PHOENIX_PYTHON names the
Python of another environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import free_port, running
from tests.support.smg import gateway
from tests.telemetry.edges import GAP_NS, GAP_SHARE, PARTS
from tests.telemetry.stack import CALLER, TRACE_ID

INSTALLED = Path.home() / ".cache" / "triptych" / "phoenix-20.26.1" / "bin" / "python"
PYTHON = Path(os.environ.get("TRIPTYCH_PHOENIX_PYTHON", INSTALLED))
TOKENS = 64
PATIENCE_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not PYTHON.exists():
        subprocess.run(["make", "--no-print-directory", "phoenix"], cwd=Path(__file__).parents[2], check=True)


@asynccontextmanager
async def phoenix(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Its HTTP address and the URL of its collector."""
    http, collector = free_port(), free_port()
    told = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(collector),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (folder / "phoenix.log").open("wb") as log:
        command = ("-m", "phoenix.server.main", "serve")
        process = await asyncio.create_subprocess_exec(
            str(PYTHON), *command, stdout=log, stderr=log, env=environ | told, cwd=folder
        )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await ask(f"http://127.0.0.1:{http}/v1/projects") is None:
                assert process.returncode is None, (folder / "phoenix.log").read_text(errors="replace")[-3000:]
                await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{http}", f"http://127.0.0.1:{collector}"
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def ask(url: str) -> Any:
    """JSON, None where nobody answers yet."""

    def get() -> Any:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    return await asyncio.to_thread(get)


async def spans_of(http: str, trace_id: str) -> list[dict[str, Any]]:
    """All of a trace, once the parts and as many steps of either service are there."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told = await ask(f"{http}/v1/projects/default/spans?limit=1000")
            found = [span for span in (told or {"data": []})["data"] if span["context"]["trace_id"] == trace_id]
            names = [span["name"] for span in found]
            ids = {span["context"]["span_id"] for span in found}
            if {*PARTS, "step"} <= {*names} and any(name.endswith("VllmEngine/Generate") for name in names):
                executed = [s for s in found if s["name"] == "step" and "triptych.step.wait_s" in s["attributes"]]
                if 2 * len(executed) == names.count("step") and {s["parent_id"] for s in executed} <= ids:
                    return found
            await asyncio.sleep(0.5)


def nanoseconds(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6) * 1000


async def test_P4_phoenix_shows_one_trace_from_the_gateway_to_the_executor(embedded: Path, tmp_path: Path) -> None:
    (tmp_path / "phoenix").mkdir()
    async with phoenix(tmp_path / "phoenix") as (http, collector):
        told = ["--otlp-endpoint", collector]
        begun = running(embedded, tmp_path, executor=told, scheduler=told, frontend=[*told, "--vllm-adapter"])
        cluster = await asyncio.to_thread(begun.__enter__)
        try:
            smg = ["--enable-trace", "--otlp-traces-endpoint", collector.removeprefix("http://"), "--log-level", "info"]
            async with gateway(cluster.address, tmp_path / "smg.log", *smg) as found:
                await found.ready(embedded.name)
                stream = await found.client.completions.create(
                    model=embedded.name,
                    prompt="Once upon a time",
                    temperature=0,
                    max_tokens=TOKENS,
                    stream=True,
                    extra_body={"ignore_eos": True},
                    extra_headers={"traceparent": f"00-{TRACE_ID}-{CALLER}-01"},
                )
                assert [chunk async for chunk in stream]
                spans = await spans_of(http, TRACE_ID)
        finally:
            await asyncio.to_thread(begun.__exit__, None, None, None)
    by_id = {span["context"]["span_id"]: span for span in spans}
    (server,) = [span for span in spans if span["name"].endswith("VllmEngine/Generate") and "gen_ai" in str(span)]
    assert server["parent_id"] in by_id, "the gateway's own span"
    assert server["attributes"]["gen_ai.usage.output_tokens"] == TOKENS
    parts = [next(span for span in spans if span["name"] == name) for name in PARTS]
    assert {part["parent_id"] for part in parts} == {server["context"]["span_id"]}
    lengths = [nanoseconds(span["end_time"]) - nanoseconds(span["start_time"]) for span in (server, *parts)]
    assert abs(lengths[0] - sum(lengths[1:])) <= max(GAP_SHARE * lengths[0], GAP_NS)
    for step in (span for span in spans if span["name"] == "step"):
        above = by_id[step["parent_id"]]
        is_executors = "triptych.step.wait_s" in step["attributes"]
        assert (above["name"] == "step") if is_executors else (above is server)
