"""`triptych model`: what is fetched, listed, and found wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import model, model_verify, safetensors_file, up_fit
from services.cli.main import main
from services.common.checkpoint import find
from services.common.config import ServiceConfig
from services.common.errors import StartError
from services.executor.config import ExecutorConfig
from services.frontend.config import FrontendConfig
from services.scheduler.config import SchedulerConfig
from tests.support.checkpoints import tiny_llama
from tests.support.hub import Hub, ask_here, serving

MODEL = "org/tiny"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("source") / "sharded", shards=2)


@pytest.fixture
def served(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with `org/tiny` in two shards, an empty cache, and no embedded model."""
    with serving() as server:
        ask_here(monkeypatch, server, tmp_path / "cache")
        monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "own"))
        server.repo(MODEL).add(source)
        yield server


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(source, tmp_path / "copy"))


def problems(path: Path) -> list[str]:
    """What the checks before those of the services find wrong."""
    checks = [model_verify.check_files(path), model_verify.check_headers(path), model_verify.check_hashes(path)]
    return [f"{check.name}: {problem}" for check in checks for problem in check.problems]


def test_fetch_prints_the_folder_and_says_the_commit(served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", MODEL]) == 0
    shown = capsys.readouterr()
    path = Path(shown.out.strip())
    assert len(list(path.glob("*.safetensors"))) == 2
    assert shown.err.splitlines() == [f"org/tiny at main is commit {served.repos[MODEL].refs['main']}, in {path}"]


def test_fetch_without_weights_is_what_a_frontend_reads(served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", MODEL, "--revision", "main", "--without-weights"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert (path / "tokenizer.json").is_file() and not list(path.glob("*.safetensors"))
    assert find(MODEL, offline=True) == path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["org/none"], "has no model of that name"),
        ([MODEL, "--revision", "v9"], "has no revision 'v9'"),
        (["no-slash"], "cannot fetch 'no-slash': a hub's model is named ORG/NAME"),
        (["--revision", "v1"], "whole and in one version"),
        (["--without-weights"], "whole and in one version"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    served: Hub, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "fetch", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("triptych: error: ") and says in line


@pytest.mark.parametrize("command", ["fetch", "list"])
def test_the_extra_that_brings_the_hubs_client_is_named(command: str, tmp_path: Path) -> None:
    arguments = ["model", command, *([MODEL] if command == "fetch" else [])]
    code = (
        "import sys; sys.modules['huggingface_hub'] = None; "
        f"from services.cli.main import main; sys.exit(main({arguments!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.endswith("pip install 'triptych[cli]' (huggingface_hub is not installed)")


@pytest.mark.parametrize("service", ["frontend", "scheduler"])
def test_a_service_names_its_own_extra(service: str) -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None; "
        f"from services.cli.main import main; sys.exit(main(['{service}', '--model', 'org/tiny']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"pip install 'triptych[{service}]' (huggingface_hub is not installed)" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_list_tells_the_embedded_model_and_every_commit(
    served: Hub, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "list"]) == 0
    assert capsys.readouterr().out.split() == ["MODEL", "REVISION", "SIZE", "PATH"]
    embedded = tmp_path / "own" / "models" / "SmolLM2-135M-Instruct"
    embedded.mkdir(parents=True)
    (embedded / "config.json").write_bytes(b"x" * 20_000)
    path = find(MODEL, weights=True)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert main(["model", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["SmolLM2-135M-Instruct", "-", "0.02", "MB", str(embedded)],
        [MODEL, path.name, "(main)", f"{size / 1e6:.2f}", "MB", str(path)],
    ]


def test_a_whole_model_of_a_hub_is_verified_offline(served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    find(MODEL, weights=True)
    served.asked.clear()
    assert main(["model", "verify", MODEL]) == 0
    shown = capsys.readouterr().out
    assert "files, all as recorded" in shown and "21 tensors in 2 files" in shown
    assert "512 ids, with a chat template" in shown and "llama is served" in shown
    assert shown.endswith("\nwhole\n")
    assert served.asked == []


def test_verify_of_what_is_not_here_is_one_line(served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "verify", MODEL]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "`triptych model fetch org/tiny`" in line


def test_a_changed_byte_is_found_by_the_hubs_hash(served: Hub) -> None:
    path = find(MODEL, weights=True)
    assert problems(path) == []
    for name in ("tokenizer.json", "model-00001-of-00002.safetensors"):  # git's hash, and LFS's
        content = bytearray((path / name).read_bytes())
        content[-2] ^= 1
        (path / name).resolve().write_bytes(content)
    first, second = problems(path)
    assert first.startswith("hashes: model-00001-of-00002.safetensors hashes to ") and "fetch it again" in first
    assert second.startswith("hashes: tokenizer.json hashes to ")


def test_a_model_fetched_without_weights_lacks_them(served: Hub) -> None:
    path = find(MODEL)
    found = problems(path)
    assert "files: model.safetensors.index.json is missing" in found
    assert any("safetensors is missing" in problem for problem in found)


def test_a_cut_file_is_told_by_the_listing_and_the_header(served: Hub) -> None:
    path = find(MODEL, weights=True)
    name = "model-00002-of-00002.safetensors"
    content = (path / name).read_bytes()
    (path / name).resolve().write_bytes(content[:-100])
    found = problems(path)
    assert f"files: {name} has {len(content) - 100} bytes, the hub listed {len(content)}" in found
    assert any(problem.startswith(f"headers: {name} holds ") for problem in found)


def test_a_folder_is_verified_by_itself_and_by_its_checksums(folder: Path) -> None:
    assert problems(folder) == []
    assert "none were recorded" in model_verify.check_hashes(folder).text
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    assert problems(folder) == []
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    (problem,) = problems(folder)
    assert problem.startswith("hashes: config.json hashes to ")
    (folder / "SHA256SUMS").write_text("hello\n")
    assert problems(folder) == ["hashes: SHA256SUMS is not as `sha256sum` writes it"]


def test_an_index_and_files_that_disagree_are_both_told(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    moved = next(iter(places["weight_map"]))
    first, second = sorted(set(places["weight_map"].values()))
    places["weight_map"][moved] = second if places["weight_map"][moved] == first else first
    index.write_text(json.dumps(places))
    lacks, holds = sorted(problems(folder), key=lambda text: "lacks" not in text)
    assert f"lacks {moved}, which {index.name} places there" in lacks
    assert f"holds {moved}, which {index.name} does not place there" in holds


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("config.json", "files: config.json is missing"),
        ("tokenizer.json", "files: tokenizer.json is missing"),
        ("model-00001-of-00002.safetensors", "files: model-00001-of-00002.safetensors is missing"),
        ("model.safetensors.index.json", "files: model.safetensors is missing"),
    ],
)
def test_a_missing_file_is_told(folder: Path, damage: str, says: str) -> None:
    (folder / damage).unlink()
    assert says in problems(folder)


def test_verify_prints_the_problems_of_the_services_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    (folder / "tokenizer.json").write_text("{}")
    assert main(["model", "verify", str(folder)]) == 1
    shown = capsys.readouterr().out
    _, _, found = shown.partition("2 found wrong:\n")
    text, family = found.splitlines()
    assert text.startswith("  text: ") and "tokenizer.json" in text
    assert family.startswith("  family: ") and "rope_type 'dynamic'" in family
    assert "files      7, all here" in shown


def header(entries: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cut short, or of another kind"),
        (b"\xff" * 64, "cut short, or of another kind"),
        (header({"a": F32}, b"1234567"), "holds 7 bytes of tensors, its header tells of 8"),
        (header({"a": F32}, b"123456789"), "holds 9 bytes of tensors, its header tells of 8"),
        (header({"a": F32 | {"data_offsets": [4, 12]}}, b"x" * 12), "a begins at byte 4"),
        (header({"a": F32, "b": F32}, b"x" * 8), "b begins at byte 0, the tensor before it ends at 8"),
        (header({"a": F32 | {"shape": [3]}}, b"x" * 8), "no header of a safetensors file"),
        (header({"a": {"dtype": "F32"}}, b""), "no header of a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "no header of a safetensors file"),
    ],
)
def test_a_header_that_cannot_be_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(StartError, match=says):
        safetensors_file.tensors(file)


def test_a_header_tells_names_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    other = {"dtype": "F4", "shape": [6], "data_offsets": [8, 11]}  # of a size that is not known here
    file.write_bytes(header({"b": other, "a": F32, "__metadata__": {"format": "pt"}}, b"x" * 11))
    assert safetensors_file.tensors(file) == {"a": 8, "b": 3}


def configs(**fields: object) -> dict[str, ServiceConfig]:
    types: list[type[ServiceConfig]] = [FrontendConfig, SchedulerConfig, ExecutorConfig]
    return {one.service: one(**fields) for one in types}


def test_up_asks_once_for_what_the_three_share(served: Hub) -> None:
    paths = model.provide(configs(model=MODEL))
    assert set(paths.values()) == {find(MODEL, offline=True, weights=True)}
    assert len(served.asked_for("GET", "/api/models/org/tiny")) == 2  # its commit and its listing


def test_up_offline_does_not_fetch_the_embedded_model_either(served: Hub) -> None:
    with pytest.raises(StartError, match="no model at 'SmolLM2-135M-Instruct'"):
        model.provide(configs(offline=True))


def test_bytes_that_must_fit_into_memory_are_those_of_the_headers(source: Path, folder: Path) -> None:
    weights = sum(sum(safetensors_file.tensors(file).values()) for file in source.glob("*.safetensors"))
    assert up_fit.stored_bytes(source) == weights
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert up_fit.stored_bytes(folder) == weights - 512 * 64 * 4  # the head may be the embedding once more
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert up_fit.stored_bytes(folder) == 0  # the executor's to tell
