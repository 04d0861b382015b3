"""The metrics of several frontend processes on one port: each tells its own, its number as the label `worker`.

A process answers on a socket that its parent made, on loopback, and keeps for the one that may replace it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.common.telemetry.exposition import Endpoint, Scraped, listen
from services.common.telemetry.names import WORKER

FETCH_S = 2.5
"""A process that does not answer in time, since it is being replaced or is stuck, is left out."""

_OPENMETRICS = "application/openmetrics-text; version=1.0.0"

log = logging.getLogger(__name__)


class WorkerMetrics:
    """`listeners` are for the processes, by number; `endpoint` tells what all of them do."""

    def __init__(self, host: str, port: int, workers: int) -> None:
        """Raises StartError where the port is taken."""
        public = listen(host, port)
        self.listeners = [listen("127.0.0.1", 0) for _ in range(workers)]
        self._urls = [f"http://127.0.0.1:{listener.getsockname()[1]}/metrics" for listener in self.listeners]
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="worker-metrics")
        registry = CollectorRegistry()
        registry.register(Scraped(self._families))
        self._endpoint = Endpoint(public, registry)
        log.info("serving metrics of %d processes on %s:%d", workers, host, self._endpoint.port)

    def close(self) -> None:
        """Stops answering."""
        self._endpoint.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for listener in self.listeners:
            listener.close()

    def _families(self) -> list[Family]:
        return merged(list(self._pool.map(_fetch, self._urls)))


def inherited(descriptor: int) -> socket.socket:
    """The socket that a process was started with."""
    return socket.socket(fileno=descriptor)


def merged(texts: Sequence[str]) -> list[Family]:
    """OpenMetrics of each process as one, with its number; "" where there is none."""
    families: dict[str, Family] = {}
    for number, text in enumerate(texts):
        for family in text_string_to_metric_families(text) if text else ():  # type: ignore[no-untyped-call]
            into = families.setdefault(family.name, Family(family.name, family.documentation, family.type))
            into.samples += _numbered(family, number)
    return list(families.values())


def _numbered(family: Family, number: int) -> Iterator[Any]:
    return (sample._replace(labels={**sample.labels, WORKER: str(number)}) for sample in family.samples)


def _fetch(url: str) -> str:
    with contextlib.suppress(OSError):
        request = urllib.request.Request(url, headers={"Accept": _OPENMETRICS})
        with urllib.request.urlopen(request, timeout=FETCH_S) as answer:
            return str(answer.read().decode())
    return ""
