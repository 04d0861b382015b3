"""`triptych up` of one file with mutual TLS on every hop, metrics of all three, and a collector that speaks TLS."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc

from loadtest.otlp_sink import OtlpSink, SpanSeen
from services.common.telemetry import names
from tests.support.certificates import SERVER, Authority, Files
from tests.support.cluster import free_port
from tests.support.metered import scrape
from tests.support.metric_sink import MetricSink
from tests.support.secured import NAMES, issue
from tests.telemetry import edges
from triptych_client import Client, TriptychError, tls_credentials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVICES = ("frontend", "scheduler", "executor")
SECRET = "s3cret-of-the-collector"
TOKENS = 12
PATIENCE_S = 100


@dataclass
class Made:
    """What was configured, and who signs. `flags` are those of a client that is an admin."""

    authority: Authority
    client: Files
    config: dict[str, dict[str, Any]]
    file: Path

    @property
    def flags(self) -> list[str]:
        own = ["--tls-cert", str(self.client.cert), "--tls-key", str(self.client.key)]
        return ["--tls-ca", str(self.authority.ca), *own, "--tls-server-name", SERVER]


def made(folder: Path, collector: str, collectors_ca: Path) -> Made:
    authority = Authority(folder)
    files: dict[str, Files] = {}
    issue(authority, files)
    config: dict[str, dict[str, Any]] = {}
    for name in SERVICES:
        config[name] = {
            "tls_cert": str(files[name].cert),
            "tls_key": str(files[name].key),
            "tls_client_ca": str(authority.ca),
            "metrics_port": free_port(),
            "otlp_endpoint": collector,
            "otlp_ca": str(collectors_ca),
            "otlp_headers": [f"x-key={SECRET}"],
            "log_format": "json",
        }
    for name in ("frontend", "scheduler"):
        dials = {"peer_ca": str(authority.ca), "peer_cert": str(files[name].cert), "peer_key": str(files[name].key)}
        config[name] |= dials
    mine = NAMES["client"]
    config["frontend"] |= {"auth": "mtls", "admin_names": [mine], "admin_port": free_port()}
    config["scheduler"] |= {
        "port": free_port(),
        "tls_client_names": [NAMES["frontend"]],
        "admin_names": [mine],
    }
    config["executor"] |= {"tls_client_names": [NAMES["scheduler"]]}
    file = folder / "triptych.yaml"
    file.write_text(yaml.safe_dump(config))
    return Made(authority, files["client"], config, file)


async def run(*arguments: str) -> tuple[int, str, str]:
    """A command: exit code, standard output, standard error."""
    command = (sys.executable, "-m", "services.cli.main", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def up(model: Path, made: Made, log: Path) -> AsyncIterator[tuple[Process, str]]:
    """Running: the process and the frontend's address."""
    flags = ("--port", "0", "--model", str(model), "--config", str(made.file), "--ready-json")
    with log.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli.main", "up", *flags),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=err,
            env=os.environ | {"OTEL_METRIC_EXPORT_INTERVAL": "500"},
        )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        assert line, f"it has ended; see {log}"
        yield process, json.loads(line)["address"]
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)


def check_trace(spans: list[SpanSeen]) -> None:
    assert len({span.trace_id for span in spans}) == 1
    assert {span.service for span in spans} == {edges.FRONTEND, edges.SCHEDULER, edges.EXECUTOR}
    assert {*edges.parts(spans)} == {*edges.PARTS}


async def test_all_three_talk_over_mutual_tls_and_tell_one_trace_and_their_metrics(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "otlp").mkdir()
    collectors = Authority(tmp_path / "otlp", "collectors")
    own = collectors.issue("collector")
    credentials = grpc.ssl_server_credentials([(own.key.read_bytes(), own.cert.read_bytes())])
    sink, metrics = OtlpSink(credentials=credentials), MetricSink()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, sink.server)
    log = tmp_path / "up.log"
    async with sink:
        made_ = made(tmp_path, sink.endpoint, collectors.ca)
        code, printed, _ = await run("up", "--config", str(made_.file), "--print-config")
        assert code == 0 and SECRET not in printed and printed.count("# otlp_headers: x-key=...  # file") == 3
        async with up(tiny, made_, log) as (process, address):
            shown = tls_credentials(made_.authority.ca, made_.client.cert, made_.client.key)
            async with Client(address, credentials=shown) as client:
                said = [d async for d in client.chat("Hi", max_tokens=TOKENS, temperature=0, ignore_eos=True)]
            assert sum(len(delta.token_ids) for delta in said) == TOKENS
            async with Client(address, credentials=tls_credentials(made_.authority.ca)) as stranger:
                with pytest.raises(TriptychError):
                    await stranger.generate_unary("Hi", max_tokens=1)

            def is_whole(spans: list[SpanSeen]) -> bool:
                return edges.has_ended(*edges.PARTS)(spans) and bool(edges.steps(spans, edges.EXECUTOR))

            check_trace(await sink.until(is_whole, timeout_s=60))
            assert sink.metadata["x-key"] == SECRET

            told = {name: await scrape(made_.config[name]["metrics_port"]) for name in SERVICES}
            assert told["frontend"].value(names.CLIENT_TOKENS) == TOKENS
            assert told["scheduler"].value(names.GENERATION_TOKENS) == TOKENS
            assert {name: scraped.value(names.INFO, service=name) for name, scraped in told.items()} == dict.fromkeys(
                SERVICES, 1
            )
            async with asyncio.timeout(60):
                while len(metrics.services) < 3 or metrics.total(names.CLIENT_TOKENS) < TOKENS:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

            scheduler = f"127.0.0.1:{made_.config['scheduler']['port']}"
            admin = f"127.0.0.1:{made_.config['frontend']['admin_port']}"
            (code, out, err), (plain, _, why) = await asyncio.gather(
                run("log-level", "error", scheduler, admin, *made_.flags), run("log-level", "error", scheduler, admin)
            )
            assert code == 0, err
            assert sorted(out.splitlines()) == sorted(
                [f"{scheduler} scheduler: error", f"{scheduler} executor: error", f"{admin} frontend: error"]
            )
            assert plain == 1 and "UNAVAILABLE" in why
            process.terminate()
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    text = log.read_text()
    assert f"top {scheduler} --tls-ca FILE --tls-cert FILE --tls-key FILE" in text
    assert SECRET not in text
    audited = [json.loads(line.partition(" | ")[2]) for line in text.splitlines() if '"admin call"' in line]
    by_certificate = ", ".join([NAMES["client"], SERVER, "localhost", "127.0.0.1"])
    assert sorted(line["identity"] for line in audited) == sorted([NAMES["client"], by_certificate])
