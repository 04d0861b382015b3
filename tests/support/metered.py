"""An engine whose services tell their metrics, all in this process, and the metrics read as Prometheus reads them."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families
from prometheus_client.samples import Sample
from triptych.inference.v1 import inference_pb2_grpc

from loadtest.stub_executor import StubExecutor
from services.common.telemetry.names import Metric, prometheus_label
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from services.scheduler.server import SchedulerServer
from tests.frontend.harness import VOCAB_SIZE, attached
from tests.support.attached import scheduler_for


@dataclass(frozen=True)
class Scrape:
    """What one answer of an endpoint holds."""

    samples: list[Sample]

    def value(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """The sum of the metric's samples that have these labels, named as in Prometheus; 0 where there are none."""
        wanted = {prometheus_label(key): value for key, value in labels.items()}
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == metric.prometheus + suffix and wanted.items() <= sample.labels.items()
        )

    def count(self, metric: Metric, **labels: str) -> float:
        """How many durations a histogram has."""
        return self.value(metric, "_count", **labels)

    def buckets(self, metric: Metric) -> dict[str, float]:
        """Cumulative, by upper bound, over all labels."""
        found: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == metric.prometheus + "_bucket":
                found[sample.labels["le"]] = found.get(sample.labels["le"], 0) + sample.value
        return found

    def samples_of(self, prefix: str) -> dict[tuple[object, ...], float]:
        """Values of the samples whose names begin so, by name and labels."""
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for sample in self.samples
            if sample.name.startswith(prefix)
        }

    def names(self) -> set[str]:
        """Of the samples."""
        return {sample.name for sample in self.samples}


def read(port: int | None, *, openmetrics: bool = False) -> str:
    """The text."""
    accept = "application/openmetrics-text" if openmetrics else "text/plain"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


async def scrape(port: int | None, *, openmetrics: bool = False) -> Scrape:
    """The samples; beside the event loop, which has to answer meanwhile."""
    text = await asyncio.to_thread(read, port, openmetrics=openmetrics)
    parse = open_families if openmetrics else families
    return Scrape([sample for family in parse(text) for sample in family.samples])


@dataclass(frozen=True)
class Metered:
    """A frontend and a scheduler over a stub executor, and a client's stub."""

    frontend: Frontend
    scheduler: SchedulerServer
    executor: StubExecutor
    channel: grpc.aio.Channel

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def of_frontend(self) -> Scrape:
        """Its metrics now."""
        assert self.frontend.metrics is not None
        return await scrape(self.frontend.metrics.port)

    async def of_scheduler(self) -> Scrape:
        """Its metrics now."""
        return await scrape(self.scheduler.metrics_port)


@asynccontextmanager
async def metered(
    model: Path, *, stub: StubExecutor | None = None, frontend: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Metered]:
    """Ready to generate; `config` is the scheduler's."""
    async with (
        stub or StubExecutor(vocab_size=VOCAB_SIZE) as executor,
        scheduler_for(executor, model, metrics_port=0, **config) as scheduler,
    ):
        address = f"127.0.0.1:{scheduler.server.port}"
        settings = FrontendConfig(port=0, engine=address, model=str(model), metrics_port=0, **(frontend or {}))
        front = Frontend(settings)
        await front.start()
        try:
            await attached(front)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front.server.port}") as channel:
                yield Metered(front, scheduler, executor, channel)
        finally:
            await front.close()
