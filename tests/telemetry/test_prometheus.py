"""A real Prometheus scrapes a loaded engine, and every expression of the dashboards and alerts has data there."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from tests.frontend.harness import text_checkpoint, user
from tests.support.calls import by_ids, greedy
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import ORDER, free_port, running
from tests.support.metered import metered, read
from tests.telemetry.test_dashboards import DASHBOARDS, RULES, alerts, panels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus: make test-tools"),
]
LOAD_S = 20.0
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$ttft_slo": "1.0", "$tpot_slo": "0.1"}


def promtool(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_ones_of_prometheus_and_each_fires_in_its_unit_test(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(tmp_path / "alerts.yaml"))
    promtool("test", "rules", str(tmp_path / "alerts_test.yaml"))


async def test_the_text_of_each_service_is_as_prometheus_wants_it(tmp_path: Path) -> None:
    async with metered(text_checkpoint(tmp_path / "model")) as engine:
        async for _ in engine.stub.Generate(by_ids([7] * 20, greedy(max_tokens=4))):
            pass
        assert engine.frontend.metrics is not None
        for port in (engine.frontend.metrics.port, engine.scheduler.metrics_port):
            text = await asyncio.to_thread(read, port)
            told = await asyncio.to_thread(promtool, "check", "metrics", text=text)
            assert not re.findall(r"^triptych.*|^gen_ai.*|^rpc.*", told, re.MULTILINE), told


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """Its address; it scrapes each second."""
    config = folder / "prometheus.yml"
    scrape = {"job_name": "triptych", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}
    config.write_text(json.dumps({"scrape_configs": [scrape]}))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(20)


def query(address: str, expression: str) -> list[float]:
    """The values of an instant query."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            result: Any = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    return [float(series["value"][1]) for series in result]


def evaluable() -> Iterator[tuple[str, str]]:
    """(where, expression) of all panels, and of alerts both sides of their comparisons."""
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                yield f"{path.stem}: {panel['title']}", expression
    for alert in alerts():
        sides = re.split(r" (?:>|==) ", alert["expr"])
        yield from ((alert["alert"], side) for side in sides if not re.fullmatch(r"[\d.]+", side))


async def load(address: str) -> None:
    """Chats, completions, grammars, resumed prefixes, and more than the queue takes, for a while."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one(call: Any) -> None:
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise

        end_s = time.monotonic() + LOAD_S
        while time.monotonic() < end_s:
            options = greedy(max_tokens=24, ignore_eos=True)
            calls = [stub.Generate(by_ids([10 + i] * 40, options)) for i in range(12)]
            calls.append(stub.Chat(inference_pb2.ChatRequest(messages=[user("hello")], options=greedy(max_tokens=8))))
            held = greedy(max_tokens=16)
            held.grammar.regex = "[ab]{8,12}"
            await asyncio.gather(*map(one, calls))
            # By itself: among so many it may be the one that finds the queue full, each time.
            await one(stub.Generate(inference_pb2.GenerateRequest(text="write", options=held)))


async def test_every_expression_of_dashboards_and_alerts_has_data_from_a_loaded_engine(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ORDER}
    flags = {name: ["--metrics-port", str(port)] for name, port in ports.items()}
    flags["scheduler"] += ["--max-num-seqs", "4", "--max-waiting-requests", "6"]
    model = tiny_llama(tmp_path / "tiny-llama")
    with (
        running(model, tmp_path, **flags) as cluster,
        prometheus(tmp_path, [f"127.0.0.1:{port}" for port in ports.values()]) as address,
    ):
        await load(cluster.address)
        await asyncio.sleep(2)
        told = [(where, expression, query(address, expression)) for where, expression in evaluable()]
        missing = [
            f"{where}: {expression} is {values}"
            for where, expression, values in told
            if not values or not any(math.isfinite(value) for value in values)
        ]
        assert not missing, "\n".join(missing)
        assert len(told) > 80
        assert query(address, "sum(up)") == [3]
