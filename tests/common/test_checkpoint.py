"""What config.json and generation_config.json may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.checkpoint import read_config
from services.common.errors import StartError


def checkpoint(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    figures = {"max_position_embeddings": 64, "vocab_size": 10, "eos_token_id": 2} | config
    (folder / "config.json").write_text(json.dumps(figures))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read_config(checkpoint(tmp_path)).eos_token_ids == (2,)
    assert read_config(checkpoint(tmp_path, {"eos_token_id": [9, 3, 3]})).eos_token_ids == (3, 9)
    assert read_config(checkpoint(tmp_path, {}, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize("eos", ["</s>", True, -1, 10, [2, "x"], 1.5])
def test_an_eos_id_that_is_none_is_one_line(tmp_path: Path, eos: Any) -> None:
    with pytest.raises(StartError, match=r"eos_token_id holds .* ids lie in"):
        read_config(checkpoint(tmp_path, {"eos_token_id": eos}))


@pytest.mark.parametrize("value", [None, "many", 0, -5, True])
def test_a_figure_that_is_none_is_one_line(tmp_path: Path, value: Any) -> None:
    with pytest.raises(StartError, match=r"max_position_embeddings is .*whole number"):
        read_config(checkpoint(tmp_path, max_position_embeddings=value))


def test_figures_that_a_published_config_leaves_to_its_family_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 106}')
    read = read_config(tmp_path)
    assert (read.context_tokens, read.vocab_size, read.eos_token_ids) == (None, None, (106,))


@pytest.mark.parametrize("eos", ["</s>", True, -1, 2**31])
def test_an_eos_id_that_is_none_is_told_without_a_vocabulary_too(tmp_path: Path, eos: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(StartError, match=r"eos_token_id holds .* ids lie in \[0, 2147483648\)"):
        read_config(tmp_path)
