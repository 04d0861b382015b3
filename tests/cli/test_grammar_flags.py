"""Flags that hold an answer to a language become the option `grammar`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from triptych.inference.v1 import generation_pb2

from services.cli.ask import add_options, options_of
from services.cli.main import main
from services.common.errors import StartError

Grammar = generation_pb2.Grammar


def parsed(*flags: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return options_of(parser.parse_args(flags))


def test_each_flag_is_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "array"}')
    lark.write_text('start: "é"')
    assert parsed("--json")["grammar"] == Grammar(json_schema='{"type": "object"}')
    assert parsed("--json-schema", str(schema))["grammar"] == Grammar(json_schema='{"type": "array"}')
    assert parsed("--regex", "a+", "--forced-tokens")["grammar"] == Grammar(regex="a+", forced_tokens=True)
    assert parsed("--lark", str(lark))["grammar"] == Grammar(lark='start: "é"')
    choices = Grammar(choices=Grammar.Choices(values=["yes", "no"]))
    assert parsed("--choice", "yes", "--choice", "no")["grammar"] == choices
    assert "grammar" not in parsed()


def test_a_file_that_cannot_be_read_and_a_flag_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot read .*missing\.json"):
        parsed("--json-schema", str(tmp_path / "missing.json"))
    with pytest.raises(StartError, match="--forced-tokens stands beside"):
        parsed("--forced-tokens")


def test_two_kinds_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "Hi", "--json", "--regex", "a"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_clients_helpers_write_each_kind() -> None:
    from triptych_client import grammars

    schema = {"type": "object", "properties": {"é": {"type": "null"}}}
    assert json.loads(grammars.json_schema(schema).json_schema) == schema
    assert grammars.json_schema(True) == Grammar(json_schema="true")
    assert grammars.json_schema("{}", forced_tokens=True) == Grammar(json_schema="{}", forced_tokens=True)
    assert grammars.lark("start: /a/") == Grammar(lark="start: /a/")
    tag = grammars.Tag(begin="<a>", json_schema="{}", end="</a>")
    tags = Grammar.StructuralTags(tags=[tag], required=True, text_until="</think>")
    assert grammars.structural_tags([tag], required=True, text_until="</think>") == Grammar(structural_tags=tags)
