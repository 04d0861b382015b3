"""The three services as processes whose collector swallows all: they answer, drain and end as without one."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from loadtest.otlp_sink import OtlpSink
from services.common.telemetry.export import CLOSE_S
from tests.support.calls import by_ids, generate, greedy
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import ORDER, running
from tests.telemetry import edges
from tests.telemetry.stack import NOT_SAMPLED, SAMPLED

DRAIN_S = 2
GRACE_S = DRAIN_S + 5.0
"""What whoever ends a process gives it: its drain, and `triptych up`'s margin."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def black_hole() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
async def test_a_black_hole_for_a_collector_changes_no_id_and_no_grace(
    tiny: Path, black_hole: str, tmp_path: Path
) -> None:
    flags = ["--otlp-endpoint", black_hole, "--drain-s", str(DRAIN_S)]
    request = by_ids([5, 6, 7], greedy(max_tokens=20, ignore_eos=True))
    with running(tiny, tmp_path, executor=flags, scheduler=flags, frontend=[*flags, "--workers", "2"]) as cluster:
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            traced = await generate(channel, request, metadata=SAMPLED)
            untraced = await generate(channel, request, metadata=NOT_SAMPLED)
        assert traced.ids == untraced.ids and len(traced.ids) == 20
        await asyncio.sleep(1)  # exports are under way, and hang
        for name in reversed(ORDER):
            cluster.kill(name, signal.SIGTERM)
            begun_s = time.monotonic()
            code = cluster.processes[name].wait(GRACE_S)
            assert code == 0, cluster.log(name)
            assert time.monotonic() - begun_s < GRACE_S - CLOSE_S
            assert "spans were not sent" in cluster.log(name) or "takes no spans" in cluster.log(name)


@pytest.mark.slow
async def test_each_of_several_frontend_processes_tells_its_own_spans(
    tiny: Path, sink: OtlpSink, tmp_path: Path
) -> None:
    num_calls = 24  # the kernel gives each connection to one of the two: to one alone in a run of millions
    with running(tiny, tmp_path, frontend=["--otlp-endpoint", sink.endpoint, "--workers", "2"]) as cluster:
        await asyncio.sleep(2)  # the second may still be starting
        for _ in range(num_calls):
            async with grpc.aio.insecure_channel(cluster.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                await generate(channel, by_ids([5], greedy(max_tokens=1)))
        spans = await sink.until(lambda spans: sum(span.kind == "SERVER" for span in spans) == num_calls)
    assert {span.service for span in spans} == {edges.FRONTEND} and len(sink.instances) == 2
