"""Chat: the checkpoint's jinja template, in a sandbox, from messages to prompt ids.

The template sees what transformers' apply_chat_template shows it, so a checkpoint's template means the same here.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import RequestError, StartError, invalid
from services.frontend.control_tokens import ControlTokens

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TemplateSource:
    """A checkpoint's chat template; `text` None without one. `tokens` are its named special tokens."""

    text: str | None
    tokens: dict[str, str] = field(default_factory=dict)


def load_source(path: Path) -> TemplateSource:
    """Reads chat_template.jinja, else tokenizer_config.json's "chat_template". Raises StartError."""
    config = _read_json(path / "tokenizer_config.json")
    legacy = _read_json(path / "special_tokens_map.json")
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name, legacy.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    file = path / "chat_template.jinja"
    if file.is_file():
        return TemplateSource(file.read_text(encoding="utf-8"), tokens)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return TemplateSource(template if isinstance(template, str) else None, tokens)


class ChatEncoder:
    """Renders a conversation and encodes it; control ids come from the template alone."""

    def __init__(self, source: TemplateSource, controls: ControlTokens) -> None:
        self._controls = controls
        self._tokens = source.tokens
        self._template: jinja2.Template | None = None
        self._words: frozenset[str] = frozenset()
        self.fault: str | None = None
        """Why the template cannot be compiled, if so."""
        if source.text is not None:
            try:
                environment = _environment()
                self._template = environment.from_string(source.text)
                constants = environment.parse(source.text).find_all(nodes.Const)
                self._words = frozenset(const.value for const in constants if isinstance(const.value, str))
            except jinja2.TemplateError as error:
                self.fault = f"line {getattr(error, 'lineno', '?')}: {error}"
        self.has_template = source.text is not None

    def encode(self, messages: Sequence[tuple[str, str]], path: str) -> tuple[int, ...]:
        """Prompt ids for (role, text) messages, the assistant's turn opened.

        Raises FAILED_PRECONDITION without a template; INVALID_ARGUMENT naming `path` where the template cannot be
        compiled or refuses the messages, with its own message.
        """
        return self._controls.encode(self.render(messages, path))

    def render(self, messages: Sequence[tuple[str, str]], path: str) -> str:
        """The template's text; control tokens that messages spell are still marked in it."""
        if not self.has_template:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_CHAT_TEMPLATE",
                "this model has no chat template; use Generate with a prompt in the model's own format",
            )
        if self._template is None:
            raise invalid(path, f"the model's chat template has an error, {self.fault}", "CHAT_TEMPLATE")
        conversation = [
            {"role": role, "content": self._controls.mark(text, answer=role == "assistant")} for role, text in messages
        ]
        try:
            return self._template.render(messages=conversation, add_generation_prompt=True, **self._tokens)
        except _Refusal as error:
            said = self._own_words(str(error))
            raise invalid(path, f"the model's chat template refuses them: {said}", "CHAT_TEMPLATE") from error
        except Exception as error:  # a template is a program: whatever it raises is its answer to these messages
            raise invalid(path, f"the model's chat template fails: {type(error).__name__}", "CHAT_TEMPLATE") from error

    def _own_words(self, said: str) -> str:
        """What the template itself says; text that it put in, a user's perhaps, is left out."""
        if said in self._words:
            return said
        longest = max((word for word in self._words if word in said), key=len, default="")
        return f"{longest.strip()} ..."


class _Refusal(jinja2.TemplateError):
    """What a template said by raise_exception."""


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no template wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{file} does not hold a JSON object")
    return value
