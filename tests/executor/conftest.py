from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 512 ids, 1024 tokens of context."""
    return tiny_llama(tmp_path_factory.mktemp("tiny"))
