"""Clusters of three real processes, shared by the tests of a module where they can be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.cluster import Cluster, running


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The real model, SmolLM2-135M-Instruct."""
    from services.executor.embedded import fetch

    return fetch(print)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama checkpoint."""
    from tests.support.checkpoints import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def tiny_cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster on the tiny checkpoint with default flags."""
    with running(tiny, tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


@pytest.fixture
async def tiny_channel(tiny_cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the tiny cluster's frontend."""
    async with grpc.aio.insecure_channel(tiny_cluster.address) as channel:
        yield channel
