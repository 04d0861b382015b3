"""Configuration: four sources in one order, an unknown key an error in each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal

import pydantic
import pytest
from pydantic import Field

from services.common.config import ServiceConfig, load, resolve
from services.common.errors import StartError


class Config(ServiceConfig):
    service: ClassVar[str] = "scheduler"

    port: int = Field(50052, ge=0, le=65535)
    block_size: int = Field(16, ge=1, description="tokens a block holds")
    dtype: Literal["auto", "float32"] = "auto"
    limit: int | None = Field(None, ge=1)
    eager: bool = False
    names: tuple[str, ...] = ()


def _file(folder: Path, text: str) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def test_without_sources_the_defaults_hold() -> None:
    assert load(Config, [], {}) == Config()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    argv = _file(tmp_path, "scheduler: {port: 1, block_size: 1, limit: 1}\nfrontend: {whatever: 3}\n")
    environ = {"TRIPTYCH_SCHEDULER__BLOCK_SIZE": "2", "TRIPTYCH_SCHEDULER__LIMIT": "2"}
    resolved = resolve(Config, [*argv, "--limit", "3"], environ)
    config = resolved.config
    assert (config.port, config.block_size, config.limit, config.dtype) == (1, 2, 3, "auto")
    assert resolved.origin == {"port": "file", "block_size": "environment", "limit": "flag"}


def test_print_config_shows_each_value_and_its_source_and_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*_file(tmp_path, "scheduler: {port: 1}"), "--limit", "3", "--print-config"]
    with pytest.raises(SystemExit) as ended:
        load(Config, argv, {"TRIPTYCH_SCHEDULER__BLOCK_SIZE": "2"})
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "port: 1  # file" in lines
    assert "block_size: 2  # environment" in lines
    assert "limit: 3  # flag" in lines
    assert "dtype: auto  # default" in lines
    assert len(lines) == len(Config.model_fields)


def test_what_print_config_prints_can_be_read_back(tmp_path: Path) -> None:
    resolved = resolve(Config, ["--model", "a: 'long' " + "path/" * 40, "--limit", "7"], {})
    text = "scheduler:\n" + "\n".join(f"  {line}" for line in resolved.lines())
    assert load(Config, _file(tmp_path, text), {}) == resolved.config


def test_a_secret_is_in_nothing_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = _file(tmp_path, "scheduler: {otlp_headers: [x-key=s3cret=, X-Team = s3cret]}")
    with pytest.raises(SystemExit):
        load(Config, [*argv, "--print-config"], {})
    printed = capsys.readouterr().out
    assert "s3cret" not in printed
    # A comment, so that a file made of it does not send the placeholder.
    assert "# otlp_headers: x-key=..., X-Team =...  # file, not shown\n" in printed
    environ = {"TRIPTYCH_SCHEDULER__OTLP_HEADERS": '["Bearer s3cret"]'}
    for argv, given in ((["--otlp-headers", "s3cret"], {}), ([], environ), ([], {**environ, "X": "1"})):
        with pytest.raises(StartError, match="otlp_headers") as refused:
            load(Config, argv, given)
        assert "s3cret" not in str(refused.value)
    with pytest.raises(StartError, match="a URL must hold no user and password") as refused:
        load(Config, ["--otlp-endpoint", "https://me:s3cret@collector:4317/path"], {})
    assert "s3cret" not in str(refused.value)


def test_a_config_is_frozen() -> None:
    with pytest.raises(pydantic.ValidationError):
        load(Config, [], {}).port = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scheduler: {blocksize: 1}", r"scheduler: blocksize \(from file\)"),
        ("schedular: {}", "unknown sections"),
        ("scheduler: [1]", "must hold keys"),
        ("- 1", "must hold sections"),
        ("scheduler: {block_size: [}", "cannot read"),
        ("scheduler: {block_size: 0}", r"block_size \(from file\): .*greater than or equal to 1, not 0"),
        ("scheduler: {eager: maybe}", "eager"),
    ],
)
def test_a_fault_in_the_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(StartError, match=says) as caught:
        load(Config, _file(tmp_path, text), {})
    if "cannot read" not in says:
        assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(StartError, match=r"cannot read nowhere\.yaml"):
        load(Config, ["--config", "nowhere.yaml"], {})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"TRIPTYCH_SCHEDULER__BLOCKSIZE": "1"}, "unknown environment variable TRIPTYCH_SCHEDULER__BLOCKSIZE"),
        ({"TRIPTYCH_SCHEDULER__BLOCK_SIZE": "x"}, r"block_size \(from environment\)"),
    ],
)
def test_a_fault_in_the_environment_names_the_variable(environ: dict[str, str], says: str) -> None:
    with pytest.raises(StartError, match=says):
        load(Config, [], environ)


def test_variables_of_other_services_and_of_kubernetes_are_left_alone() -> None:
    environ = {"TRIPTYCH_FRONTEND__ENGINE": "x:1", "TRIPTYCH_SCHEDULER_PORT": "tcp://10.0.0.1:1"}
    assert load(Config, [], environ) == Config()


@pytest.mark.parametrize("argv", [["--blocksize", "1"], ["--block", "1"], ["stray"]])
def test_an_unknown_or_shortened_flag_ends_with_a_usage_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Config, argv, {})
    assert ended.value.code == 2
    assert f"unrecognized arguments: {' '.join(argv)}" in capsys.readouterr().err


def test_a_flag_with_a_value_out_of_range_names_the_flag() -> None:
    with pytest.raises(StartError, match=r"dtype \(from flag\): .*'auto' or 'float32', not 'int3'"):
        load(Config, ["--dtype", "int3"], {})


def test_help_tells_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Config, ["--help"], {})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in Config.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
    assert "tokens a block holds" in shown


def test_a_switch_needs_no_value() -> None:
    assert load(Config, ["--eager"], {}).eager
    assert not load(Config, ["--no-eager"], {"TRIPTYCH_SCHEDULER__EAGER": "true"}).eager


def test_a_list_is_a_flag_again_and_again_or_with_commas_and_json_in_the_environment(tmp_path: Path) -> None:
    for argv, environ in (
        (["--names", "a", "--names", "b"], {}),
        (["--names", "a,b"], {}),
        ([], {"TRIPTYCH_SCHEDULER__NAMES": '["a", "b"]'}),
        (_file(tmp_path, "scheduler: {names: [a, b]}"), {}),
    ):
        resolved = resolve(Config, argv, environ)
        assert resolved.config.names == ("a", "b")
        assert resolved.lines()[-1].startswith("names: [a, b]  # ")
    with pytest.raises(StartError, match=r'names.*JSON: \["a", "b"\]'):
        load(Config, [], {"TRIPTYCH_SCHEDULER__NAMES": "a, b"})


@pytest.mark.parametrize("value", ["nonsense", ":50052", "host:", "host:0", "127.0.0.1:99999"])
def test_an_address_that_cannot_be_dialled_is_refused(value: str) -> None:
    from services.scheduler.config import SchedulerConfig

    with pytest.raises(StartError, match=re.escape("HOST:PORT is needed")):
        load(SchedulerConfig, ["--executor", value], {})


def test_a_truth_value_is_no_number(tmp_path: Path) -> None:
    from services.scheduler.config import SchedulerConfig

    file = tmp_path / "config.yaml"
    file.write_text("scheduler: {port: true}\n")
    with pytest.raises(StartError, match="port"):
        load(SchedulerConfig, ["--config", str(file)], {})
