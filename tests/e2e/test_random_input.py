"""Random requests at three real services: no crash, no INTERNAL, and an engine that is empty afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import grpc
import pytest
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from tests.support import random_calls
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import health, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_1000_random_requests_leave_an_empty_engine(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="client")
    thread.start()
    try:
        model = tiny_llama(tmp_path / "tiny-llama")
        with running(model, tmp_path, scheduler=["--max-model-len", "256"]) as cluster:
            pids = {name: process.pid for name, process in cluster.processes.items()}
            codes = random_calls.run(cluster.address, loop, 1_000, lambda: None)
            assert codes["OK"] > 50
            with grpc.insecure_channel(f"127.0.0.1:{cluster.ports['scheduler']}") as channel:
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                deadline_s = time.monotonic() + 30
                # What an aborted request held is free once the steps in flight have been applied.
                while (load := stub.GetLoad(admin_pb2.GetLoadRequest()).heartbeat).free_blocks < load.total_blocks and (
                    time.monotonic() < deadline_s
                ):
                    time.sleep(0.1)
                assert (load.running_requests, load.waiting_requests) == (0, 0)
                assert load.free_blocks == load.total_blocks
            assert {name: process.pid for name, process in cluster.processes.items()} == pids
            assert all(process.poll() is None for process in cluster.processes.values())
            assert health(cluster.ports["frontend"], "generate") == "SERVING"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
