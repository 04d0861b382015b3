"""Grammars into llguidance's matchers (https://github.com/guidance-ai/llguidance), for one tokenizer.

What a structural tag means is written out as a grammar here:

    at will           start: span* TEXT       single  start: span TEXT | TEXT
    required          start: call (WS? call)*  single  start: call

A span is free text up to its trigger, then the rest of its tag; TEXT holds no trigger. A call is a whole tag at once.
Triggers that are text end their free text where they first appear (a lazy lexeme), those that are control tokens of the
tokenizer do anyway, since text holds none.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.errors import StartError
from services.common.grammar import Choices, Grammar, GrammarError, JsonSchema, Lark, Regex, StructuralTags, Tag

JSON_OPTIONS = {"whitespace_pattern": "[ ]?"}
"""One space at most where JSON may have white space: a model that likes it could write nothing else for ever."""
_FIXED_JSON_OPTIONS = {"lenient": False}
"""A keyword that is not implemented is refused, also where the schema asks to have it ignored."""

MAX_LEXER_STATES = 20_000
"""Of one grammar, 1 to 2 KB each: what masks cost is kept, so this bounds the memory of whoever builds them."""


_BEHIND = re.compile("<state>|<backtrace>|<non-verbose")

PROBED_IDS = 8
MASK_LIMIT_S = 0.05
"""Of one mask, in CPU time: most take a thousandth of it."""


class Compiler:
    """Of one checkpoint folder. `compile` may be called from any thread; the interpreter's lock is free meanwhile.

    Raises StartError where llguidance cannot read tokenizer.json.
    """

    def __init__(self, path: Path, eos_ids: Sequence[int]) -> None:
        try:
            self.tokenizer = LLTokenizer(str(path / "tokenizer.json"), eos_token=list(eos_ids) or None)
        except Exception as error:  # of Rust: ValueError and others
            raise StartError(f"llguidance cannot read {path / 'tokenizer.json'}: {error}") from error
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """At the start of the output. Raises GrammarError."""
        try:
            matcher = self._matcher(self._source(grammar))
        except GrammarError as error:
            raise self._blame(grammar, error) from None
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error() or not mask.any():
            raise GrammarError(grammar.field, f"allows no text at all: {_first_line(matcher.get_error())}")
        if matcher.is_accepting() and not self._allows_text(mask):
            raise GrammarError(grammar.field, "allows the empty text alone; allow one character or more")
        return matcher

    def probe(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Walks a few ids into the language, as a request would. Raises GrammarError where masks are dear or fail.

        What a step may cost is bounded for each grammar here, since its neighbours in the batch wait for its masks.
        """
        walker = matcher.deep_copy()
        for _ in range(PROBED_IDS):
            spent_s = min(_timed_s(walker.compute_bitmask) for _ in range(2))  # what is found out once is kept
            mask = np.frombuffer(walker.compute_bitmask(), np.uint8)
            if walker.is_error():
                raise GrammarError(grammar.field, f"cannot be run: {_first_line(walker.get_error())}")
            if spent_s > MASK_LIMIT_S:
                raise GrammarError(
                    grammar.field,
                    f"takes {1000 * spent_s:.0f} ms to say which ids may come next, the limit is "
                    f"{1000 * MASK_LIMIT_S:.0f} ms; make it simpler, or its bounds smaller",
                )
            allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(mask, bitorder="little")), self.tokenizer.eos_tokens)
            if walker.is_stopped() or not allowed.size:
                return
            walker.consume_token(int(allowed[0]))

    def _allows_text(self, mask: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        return bool(np.setdiff1d(allowed, np.array(self.tokenizer.eos_tokens)).size)

    def _matcher(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError("", _first_line(matcher.get_error()))
        return matcher

    def _source(self, grammar: Grammar) -> str:
        match grammar.rule:
            case JsonSchema(schema):
                return _of_schema(schema)
            case Regex(pattern):
                return str(LLMatcher.grammar_from_regex(pattern))
            case Lark(source):
                return str(LLMatcher.grammar_from_lark(source))
            case Choices(values):
                return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, values))))
            case StructuralTags() as tags:
                return _TagGrammar(self.tokenizer, tags).source()

    def _blame(self, grammar: Grammar, error: GrammarError) -> GrammarError:
        """The same, with its field. Which tag's schema is wrong, llguidance does not say."""
        if error.field:
            return error
        if isinstance(grammar.rule, StructuralTags):
            for i, tag in enumerate(grammar.rule.tags):
                try:
                    self._matcher(_of_schema(tag.json_schema))
                except GrammarError as its_own:
                    return GrammarError(f"structural_tags.tags[{i}].json_schema", str(its_own))
        return GrammarError(grammar.field, str(error))


class _TagGrammar:
    """One grammar of named parts: `tags`, and a JSON schema a tag."""

    def __init__(self, tokenizer: LLTokenizer, tags: StructuralTags) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        self._lines: list[str] = []
        self._text_triggers: list[str] = []

    def source(self) -> str:
        spans = [self._span(i, tag) for i, tag in enumerate(self._tags.tags)]
        any_span = f"({' | '.join(spans)})"
        if self._tags.required:
            lead = self._lead() if self._tags.text_until else ""
            start = f"{lead} {any_span}" + ("" if self._tags.single else f" (WS? {any_span})*")
        else:
            start = f"{any_span} TEXT | TEXT" if self._tags.single else f"{any_span}* TEXT"
        without = "".join(f" & ~/(.|\\n)*{_escaped(text)}(.|\\n)*/" for text in dict.fromkeys(self._text_triggers))
        lark = [f"start: {start}", *self._lines, "FREE: /(.|\\n)*/", f"TEXT: FREE{without}", "WS: /[ \\n]{1,4}/"]
        parts = [{"name": "tags", "lark_grammar": "\n".join(lark)}]
        for i, tag in enumerate(self._tags.tags):
            schema = json.loads(_of_schema(tag.json_schema))["grammars"][0]["json_schema"]
            parts.append({"name": f"schema_{i}", "json_schema": schema})
        return json.dumps({"grammars": parts})

    def _span(self, i: int, tag: Tag) -> str:
        """Adds the rule of a span, and says its name."""
        name = f"span_{i}"
        rest = f"@schema_{i} {self._literal(tag.end)}"
        if self._tags.required:
            self._lines.append(f"{name}: {self._literal(tag.begin)} {rest}")
            return name
        trigger = tag.trigger or tag.begin
        control, head = self._split(trigger)
        if control is not None:
            text = self._up_to(f"BEFORE_{i}", trigger[: head.start])
            begin = f"{text} <[{control}]> {self._literal(tag.begin[head.stop :])}"
        else:
            self._lines.append(f"head_{i}[lazy]: FREE {_quoted(trigger)}")
            self._text_triggers.append(trigger)
            begin = f"head_{i} {self._literal(tag.begin[len(trigger) :])}"
        self._lines.append(f"{name}: {begin} {rest}")
        return name

    def _lead(self) -> str:
        """Adds the rule of the free text before the first span."""
        control, head = self._split(self._tags.text_until)
        if control is not None:
            text = self._up_to("LEAD", self._tags.text_until[: head.start], "FREE")
            self._lines.append(f"lead: {text} <[{control}]> {self._literal(self._tags.text_until[head.stop :])}")
        else:
            self._lines.append(f"lead[lazy]: FREE {_quoted(self._tags.text_until)}")
        return "lead"

    def _up_to(self, name: str, ending: str, text: str = "TEXT") -> str:
        """The terminal of free text that has this ending, added under that name; of any, without one."""
        if not ending:
            return text
        self._lines.append(f"{name}: {text} & /(.|\\n)*{_escaped(ending)}/")
        return name

    def _split(self, text: str) -> tuple[int | None, slice]:
        """The first control token of a trigger, and where in it that is spelled; None for a trigger of text alone."""
        start = 0
        for token, piece in self._pieces(text):
            if token is not None:
                return token, slice(start, start + len(piece))
            start += len(piece)
        return None, slice(0)

    def _literal(self, text: str) -> str:
        return " ".join(f"<[{token}]>" if token is not None else _quoted(part) for token, part in self._pieces(text))

    def _pieces(self, text: str) -> list[tuple[int | None, str]]:
        """Control tokens by id, and the texts between them."""
        tokenizer = self._tokenizer
        ids = [i for i in tokenizer.tokenize_str(text, parse_special=True) if tokenizer.is_special_token(i)]
        pieces: list[tuple[int | None, str]] = []
        for token in ids:
            spelled = tokenizer.decode_str([token])
            before, found, after = text.partition(spelled)
            if not found:
                continue
            if before:
                pieces.append((None, before))
            pieces.append((token, spelled))
            text = after
        return [*pieces, (None, text)] if text else pieces


def _timed_s(work: Callable[[], object]) -> float:
    """Its CPU time: neighbours on the machine do not count."""
    begun_s = time.thread_time()
    work()
    return time.thread_time() - begun_s


def _of_schema(schema: str) -> str:
    """Raises GrammarError where it is no JSON object."""
    if schema.strip() == "true":  # options stand in objects alone
        schema = "{}"
    try:
        source = LLMatcher.grammar_from_json_schema(schema, JSON_OPTIONS, _FIXED_JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError("", f"cannot be read: {error}") from None
    return str(source)


def _quoted(text: str) -> str:
    """A string of Lark, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A regular expression that matches the text, between the slashes of Lark."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _first_line(message: str) -> str:
    """Without the parser's state or a backtrace, which follow, and on one line."""
    return " ".join(_BEHIND.split(message, maxsplit=1)[0].split()) or "llguidance gives no reason"
