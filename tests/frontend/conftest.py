"""Checkpoints shared by the frontend's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frontend.harness import text_checkpoint


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny-text")
