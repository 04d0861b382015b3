"""Requests through a real scheduler: a frontend above it, an executor without a model below, gRPC between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import StubExecutor
from tests.support.attached import Frontend, scheduler_for, until_idle, write_model

VOCAB = 512


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", vocab_size=VOCAB)


async def test_a_request_receives_its_ids_and_one_finish(model: Path) -> None:
    async with StubExecutor(vocab_size=VOCAB) as stub, scheduler_for(stub, model) as server:
        async with Frontend(server) as frontend:
            told = await frontend.run([5, 6, 7], max_tokens=9, seed=42)
            assert told.ids == expected_ids([5, 6, 7], 42, 9, VOCAB)
            await until_idle(server)
