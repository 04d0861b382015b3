"""What the scheduler's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.attached import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint folder with 512 ids and a context of 1024 tokens; the stub executor's vocabulary is the same."""
    return write_model(tmp_path / "model", vocab_size=512, context_tokens=1024)
