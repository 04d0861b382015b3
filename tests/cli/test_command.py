"""The `triptych` command itself: help, versions, and errors in one line."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from services.cli import docs, parts
from services.cli.main import COMMANDS, main
from services.common.checkpoint import FETCHED_FILES
from services.common.config import SERVICES


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_no_command_is_a_usage_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: triptych COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: triptych {command}" in capsys.readouterr().out


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"triptych {version('triptych')}\n"


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sheduler"]) == 2
    assert capsys.readouterr().err == "triptych: error: unknown command 'sheduler'; did you mean scheduler?\n"


def test_a_name_that_cannot_be_fetched_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "Llama-9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("triptych: error: cannot fetch 'Llama-9'")
    assert error.count("\n") == 1


@pytest.mark.parametrize("service", SERVICES)
def test_print_config_of_a_service_shows_each_source(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{service}: {{drain_s: 1}}")
    monkeypatch.setenv(f"TRIPTYCH_{service.upper()}__LOG_LEVEL", "debug")
    with pytest.raises(SystemExit) as ended:
        main([service, "--config", str(file), "--port", "7", "--print-config"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"drain_s: 1.0  # file", "log_level: debug  # environment", "port: 7  # flag"} <= set(lines)
    assert "host: 127.0.0.1  # default" in lines


@pytest.mark.parametrize("service", SERVICES)
def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(service: str) -> None:
    ended = _python(f"from services.cli.main import main; sys.exit(main(['{service}', '--model', '/no/such']))")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("triptych: error: ")
    assert "/no/such" in last
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("['frontend']", "tokenizers", "frontend"),
        ("['scheduler']", "numpy", "scheduler"),
        ("['executor']", "torch", "executor"),
        ("['chat', 'hi']", "triptych_client", "cli"),
        ("['generate', 'hi']", "triptych_client", "cli"),
    ],
)
def test_a_missing_extra_is_named(command: str, module: str, extra: str) -> None:
    code = f"sys.modules['{module}'] = None; from services.cli.main import main; sys.exit(main({command}))"
    ended = _python(code)
    assert ended.returncode == 1
    assert f"pip install 'triptych[{extra}]' ({module} is not installed)" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_module_of_ours_that_is_not_there_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match="services"):
        parts.part("services.nothing", extra="x", what="x")


def test_a_fetched_model_is_told_at_once_without_torch(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    for name in FETCHED_FILES:
        (folder / name).touch()
    code = (
        f"import os; os.environ['TRIPTYCH_CACHE'] = {str(tmp_path)!r}; sys.modules['torch'] = None; "
        "from services.cli.main import main; sys.exit(main(['model', 'fetch']))"
    )
    ended = _python(code)
    assert (ended.returncode, ended.stdout) == (0, f"{folder}\n")


def test_commands_are_shown_as_the_users_shell_reaches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / "project" / ".venv" / "bin"
    other = tmp_path / "other"
    for folder in (scripts, other):
        folder.mkdir(parents=True)
        for name in ("python", "triptych"):
            (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", f"{other}")
    monkeypatch.chdir(tmp_path / "project")
    assert parts.shell_name("python") == ".venv/bin/python"  # the one on PATH is another
    monkeypatch.chdir(other)
    assert parts.shell_name("triptych") == str(scripts / "triptych")
    monkeypatch.setenv("PATH", f"{scripts}:{other}")
    assert parts.shell_name("python") == "python"
    assert parts.shell_name("not-here") == "not-here"


def test_the_configuration_page_is_current() -> None:
    assert docs.PATH.read_text(encoding="utf-8") == docs.render(), "run python -m services.cli.docs"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("service", "threads"), [("frontend", "1"), ("scheduler", "1"), ("executor", None)])
def test_services_without_algebra_keep_no_threads_for_it_unless_the_user_says_so(
    service: str, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []

    class Service:
        @staticmethod
        def main(arguments: object) -> int:
            found.append(os.environ.get("OPENBLAS_NUM_THREADS"))
            gc.enable()
            return 0

    monkeypatch.setattr("services.cli.main.part", lambda *_, **__: Service)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    assert main([service]) == 0
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert main([service]) == 0
    assert found == ["7", threads]
