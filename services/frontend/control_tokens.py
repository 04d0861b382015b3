"""Control tokens of a chat: made by the template alone, whatever a user's text spells.

A second tokenizer knows every control token by a secret name instead of its own, so text that spells one is text to
it. What the template writes is translated to the secret names; what users wrote is not:

    user's text     "a <|im_end|> b"       -> "a {mark 7} b"        mark()
    rendered        "<|im_start|>user\\na {mark 7} b<|im_end|>"
    translated      "{name 3}user\\na <|im_end|> b{name 7}"          encode()

One encode of the whole keeps everything else of the tokenizer as it is (offsets, normalizers, stripping), so the ids
are those of the plain path whenever no user text spells a control token.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from services.frontend.tokenizer import encode

_SECRET_DIGITS = 40


class ControlTokens:
    """The control tokens of one tokenizer.json, and its second tokenizer."""

    def __init__(self, definition: str) -> None:
        parsed = json.loads(definition)
        controls = [token for token in parsed.get("added_tokens", []) if is_control(token)]
        self._spelled = {token["content"]: i for i, token in enumerate(controls)}
        self._contents: list[str] = list(self._spelled)
        # Digits: no template filter or normalizer changes them, and 40 random ones are in nobody's text.
        self._mark, self._name = (_secret() for _ in range(2))
        spellings = [
            rf"(?<!\w){re.escape(token['content'])}(?!\w)" if token.get("single_word") else re.escape(token["content"])
            for token in sorted(controls, key=lambda token: -len(token["content"]))
        ]
        self._in_user = _any_of(self._contents)
        special = [token["content"] for token in controls if token.get("special")]
        self._in_answer = _any_of(special) if special else None
        self._in_rendered = re.compile("|".join([rf"{self._mark}(\d{{6}})", *spellings]))
        self._tokenizer = _renamed(parsed, {content: self._name_of(i) for content, i in self._spelled.items()})

    def mark(self, text: str, *, answer: bool = False) -> str:
        """A text with each spelled control token replaced by a mark that a template carries through.

        In an `answer` of the model's only special tokens are: the others, such as </think>, are how it writes, and
        templates look for them there.
        """
        pattern = self._in_answer if answer else self._in_user
        if not self._contents or pattern is None:
            return text
        return pattern.sub(lambda match: f"{self._mark}{self._spelled[match[0]]:06}", text)

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Ids of a rendered chat: the template's control tokens are ids, marked ones are text. No BOS is added."""
        return encode(self._tokenizer, self._in_rendered.sub(self._translate, rendered))

    def _spelling(self, match: re.Match[str]) -> str:
        return self._contents[int(match[1])]

    def _translate(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            return self._spelling(match)
        return self._name_of(self._spelled[match[0]])

    def _name_of(self, index: int) -> str:
        # Brackets, as control tokens have: a neighbour that must stand as a single word looks at them.
        return f"<{self._name}{index:06}>"


def is_control(token: Mapping[str, Any]) -> bool:
    """Whether an added token steers a model: special ones, and bracketed ones such as <tool_call>.

    Other added tokens (runs of spaces, whole words) are ordinary text that users may write.
    """
    content = token["content"].strip().strip("\N{LOWER ONE EIGHTH BLOCK}")
    return bool(content) and (bool(token.get("special")) or not (content[0].isalnum() or content[-1].isalnum()))


def _any_of(contents: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True)))


def _secret() -> str:
    return "".join(str(secrets.randbelow(10)) for _ in range(_SECRET_DIGITS))


def _renamed(definition: dict[str, Any], names: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with other contents, and the same ids, for the added tokens in `names`. Changes `definition`."""
    for token in definition.get("added_tokens", []):
        if token["content"] in names:
            # Looked for in the text as the template wrote it: some normalizers would leave a name unmatched, as text.
            token.update(content=names[token["content"]], normalized=False)
    model = definition["model"]
    vocab = model["vocab"]
    # Renamed in the model too: a Unigram or word model would find the old content there, as an ordinary piece.
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), *rest] for piece, *rest in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _touches(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
