"""compose.yaml without containers: its commands as processes, in its order, its networks' names as loopback ports."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from loadtest.otlp_sink import OtlpSink
from tests.support.calls import by_text, generate, greedy
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import Cluster, free_port
from tests.support.images import ROOT

COMPOSED: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSED["services"]


def in_order(name: str, before: tuple[str, ...] = ()) -> list[str]:
    """What a service depends on, then itself."""
    assert name not in before, f"{name} depends on itself"
    needed = SERVICES[name].get("depends_on", [])
    return [*dict.fromkeys(one for other in needed for one in in_order(other, (*before, name))), name]


def command(name: str, model: Path, ports: dict[str, int]) -> list[str]:
    """As compose fills it in; the public address stays loopback's, and each port is the test's."""
    told = " ".join(SERVICES[name]["command"])
    told = re.sub(r"/models/\$\{MODEL:\?[^}]*\}", str(model), told).replace("--host=0.0.0.0", "--host=127.0.0.1")
    for peer, port in ports.items():
        told = re.sub(rf"\b{peer}:\d+", f"127.0.0.1:{port}", told)
    assert "${" not in told
    return [*told.split(), f"--port={ports[name]}"]


def test_a_service_shares_a_network_with_each_that_it_calls_and_the_executor_is_beyond_the_public_one() -> None:
    for name, one in SERVICES.items():
        for peer in re.findall(r"\b(scheduler|executor|collector):\d+", " ".join(one.get("command", []))):
            assert set(one["networks"]) & set(SERVICES[peer]["networks"]), f"{name} cannot reach {peer}"
    assert set(SERVICES["frontend"]["networks"]).isdisjoint(SERVICES["executor"]["networks"])
    for network in {network for name in ("scheduler", "executor") for network in SERVICES[name]["networks"]}:
        assert COMPOSED["networks"][network]["internal"] is True
    for name in ("frontend", "scheduler", "executor"):
        assert any(volume.endswith(":/models:ro") for volume in SERVICES[name].get("volumes", []))
        seconds = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert seconds > 30 + 5, "longer than a drain and what follows it"


@pytest.mark.timeout(180)
async def test_its_commands_serve_an_answer_and_their_spans_reach_the_collector(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "models" / "tiny-llama")
    names = in_order("frontend")
    assert names == ["executor", "scheduler", "frontend"]
    cluster = Cluster(model, tmp_path, ports={name: free_port() for name in names})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")]).rstrip(":")}
    async with OtlpSink() as collector:
        ports = {**cluster.ports, "collector": collector.port}
        try:
            for name in names:
                started = [sys.executable, "-m", "services.cli.main", name, *command(name, model, ports)]
                with (tmp_path / f"{name}.log").open("ab") as log:
                    cluster.processes[name] = subprocess.Popen(started, stdout=log, stderr=log, env=environment)  # noqa: ASYNC220
            await asyncio.to_thread(cluster.wait_generate, True, timeout_s=120)
            async with grpc.aio.insecure_channel(cluster.address) as channel:
                answer = await generate(channel, by_text("hello", greedy(max_tokens=5, ignore_eos=True)))
            assert len(answer.ids) == 5
        finally:
            await asyncio.to_thread(cluster.stop)
        services = {span.service for span in collector.spans}
    assert len(services) == 3, services
