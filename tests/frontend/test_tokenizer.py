"""The tokenizer: BOS once, ids' own bytes, large texts off the event loop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from services.common.errors import StartError
from services.frontend import tokenizer
from services.frontend.tokenizer import TextTokenizer, off_loop
from tests.frontend.made_tokenizers import WORD_STARTS, llama2_like, loaded
from tests.support.checkpoints import tiny_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(tokenizer.load_definition(tiny_tokenizer(tmp_path_factory.mktemp("t"))))


def test_bytes_of_byte_level_ids_are_the_bytes_of_the_text(byte_level: TextTokenizer) -> None:
    text = "naïve 😀 漢字 <|im_end|>\n"
    ids = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.parametrize("name", sorted(WORD_STARTS))
def test_bytes_of_word_start_ids_have_the_space_in_front(name: str) -> None:
    made = loaded(name)
    ids = made.encode("the dog sleeps", add_special_tokens=False)
    assert b"".join(made.token_bytes(i) for i in ids) == b" the dog sleeps"


def test_bytes_of_byte_fallback_ids_are_single_bytes() -> None:
    made = loaded("llama2_like")
    assert b"".join(made.token_bytes(i) for i in made.encode("漢", add_special_tokens=False)) == " 漢".encode()


def test_an_id_without_a_token_has_no_bytes(byte_level: TextTokenizer) -> None:
    assert byte_level.token_bytes(10_000) == b""


def test_a_prefix_is_added_once_and_only_when_asked() -> None:
    made = TextTokenizer(llama2_like(adds_bos=True))
    bos = made.backend.token_to_id("<s>")
    plain = made.encode("the dog", add_special_tokens=False)
    assert bos not in plain
    assert made.encode("the dog", add_special_tokens=True) == (bos, *plain)
    assert made.encode("", add_special_tokens=True) == (bos,)
    spelled = made.encode("<s>the dog", add_special_tokens=True)
    assert spelled.count(bos) == 1 and spelled[0] == bos


def test_truncation_and_padding_of_the_file_are_not_obeyed(byte_level: TextTokenizer) -> None:
    backend = byte_level.backend
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    made = TextTokenizer(backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    assert made.encode("one two three four five", add_special_tokens=False) == byte_level.encode(
        "one two three four five", add_special_tokens=False
    )


async def test_a_large_text_is_encoded_without_stalling_the_event_loop(byte_level: TextTokenizer) -> None:
    text = "a" * 1_500_000
    work = asyncio.create_task(off_loop(len(text), lambda: byte_level.encode(text, add_special_tokens=False)))
    worst_s, rounds = 0.0, 0
    while not work.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        worst_s, rounds = max(worst_s, time.perf_counter() - before), rounds + 1
    assert len(await work) > 10_000
    assert rounds > 5, "the encode was not off the loop"
    assert worst_s < 0.3, "health must answer within 100 ms; 3x slack"


def test_a_folder_whose_tokenizer_cannot_be_read_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        tokenizer.load_definition(tmp_path)
    with pytest.raises(StartError, match="not a tokenizer"):
        tokenizer.load('{"model": {}}', tmp_path)
