"""The tests' own tools: tiny checkpoints, and the rule for equal ids, which must be able to fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from services.common import checkpoint
from tests.support.checkpoints import EOS_ID, check_same_ids, float64_gap, reference_ids, tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids 7 and 9 always have the same logit, all others have 0."""
    head = torch.zeros(512, 64)
    head[[7, 9]] = 1.0
    return tiny_llama(tmp_path_factory.mktemp("undecided"), extra={"lm_head.weight": head})


def test_a_tiny_checkpoint_is_one_that_the_services_can_read(tiny: Path) -> None:
    read = checkpoint.read_config(tiny)
    assert (read.context_tokens, read.vocab_size, read.eos_token_ids) == (1024, 512, (EOS_ID,))
    assert len(checkpoint.tokenizer_hash(tiny)) == 64
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "Größe 😀\tof  2024\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [EOS_ID]
    assert tokenizer.get_vocab_size() <= 512


def test_the_same_seed_makes_the_same_weights_and_another_one_others(tiny: Path, tmp_path: Path) -> None:
    again = load_file(tiny_llama(tmp_path / "again") / "model.safetensors")
    other = load_file(tiny_llama(tmp_path / "other", seed=1) / "model.safetensors")
    first = load_file(tiny / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_sharded_and_whole_checkpoints_have_the_same_ids(tiny: Path, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], [300]]
    assert reference_ids(tiny_llama(tmp_path / "s", shards=3), prompts, 8) == reference_ids(tiny, prompts, 8)
    assert not (tmp_path / "s" / "model.safetensors").exists()


def test_another_id_is_a_difference_where_the_model_is_decided(tiny: Path) -> None:
    prompts = [[5, 6, 7], [300, 301]]
    expected = reference_ids(tiny, prompts, 12)
    check_same_ids(tiny, prompts, expected, expected)
    wrong = [expected[0], [*expected[1][:4], (expected[1][4] + 1) % 512, *expected[1][5:]]]
    with pytest.raises(AssertionError, match="stream 1 at 4"):
        check_same_ids(tiny, prompts, wrong, expected)


def test_a_stream_that_is_cut_short_or_goes_on_is_a_difference(tiny: Path) -> None:
    prompts = [[5, 6, 7]]
    expected = reference_ids(tiny, prompts, 12)
    for wrong in (expected[0][:-1], [*expected[0], 3], []):
        with pytest.raises(AssertionError, match="ids, expected"):
            check_same_ids(tiny, prompts, [wrong], expected)


def test_a_near_tie_is_printed_and_passes_once_but_no_third_id_and_not_twice(
    undecided: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = next([i] for i in range(3, 512) if reference_ids(undecided, [[i]], 1) in ([[7]], [[9]]))
    (expected,) = reference_ids(undecided, [prompt], 1)
    other = [16 - expected[0]]
    assert float64_gap(undecided, prompt) == 0
    check_same_ids(undecided, [prompt], [other], [expected])
    assert "near tie: stream 0 at 0" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="stream 0 at 0: 8"):
        check_same_ids(undecided, [prompt], [[8]], [expected])
    with pytest.raises(AssertionError, match="2 near ties in 2 streams"):
        check_same_ids(undecided, [prompt] * 2, [other] * 2, [expected] * 2)
