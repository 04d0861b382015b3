"""A start that can keep its compiled kernels nowhere ends with what to do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from services.cli.main import main
from services.common import writable
from services.common.errors import StartError


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)


@pytest.mark.usefixtures("no_temporary_folder")
def test_P6_an_executor_that_can_write_nowhere_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", "/proc/triptych")  # where not even root can make a folder
    assert main(["executor", "--model", "/nowhere"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write to /proc/triptych" in line
    assert "set TRIPTYCH_CACHE to a folder that can be written" in line


@pytest.mark.usefixtures("no_temporary_folder")
def test_P6_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TRIPTYCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(StartError, match=r"has no home folder.*set TRIPTYCH_CACHE"):
        writable.require()


def test_a_folder_for_temporary_files_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", "/proc/triptych")
    writable.require()


def test_a_cache_folder_is_enough_and_is_left_empty(
    tmp_path: Path, no_temporary_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    writable.require()
    assert list((tmp_path / "cache").iterdir()) == []
