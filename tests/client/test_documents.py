"""What the documents show is true: their programs run, their excerpts are of real files, their links lead somewhere."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import textwrap
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from triptych.inference.v1 import inference_pb2 as pb

from services.cli.up import examples
from tests.client.scripted import scripted_server
from tests.client.test_client import _whole_stream

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in (
        ".",
        "docs",
        "docs/api",
        "proto",
        "clients/python",
        "clients/node",
        "clients/go",
        "clients/java",
        "clients/cpp",
    )
    for path in (ROOT / folder).glob("*.md")
)
README = (ROOT / "README.md").read_text()


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, cwd=ROOT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("document", ["README.md", "clients/python/README.md"])
async def test_the_python_programs_run(document: str) -> None:
    first, *others = _blocks((ROOT / document).read_text(), "python")
    async with scripted_server() as (scripted, address):
        scripted.messages = _whole_stream()
        shown = await _output(sys.executable, "-c", first.replace("127.0.0.1:50051", address))
    assert shown == "Hello"
    assert scripted.requests[0].messages[0].content[0].text == "Why is the sky blue?"
    for block in others:
        compile(block, document, "exec")


@pytest.mark.parametrize(("language", "file"), [("javascript", "clients/node/chat.mjs"), ("go", "clients/go/chat.go")])
def test_excerpts_are_of_the_programs_they_name(language: str, file: str) -> None:
    program = {line.strip() for line in (ROOT / file).read_text().splitlines()}
    (excerpt,) = _blocks(README, language)
    assert [line for line in excerpt.splitlines() if line.strip() not in program | {"})"}] == []


def _grpcurl(text: str) -> list[str]:
    (command,) = re.findall(r"^ *(\S*grpcurl -plaintext -d .*?Chat)$", text, re.MULTILINE | re.DOTALL)
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("source", ["README", "up"])
async def test_the_grpcurl_call_streams_an_answer(source: str) -> None:
    async with scripted_server() as (scripted, address):
        scripted.messages = _whole_stream()
        text = README.replace("127.0.0.1:50051", address) if source == "README" else examples(address, "m")
        program, *arguments = _grpcurl(text)
        shown = await _output(str(Path(sys.executable).parent / Path(program).name), *arguments)
    assert '"text": "Hel"' in shown
    assert scripted.requests == [
        pb.ChatRequest(messages=[pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="Hi!")])])
    ]


async def test_the_python_example_of_up_runs() -> None:
    async with scripted_server() as (scripted, address):
        scripted.messages = _whole_stream()
        (program,) = re.findall(r"<<'END'\n(.*?)\n  END", examples(address, "m"), re.DOTALL)
        assert await _output(sys.executable, "-c", textwrap.dedent(program)) == "Hello"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_files(document: Path) -> None:
    text = (ROOT / document).read_text()
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [target for target in targets if not (ROOT / document).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_that_are_named_exist(document: Path) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:services|kernels|tests|loadtest|clients|docs|proto)/[\w./-]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
