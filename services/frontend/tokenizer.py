"""The checkpoint's tokenizer: text to ids, ids to text, an id's own bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.common.errors import StartError

T = TypeVar("T")

OFF_LOOP_BYTES = 8192
"""Text of this size takes about 2 ms to encode; larger work leaves the event loop."""
_LONG_IDS = 1024


async def off_loop(size_bytes: int, work: Callable[[], T]) -> T:
    """Runs `work` in a thread when it is large, so that the event loop never stalls for it."""
    return await asyncio.to_thread(work) if size_bytes > OFF_LOOP_BYTES else work()


class Stream(Protocol):
    """What the detokenizer needs of tokenizers' DecodeStream."""

    def step(self, tokenizer: Any, id: int | list[int], /) -> str | None: ...


class TextTokenizer:
    """tokenizer.json, loaded; truncation and padding that it may ask for are off."""

    def __init__(self, definition: str) -> None:
        self.backend = Tokenizer.from_str(definition)
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes = _TokenBytes(json.loads(definition).get("decoder"))
        self._prefix = self._find_prefix()

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Ids of a text; control tokens that it spells become their ids.

        With `add_special_tokens` it starts with what the tokenizer puts before a text (BOS), and never twice.
        """
        ids = encode(self.backend, text)
        if add_special_tokens and ids[: len(self._prefix)] != self._prefix:
            return self._prefix + ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids as a whole; broken UTF-8 becomes U+FFFD."""
        if len(ids) < _LONG_IDS:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        # A batch of one: `decode` keeps the GIL, so that a thread of its own would not help the others.
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, ids: Sequence[int], *, skip_special_tokens: bool) -> Stream:
        """A decoder of the ids that follow `ids`."""
        return DecodeStream(ids=list(ids), skip_special_tokens=skip_special_tokens)

    def written(self, token_id: int) -> str:
        """An added token's own text."""
        return self.backend.id_to_token(token_id) or ""

    def special_among(self, texts: Sequence[str]) -> frozenset[int]:
        """Ids of those texts that are special tokens."""
        ids = (self.backend.token_to_id(text) for text in texts)
        return frozenset(i for i in ids if i is not None and i in self.special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for by itself, part of a character perhaps; empty for an id it does not know."""
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._bytes.of(token)

    def _find_prefix(self) -> tuple[int, ...]:
        plain = tuple(self.backend.encode("a", add_special_tokens=False).ids)
        whole = tuple(self.backend.encode("a", add_special_tokens=True).ids)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        return ()


def encode(backend: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids of a text without a prefix. The batch call is the one that lets other threads run meanwhile."""
    return tuple(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def load_definition(path: Path) -> str:
    """tokenizer.json of a checkpoint folder. Raises StartError."""
    try:
        return (path / "tokenizer.json").read_bytes().decode()
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read {path / 'tokenizer.json'}: {error}") from error


def load(definition: str, path: Path) -> TextTokenizer:
    """Raises StartError where `tokenizers` cannot read the definition found at `path`."""
    try:
        return TextTokenizer(definition)
    except Exception as error:  # tokenizers raises bare Exception
        raise StartError(f"{path / 'tokenizer.json'} is not a tokenizer that can be used: {error}") from error


class _TokenBytes:
    """A vocabulary entry's bytes, by the decoder that tokenizer.json names."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        parts = _flatten(decoder)
        kinds = {part["type"] for part in parts}
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._replaced = [
            (part["pattern"]["String"], part["content"])
            for part in parts
            if part["type"] == "Replace" and "String" in part["pattern"]
        ] + [(part["replacement"], " ") for part in parts if part["type"] == "Metaspace"]

    def of(self, token: str) -> bytes:
        if self._byte_level is not None:
            # As the ByteLevel decoder: a token with a character that is not in the alphabet is taken as it stands.
            values = [self._byte_level.get(character, -1) for character in token]
            return token.encode() if -1 in values else bytes(values)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # it only looks like a byte: plain text
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flatten(inner)]
    return [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte as in GPT-2 (Radford et al. 2019): printable Latin-1 is itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(shifted)})
    return alphabet
