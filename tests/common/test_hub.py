"""A hub's models by name: commits, the cache, offline, broken downloads, and each error in one line."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import checkpoint, hub, hub_client
from services.common.checkpoint import find
from services.common.errors import StartError
from tests.support.checkpoints import tiny_llama
from tests.support.hub import TOKEN, Hub, ask_here, environment, serving

MODEL = "org/tiny"
FETCH = "import sys; from services.cli.main import main; sys.exit(main(['model', 'fetch', 'org/tiny']))"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("hub") / "first")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("hub") / "second", shards=2, seed=1)


@pytest.fixture
def served(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process asks, with one commit of `org/tiny` at main and at the tag v1; the cache is empty."""
    with serving() as server:
        ask_here(monkeypatch, server, tmp_path / "cache")
        server.repo(MODEL).add(tiny, "main", "v1")
        yield server


def commit(served: Hub, revision: str = "main") -> str:
    return served.repos[MODEL].refs[revision]


def unreachable(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """From here on nobody listens where the hub was."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    ask_here(monkeypatch, Hub(url=url), cache)


def refusal(model: str = MODEL, *, revision: str | None = None, offline: bool = False, weights: bool = False) -> str:
    with pytest.raises(StartError) as caught:
        find(model, revision=revision, offline=offline, weights=weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_text_side_brings_no_weights_and_an_executor_only_what_is_left(served: Hub, tiny: Path) -> None:
    path = find(MODEL)
    assert not list(path.glob("*.safetensors"))
    assert (path / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert find(MODEL, weights=True) == path
    assert (path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert len(served.asked_for("GET", "tokenizer.json")) == 1
    assert len(served.asked_for("GET", "model.safetensors")) == 1


def test_the_index_says_which_weights_are_brought(served: Hub, sharded: Path) -> None:
    twice = sharded / "consolidated.safetensors"  # as some publish beside the shards: the same weights once more
    twice.write_bytes(b"never asked for")
    served.repo(MODEL).add(sharded)
    path = find(MODEL, weights=True)
    twice.unlink()
    assert sorted(file.name for file in path.glob("*.safetensors")) == sorted(
        file.name for file in sharded.glob("*.safetensors")
    )
    assert served.asked_for("GET", "consolidated") == []


def test_a_branch_moves_a_tag_and_a_commit_stay(served: Hub, sharded: Path) -> None:
    first = commit(served)
    assert find(MODEL).name == find(MODEL, revision="v1").name == first
    second = served.repo(MODEL).add(sharded)
    assert second != first
    assert find(MODEL, offline=True).name == first  # what main was when it was last asked for
    assert find(MODEL).name == find(MODEL, offline=True).name == second
    assert find(MODEL, revision="v1").name == find(MODEL, revision=first).name == first
    assert checkpoint.revision(find(MODEL)) == second
    assert checkpoint.name(find(MODEL)) == MODEL


def test_the_commit_is_logged(served: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        find(MODEL, revision="v1")
    assert any(f"org/tiny at v1 is commit {commit(served)}" in record.getMessage() for record in caplog.records)


def test_a_commit_that_is_here_whole_asks_nobody(served: Hub) -> None:
    path = find(MODEL, weights=True)
    served.asked.clear()
    assert find(MODEL, revision=commit(served), weights=True) == path
    assert find(MODEL, offline=True, weights=True) == path
    assert served.asked == []


def test_offline_by_the_hubs_own_variable_asks_nobody(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    path = find(MODEL)
    served.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find(MODEL) == path
    assert "`triptych model fetch org/tiny`" in refusal(weights=True)
    assert served.asked == []


@pytest.mark.parametrize(
    ("revision", "command"),
    [(None, "`triptych model fetch org/tiny`"), ("v1", "`triptych model fetch org/tiny --revision v1`")],
)
def test_offline_and_not_here_tells_what_to_run(served: Hub, revision: str | None, command: str) -> None:
    assert command in refusal(revision=revision, offline=True)
    find(MODEL, revision=revision)
    find(MODEL, revision=revision, offline=True)
    assert command in refusal(revision=revision, offline=True, weights=True)  # it has the text side alone


def test_offline_a_cache_without_a_listing_is_whole_only_with_its_files(served: Hub) -> None:
    path = find(MODEL, weights=True)
    for listing in path.parent.parent.glob("trees/*"):  # caches of older clients have none
        listing.unlink()
    from huggingface_hub import _tree_cache

    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    assert find(MODEL, offline=True, weights=True) == path
    (path / "model.safetensors").unlink()
    assert "`triptych model fetch org/tiny`" in refusal(offline=True, weights=True)
    assert find(MODEL, offline=True) == path


def test_without_a_network_what_is_here_is_taken_and_that_is_logged(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find(MODEL, weights=True)
    unreachable(monkeypatch, tmp_path / "cache")
    lines: list[str] = []
    assert find(MODEL, weights=True, say=lines.append) == path
    assert lines[0].startswith("Could not reach the Hub")
    assert lines[-1].startswith(f"org/tiny at main is commit {path.name}")


@pytest.mark.parametrize("revision", [None, "0" * 40])
def test_without_a_network_and_not_here_is_one_line_at_once(
    revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(monkeypatch, tmp_path / "cache")
    lines: list[str] = []
    with pytest.raises(StartError) as caught:
        find(MODEL, revision=revision, say=lines.append)
    told = str(caught.value)
    assert lines == []  # nor is it tried again, which would be told
    at = revision or "main"
    assert told.startswith(f"there is no folder 'org/tiny' here, and org/tiny at {at} cannot be fetched from http://")
    assert "Connection refused" in told and "check the name and the network" in told and "\n" not in told


def test_a_model_that_is_nowhere_is_one_line(served: Hub) -> None:
    told = refusal("org/none")
    assert told.startswith(f"there is no folder 'org/none' here, and {served.url} has no model of that name")


@pytest.mark.parametrize("revision", ["v2", "0" * 40])
def test_a_revision_that_is_none_is_one_line(served: Hub, revision: str) -> None:
    assert refusal(revision=revision) == (
        f"org/tiny on {served.url} has no revision {revision!r}; give a branch, a tag or a whole commit"
    )


def test_a_gated_model_needs_a_token_that_is_valid(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.repo(MODEL).gated = True
    assert "is gated: ask for access" in refusal() and "HF_TOKEN" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    told = refusal()
    assert "(HTTP 401): set HF_TOKEN" in told and "hf_expired" not in told
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find(MODEL).name == commit(served)


@pytest.mark.parametrize(("status", "says"), [(403, "(HTTP 403): set HF_TOKEN"), (418, "answers HTTP 418")])
def test_a_hub_that_refuses_is_one_line(served: Hub, status: int, says: str) -> None:
    served.status = status
    assert says in refusal()


def test_pickled_weights_are_refused_by_name_and_not_brought(served: Hub, tiny: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (pickled / name).write_bytes((tiny / name).read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    served.repo("org/old").add(pickled)
    told = refusal("org/old", weights=True)
    assert told.startswith("org/old at main has no model.safetensors, only pytorch_model.bin: weights are read from")
    assert served.asked_for("GET", "pytorch_model.bin") == []
    assert find("org/old").is_dir()  # a frontend needs none


def test_a_repository_that_is_no_checkpoint_is_one_line(served: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "README.md").write_text("nothing here")
    served.repo("org/notes").add(folder)
    assert refusal("org/notes") == "org/notes at main has no config.json, so it is no checkpoint that can be served"


def test_an_index_that_is_none_is_one_line(served: Hub, sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    served.repo("org/broken").add(folder)
    assert "holds no weight_map" in refusal("org/broken", weights=True)


def test_a_folder_is_found_before_a_hub_and_has_no_revision(
    served: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    assert not checkpoint.of_hub(MODEL)
    assert find(MODEL) == tiny.resolve()
    assert refusal(revision="v1").startswith("--revision is 'v1', but org/tiny is the folder")
    assert served.asked == []


@pytest.mark.parametrize(
    ("model", "is_id"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-0.6B", True),
        ("org/name_1.0", True),
        ("name", False),
        ("/org/name", False),
        ("./name", False),
        ("../name", False),
        ("~/name", False),
        ("org/name/", False),
        ("a/b/c", False),
        ("org/..", False),
    ],
)
def test_what_is_spelled_like_a_hubs_model(model: str, is_id: bool) -> None:
    assert hub.is_id(model) is is_id


def test_a_connection_that_breaks_is_read_on_where_it_broke(
    served: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # whole chunks are kept; by default they have 10 MB
    content = (tiny / "model.safetensors").read_bytes()
    served.cut_after_bytes["model.safetensors"] = 250_300
    lines: list[str] = []
    path = find(MODEL, weights=True, say=lines.append)
    assert (path / "model.safetensors").read_bytes() == content
    first, second = served.asked_for("GET", "model.safetensors")
    assert "bytes=" not in first and second.endswith("bytes=250000-")
    assert any("Trying to resume download" in line for line in lines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_fetch_that_is_ended_ends_at_once_leaves_no_parts_and_goes_on_from_whole_files(
    served: Hub, tiny: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    cache = tmp_path / "other"
    served.stall("model.safetensors", (tiny / "model.safetensors").stat().st_size // 2)
    with subprocess.Popen(
        [sys.executable, "-c", FETCH], env=os.environ | environment(served, cache), stderr=subprocess.PIPE
    ) as process:
        assert served.stalled.wait(30)
        process.send_signal(number)
        begun_s = time.monotonic()
        assert process.wait(30) == code
        assert time.monotonic() - begun_s < 8  # less than the client's read timeout, which it would wait for else
        assert process.stderr is not None and b"Traceback" not in process.stderr.read()
    served.resume()
    assert list(cache.rglob("*.incomplete")) == []
    served.asked.clear()
    done = subprocess.run(
        [sys.executable, "-c", FETCH], env=os.environ | environment(served, cache), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert [line.rpartition("/")[2] for line in served.asked_for("GET", "/resolve/")] == ["model.safetensors"]


def test_progress_is_told_in_bytes_now_and_then(served: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "SAY_EVERY_S", 0.0)
    lines: list[str] = []
    find(MODEL, weights=True, say=lines.append)
    size = (tiny / "model.safetensors").stat().st_size
    assert f"org/tiny: {size / 1e6:.0f} of {size / 1e6:.0f} MB have come" in lines


def test_what_is_cached_is_listed_with_its_names(served: Hub, sharded: Path) -> None:
    first = find(MODEL, weights=True)
    served.repo(MODEL).add(sharded)
    second = find(MODEL)
    found = {one.commit: one for one in hub.cached()}
    assert {one.model for one in found.values()} == {MODEL}
    assert (found[first.name].refs, found[second.name].refs) == ((), ("main",))
    assert found[first.name].path == first
    assert found[first.name].size_bytes == sum(file.stat().st_size for file in first.iterdir())


def test_a_cache_that_is_not_there_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_here(monkeypatch, Hub(url="http://127.0.0.1:9"), tmp_path / "none")
    assert hub.cached() == []


def test_a_cache_that_cannot_be_written_is_one_line(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*_: object, **__: object) -> str:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    told = refusal()
    assert told.startswith("cannot write org/tiny into the cache ") and "No space left on device" in told


def test_listed_sizes_are_the_files(served: Hub, tiny: Path) -> None:
    sizes = hub.listed_sizes(find(MODEL))
    assert sizes == {file.name: file.stat().st_size for file in tiny.iterdir()}
