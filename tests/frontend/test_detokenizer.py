"""Text as it streams, against a decode of the whole."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.frontend.detokenizer import BROKEN, Detokenizer
from services.frontend.tokenizer import TextTokenizer, load_definition
from tests.frontend.made_tokenizers import TEXT, WORD_STARTS, loaded
from tests.support.checkpoints import tiny_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Byte-level BPE, ids 0-2 special."""
    return TextTokenizer(load_definition(tiny_tokenizer(tmp_path_factory.mktemp("t"))))


@pytest.fixture(scope="module", params=sorted(WORD_STARTS))
def word_starts(request: pytest.FixtureRequest) -> TextTokenizer:
    """Each kind of tokenizer that marks word starts."""
    return loaded(request.param)


def stream(tokenizer: TextTokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    """The deltas, the flush last."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


def whole(tokenizer: TextTokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """The output's part of a decode of prompt and output; a broken end is one U+FFFD."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert text.startswith(before)
    rest = text[len(before) :]
    return rest.rstrip(BROKEN) + BROKEN if rest.endswith(BROKEN) else rest


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(max_size=20), output=st.text(max_size=20))
def test_any_text_streams_as_itself(byte_level: TextTokenizer, prompt: str, output: str) -> None:
    ids = list(byte_level.encode(output, add_special_tokens=False))
    deltas = stream(byte_level, list(byte_level.encode(prompt, add_special_tokens=False)), ids)
    assert "".join(deltas) == output


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=24), st.booleans())
def test_any_byte_level_ids_stream_as_a_decode_of_the_whole(
    byte_level: TextTokenizer, output: list[int], skip: bool
) -> None:
    prompt = list(byte_level.encode("a prompt: ", add_special_tokens=False))
    deltas = stream(byte_level, prompt, output, skip=skip)
    assert "".join(deltas) == whole(byte_level, prompt, output, skip=skip)
    assert not any(delta.endswith(BROKEN) for delta in deltas[:-1]), "a partial character was sent"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=24))
def test_a_prompt_of_any_ids_never_shows_in_the_output(byte_level: TextTokenizer, prompt: list[int]) -> None:
    ids = list(byte_level.encode("clean text", add_special_tokens=False))
    assert "".join(stream(byte_level, prompt, ids)) == "clean text"
    assert stream(byte_level, prompt, []) == [""]
    assert "".join(stream(byte_level, prompt, [2])) == ""


@pytest.mark.parametrize("skip", [True, False])
def test_word_starts_survive_a_prompt_and_special_tokens(word_starts: TextTokenizer, skip: bool) -> None:
    bos, eos = (word_starts.backend.token_to_id(token) for token in ("<s>", "</s>"))
    words = list(word_starts.encode(TEXT[1], add_special_tokens=False))
    for prompt in ([], [bos], words[:5], [bos, *words[:5]], [*words[:5], eos], [*words[:5], *[bos] * 40]):
        for output in (words[5:], [eos, *words[5:]], [*words[5:9], eos, bos, *words[9:]]):
            assert "".join(stream(word_starts, prompt, output, skip=skip)) == whole(
                word_starts, prompt, output, skip=skip
            )


def test_a_byte_fallback_run_that_breaks_costs_no_text_and_raises_nothing() -> None:
    tokenizer = loaded("llama2_like")
    byte = {value: tokenizer.backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    word = list(tokenizer.encode("dog", add_special_tokens=False))
    euro = [byte[value] for value in "€".encode()]
    deltas = stream(tokenizer, word, [*euro, byte[0xE2], *word, *word])
    # A decode of the whole would turn the euro sign, sent already, into U+FFFD.
    assert "".join(deltas) == f"€{BROKEN} dog dog"


def mixed() -> TextTokenizer:
    """Byte-level, with one id for "a" and the first byte of a three-byte character together."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "aâ"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "â")]))
    made.decoder = decoders.ByteLevel()
    return TextTokenizer(made.to_str())


def test_whole_characters_do_not_wait_for_a_partial_one_in_the_same_id() -> None:
    tokenizer = mixed()
    a_e2, x82, xac, b = (tokenizer.backend.token_to_id(piece) for piece in ("aâ", "Ĥ", "¬", "b"))
    assert stream(tokenizer, [b], [a_e2, x82, xac, b, a_e2, b]) == ["a", "", "€", "b", "a", f"{BROKEN}b", ""]


def test_whole_characters_of_the_prompt_in_front_of_its_partial_one_are_not_sent() -> None:
    tokenizer = mixed()
    a_e2, x82, xac, b = (tokenizer.backend.token_to_id(piece) for piece in ("aâ", "Ĥ", "¬", "b"))
    for prompt in ([b, a_e2], [a_e2]):
        assert stream(tokenizer, prompt, [x82, xac, b]) == ["", "€", "b", ""]
        assert stream(tokenizer, prompt, [b]) == ["b", ""]
    assert stream(tokenizer, [b, a_e2, x82], [xac, a_e2]) == ["€", "a", BROKEN]


def test_broken_bytes_without_end_are_sent_in_bounded_pieces(byte_level: TextTokenizer) -> None:
    lone = byte_level.backend.token_to_id("Ģ")  # byte 0x80: never the start of a character
    deltas = stream(byte_level, [], [lone] * 1000)
    assert "".join(deltas).count(BROKEN) > 900
    assert max(len(delta) for delta in deltas) < 100


def test_a_long_prompt_of_broken_bytes_or_of_no_text_costs_little(byte_level: TextTokenizer) -> None:
    lone = byte_level.backend.token_to_id("Ģ")
    for prompt in ([lone] * 100_000, [2] * 100_000):
        before = time.perf_counter()
        assert "".join(stream(byte_level, prompt, list(byte_level.encode("text", add_special_tokens=False)))) == "text"
        assert time.perf_counter() - before < 1.0  # milliseconds; a decode of the whole for each id would take hours
