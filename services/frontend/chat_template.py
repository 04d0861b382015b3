"""A checkpoint's chat template, in jinja's sandbox: variables in, text out.

It sees what transformers' apply_chat_template shows it, so a checkpoint's template means the same here. This module is
what a worker process loads (`template_worker.py`), and so imports little.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RefusalError(jinja2.TemplateError):
    """What a template said by raise_exception."""


class TooLargeError(Exception):
    """The text has more characters than it may."""


class ChatTemplate:
    """Compiled. Raises jinja2.TemplateError where it cannot be."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        constants = tree.find_all(nodes.Const)
        self._words = frozenset(const.value for const in constants if isinstance(const.value, str))
        self.variables = frozenset(meta.find_undeclared_variables(tree)) - frozenset(environment.globals)
        """What it looks at, and nobody but who renders it can set."""
        self.joins_arguments = any(_joins_arguments(node) for node in tree.find_all((nodes.Add, nodes.Concat)))
        """It puts the arguments of earlier calls beside other text as they are: they must be text."""

    def render(self, variables: Mapping[str, Any], most_characters: int) -> str:
        """Raises TooLargeError, RefusalError, or whatever the template raises: it is a program."""
        parts = []
        for part in self._template.generate(variables):
            parts.append(part)
            most_characters -= len(part)
            if most_characters < 0:
                raise TooLargeError
        return "".join(parts)

    def own_words(self, said: str) -> str:
        """What the template itself says; text that it put in, a user's perhaps, is left out."""
        if said in self._words:
            return said
        longest = max((word for word in self._words if word in said), key=len, default="")
        return f"{longest.strip()} ..."


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


def _joins_arguments(node: nodes.Node) -> bool:
    return any(_is_arguments(operand) for operand in _operands(node))


def _operands(node: nodes.Node) -> Iterator[nodes.Node]:
    if isinstance(node, nodes.Concat):
        yield from node.nodes
    elif isinstance(node, nodes.Add):
        yield node.left
        yield node.right


def _is_arguments(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"


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
    raise RefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
