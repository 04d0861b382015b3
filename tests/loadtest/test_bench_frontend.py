"""The frontend's benchmark: real processes with few streams, and delays that are what they say."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from triptych.inference.v1 import inference_pb2

from loadtest import bench_frontend
from loadtest.bench_frontend import WAYS, Found, Frontends, Run
from loadtest.paced_engine import PacedEngine
from loadtest.pipeline import StreamError
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import VOCAB_SIZE, attached, text_checkpoint

KEYS = {"delivery_p50_ms", "delivery_p99_ms"}
"""What every last line of this benchmark holds, at least."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny-text")


def test_the_whole_benchmark_with_few_streams(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--streams", "4", "--tokens", "12", "--skipped-tokens", "4", "--tokens-per-s", "100"]
    assert bench_frontend.main(["--quick", "--model", str(model), *small]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found.keys() >= KEYS
    assert 0 < found["delivery_p50_ms"] <= found["delivery_p99_ms"]
    assert all(any(line.startswith(way.name) for line in shown) for way in WAYS)


@pytest.mark.parametrize("hold", [0, 4])
async def test_a_delay_is_from_the_send_of_a_deltas_newest_id(model: Path, hold: int) -> None:
    async with PacedEngine(step_s=0.02, vocab_size=VOCAB_SIZE) as engine:
        frontend = Frontend(FrontendConfig(port=0, engine=engine.address, model=str(model)))
        await frontend.start()
        try:
            await attached(frontend)
            served = Frontends(f"127.0.0.1:{frontend.server.port}", ())
            start_s = time.perf_counter()
            run = await bench_frontend.measure_once(
                engine, served, streams=2, tokens=12, skipped=4, min_delta_tokens=hold
            )
            span_ms = 1000 * (time.perf_counter() - start_s)
        finally:
            await frontend.close()
    assert len(run.delays_ms) == (2 * 2 if hold else 2 * 8)
    assert min(run.delays_ms) > 0 and max(run.delays_ms) < span_ms
    assert run.tokens == 24 and run.span_s >= 11 * 0.02


async def test_ids_that_are_missing_void_the_run() -> None:
    engine = PacedEngine(step_s=1, vocab_size=VOCAB_SIZE)
    engine._step_times_s, engine._first_steps = [1.0, 2.0], {8: 0}
    message = inference_pb2.GenerateResponse(choices=[inference_pb2.Choice(token_ids=[5, 6])]).SerializeToString()
    assert bench_frontend._delays_ms(engine, 7, [(2.5, message)], 2, 0) == [500.0]
    with pytest.raises(StreamError, match="2 ids came of a stream of 3"):
        bench_frontend._delays_ms(engine, 7, [(2.5, message)], 3, 0)
    await asyncio.sleep(0)


def test_figures_are_medians_over_repetitions() -> None:
    runs = [Run([1.0, 2.0, 3.0], 100, 1.0, 0.01), Run([5.0], 100, 1.0, 0.02), Run([4.0], 100, 1.0, 0.03)]
    flat = bench_frontend.values(Found({WAYS[0]: runs}))
    assert flat["delivery_p50_ms"] == 4.0  # of 2, 5 and 4
    assert flat["delivery_frontend_cpu_us_per_token"] == pytest.approx(200)
