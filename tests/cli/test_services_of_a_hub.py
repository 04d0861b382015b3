"""Each service by itself brings what it reads of a hub's model, pinned, and tells the commit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.checkpoint import find
from services.common.errors import StartError
from services.executor.main import main as executor
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from services.scheduler.config import SchedulerConfig
from services.scheduler.identity import Model
from tests.support.checkpoints import tiny_llama
from tests.support.hub import Hub, ask_here, serving

MODEL = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One that this process asks, with `org/tiny` at the tag v1, and a later main."""
    with serving() as server:
        ask_here(monkeypatch, server, tmp_path / "cache")
        server.repo(MODEL).add(tiny_llama(tmp_path / "first"), "v1")
        server.repo(MODEL).add(tiny_llama(tmp_path / "second", seed=1), "main")
        yield server


async def test_a_frontend_brings_the_text_side(hub: Hub) -> None:
    frontend = Frontend(FrontendConfig(port=0, model=MODEL, revision="v1"))
    assert (frontend.model.name, frontend.model.revision) == (MODEL, hub.repos[MODEL].refs["v1"])
    assert hub.asked_for("GET", "tokenizer.json") and not hub.asked_for("GET", "safetensors")
    hub.asked.clear()
    assert Frontend(FrontendConfig(port=0, model=MODEL, revision="v1", offline=True)).model.name == MODEL
    assert hub.asked == []


def test_a_scheduler_brings_the_text_side(hub: Hub) -> None:
    model = Model.read(SchedulerConfig(model=MODEL, revision="v1"))
    assert (model.name, model.revision) == (MODEL, hub.repos[MODEL].refs["v1"])
    assert not hub.asked_for("GET", "safetensors")
    hub.asked.clear()
    assert Model.read(SchedulerConfig(model=MODEL, revision="v1", offline=True)).revision == model.revision
    assert hub.asked == []


def test_an_executor_brings_the_weights(hub: Hub) -> None:
    interval_s = sys.getswitchinterval()
    arguments = ["--model", MODEL, "--revision", "v1", "--port", "0", "--threads", "99999"]
    try:
        with pytest.raises(StartError, match="--threads is 99999"):  # which is looked at once the files are here
            executor(arguments)
        hub.asked.clear()
        with pytest.raises(StartError, match="--threads is 99999"):
            executor([*arguments, "--offline"])
    finally:
        sys.setswitchinterval(interval_s)
    assert hub.asked == []
    assert (find(MODEL, revision="v1", offline=True, weights=True) / "model.safetensors").is_file()
