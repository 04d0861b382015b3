"""docs/security.md: its commands and files do what it says."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import grpc
import pytest
import yaml

from services.cli import up_plan
from services.frontend.auth.listed import Tokens
from services.frontend.config import FrontendConfig
from tests.common.test_tls import flush, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def blocks(language: str) -> list[str]:
    """Of the page, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page's openssl commands were run in."""
    folder = tmp_path_factory.mktemp("page")
    (script,) = blocks("sh")
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


async def test_its_certificates_serve_all_three_hops_of_its_configuration(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    (made / "triptych.yaml").write_text(blocks("yaml")[0])
    plan = up_plan.read(["--config", "triptych.yaml", "--port", "0"])
    assert plan.probes["frontend"] != plan.addresses["frontend"]
    for client, server in (("frontend", "scheduler"), ("scheduler", "executor")):
        async with serving(plan.configs[server].tls()) as listening:
            peer = plan.configs[client].peer_tls()  # type: ignore[attr-defined]
            assert await flush(listening.port, peer) is grpc.StatusCode.OK
            assert await flush(listening.port, None) is grpc.StatusCode.UNAVAILABLE


def test_its_file_of_tokens_is_one(tmp_path: Path) -> None:
    text = blocks("yaml")[1]
    (tmp_path / "tokens.yaml").write_text(text)
    Tokens(tmp_path / "tokens.yaml")
    assert yaml.safe_load(text)[0]["sha256"] == hashlib.sha256(b"secret").hexdigest()


def test_the_keys_it_names_exist() -> None:
    keys = set(re.findall(r"`((?:tls|peer|auth|jwt|tenant|admin|health)_[a-z_]+)`", PAGE))
    from services.executor.config import ExecutorConfig
    from services.scheduler.config import SchedulerConfig

    known = set().union(*(kind.model_fields for kind in (FrontendConfig, SchedulerConfig, ExecutorConfig)))
    assert keys
    assert keys - known == set()
