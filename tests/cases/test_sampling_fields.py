"""Rows S2, S3 and S4 at the doors: what a caller asks for reaches the engine as it is, on every call.

What the sampler makes of it is in test_sampling.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2

from tests.frontend.harness import Served, scripted, serving, text_checkpoint
from tests.support.calls import EVERY_CALL, ask


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("sampling") / "tiny-text")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    async with serving(model, scripted([50])) as served:
        yield served


async def sent(served: Served, rpc: str, **sampling: Any) -> generation_pb2.Sampling:
    """What the engine is asked for."""
    options = inference_pb2.Options(max_tokens=1, sampling=generation_pb2.Sampling(**sampling))
    assert (await ask(served.channel, rpc, options)).ids == [50]
    return served.engine.submits[-1].sampling


@EVERY_CALL
async def test_S2_a_tiny_temperature_reaches_the_engine_as_it_is(served: Served, rpc: str) -> None:
    for temperature in (0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3):
        found = await sent(served, rpc, temperature=temperature)
        assert found.temperature == pytest.approx(temperature, rel=1e-6)


@EVERY_CALL
async def test_S3_top_k_at_its_edges(served: Served, rpc: str) -> None:
    for top_k, normal in ((-1, -1), (0, -1), (1, 1), (511, 511), (512, -1), (513, -1), (9_999_999, -1)):
        assert (await sent(served, rpc, top_k=top_k)).top_k == normal


@EVERY_CALL
async def test_S4_each_penalty_reaches_the_engine_as_it_is_and_the_others_stay_off(served: Served, rpc: str) -> None:
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name, value in (("repetition_penalty", 1.5), ("presence_penalty", -2.0), ("frequency_penalty", 2.0)):
        found = await sent(served, rpc, **{name: value})
        assert {key: getattr(found, key) for key in off} == off | {name: value}
