"""The programs in other languages get from three real services what the Python client gets."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.cluster import Cluster, running
from triptych_client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = Path(__file__).parents[2] / "clients"
QUESTION = "Why is the sky blue?"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")
    with running(model, tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def node() -> list[str]:
    _run(["npm", "ci", "--no-progress"], CLIENTS / "node")
    return ["node", str(CLIENTS / "node" / "chat.mjs")]


@pytest.fixture(scope="module")
def go() -> list[str]:
    _run(["./build.sh"], CLIENTS / "go")
    return [str(CLIENTS / "go" / "build" / "chat")]


@pytest.fixture(scope="module")
def java() -> list[str]:
    _run(["./build.sh"], CLIENTS / "java")
    return [str(CLIENTS / "java" / "chat")]


@pytest.fixture(scope="module")
def cpp() -> list[str]:
    _run(["./build.sh"], CLIENTS / "cpp")
    return [str(CLIENTS / "cpp" / "build" / "chat")]


LANGUAGES = pytest.mark.parametrize("language", ["node", "go", "java", "cpp"])


@LANGUAGES
async def test_a_program_streams_what_the_python_client_streams(
    language: str, cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    program: list[str] = request.getfixturevalue(language)
    async with Client(cluster.address) as client:
        expected = await client.chat_unary(QUESTION, max_tokens=128, temperature=0)
    ended = _run([*program, cluster.address, QUESTION], CLIENTS)
    usage = expected.usage
    shown = f"{expected.text}\n[{usage.prompt_tokens} + {usage.completion_tokens} tokens]\n"
    assert ended.stdout == shown.encode()


@LANGUAGES
def test_a_program_tells_the_status_of_a_call_that_fails(language: str, request: pytest.FixtureRequest) -> None:
    program: list[str] = request.getfixturevalue(language)
    ended = subprocess.run([*program, "127.0.0.1:9", QUESTION], capture_output=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.lower().startswith(b"chat: unavailable: ")


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    assert shutil.which(command[0]) or (folder / command[0]).exists(), f"{command[0]}: make test-tools"
    ended = subprocess.run(command, cwd=folder, capture_output=True, timeout=300)
    assert ended.returncode == 0, (ended.stdout + ended.stderr).decode()
    return ended
