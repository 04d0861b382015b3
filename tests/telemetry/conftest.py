"""A collector of spans, and the embedded model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loadtest.otlp_sink import OtlpSink


@pytest.fixture
async def sink() -> AsyncIterator[OtlpSink]:
    """Listens on loopback; the standard's variables are not set."""
    async with OtlpSink() as collector:
        yield collector


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The real model, SmolLM2-135M-Instruct."""
    from services.executor.embedded import fetch

    return fetch(print)
