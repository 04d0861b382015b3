"""The checkpoint that all fleets serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")
