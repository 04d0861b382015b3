"""Chat: from a conversation to what the checkpoint's template is shown, and from what it wrote to prompt ids."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import jinja2

from services.common.errors import RequestError, StartError, invalid
from services.frontend.chat_template import ChatTemplate, RefusalError
from services.frontend.control_tokens import ControlTokens
from services.frontend.conversation import Conversation, PastCall, Tool, Turn

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED = frozenset(
    {"messages", "tools", "custom_tools", "add_generation_prompt", "continue_final_message", *_NAMED_TOKENS}
)
"""Variables of a template that no request sets; `custom_tools` stands for `tools` in Llama's."""
DEFAULT, TOOL_USE = "default", "tool_use"
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class TemplateSource:
    """A checkpoint's chat template; `text` None without one. `tokens` are its named special tokens.

    `tool_use` is the one for requests with tools, where a checkpoint has two.
    """

    text: str | None
    tokens: dict[str, str] = field(default_factory=dict)
    tool_use: str | None = None


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
    template = config.get("chat_template")
    named = template if isinstance(template, list) else []
    texts = {entry.get("name"): entry["template"] for entry in named if isinstance(entry.get("template"), str)}
    if isinstance(template, str):
        texts[DEFAULT] = template
    text = _read_text(path / "chat_template.jinja") or texts.get(DEFAULT)
    tool_use = _read_text(path / "additional_chat_templates" / "tool_use.jinja") or texts.get(TOOL_USE)
    return TemplateSource(text, tokens, tool_use)


class ChatEncoder:
    """Makes a conversation a template's variables, and its text ids; control ids come from the template alone."""

    def __init__(self, source: TemplateSource, controls: ControlTokens) -> None:
        self._controls = controls
        self._tokens = source.tokens
        self._end = "".join(secrets.choice("0123456789") for _ in range(40))
        """Stands behind a turn that is to be continued: the text before it is the prompt."""
        self._templates: dict[str, ChatTemplate] = {}
        self.fault: str | None = None
        """Why a template cannot be compiled, if so."""
        self.has_template = source.text is not None
        self.sources = {
            name: text for name, text in ((DEFAULT, source.text), (TOOL_USE, source.tool_use)) if text is not None
        }
        try:
            self._templates = {name: ChatTemplate(text) for name, text in self.sources.items()}
        except jinja2.TemplateError as error:
            self.fault = f"line {getattr(error, 'lineno', '?')}: {error}"

    @property
    def takes_tools(self) -> bool:
        """Some template writes the tools of a request into the prompt."""
        return any("tools" in template.variables for template in self._templates.values())

    def template_for(self, conversation: Conversation, path: str) -> str:
        """The name of the template that writes it.

        Raises FAILED_PRECONDITION without one; INVALID_ARGUMENT naming `path` where it cannot be compiled, or
        template_args beside it for one that the template does not look at.
        """
        if not self.has_template:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_CHAT_TEMPLATE",
                "this model has no chat template; use Generate with a prompt in the model's own format",
            )
        if self.fault is not None:
            raise invalid(path, f"the model's chat template has an error, {self.fault}", "CHAT_TEMPLATE")
        name = TOOL_USE if conversation.shown_tools and TOOL_USE in self._templates else DEFAULT
        known = self._templates[name].variables - _RESERVED
        for key in conversation.template_args:
            field_path = f"{path.removesuffix('messages')}template_args[{key!r}]"
            if key in _RESERVED:
                raise invalid(field_path, "is set by the request's other fields or by the model alone")
            if key not in known:
                shown = ", ".join(sorted(known)) or "none"
                raise invalid(field_path, f"is nothing that the model's chat template looks at; it knows: {shown}")
        return name

    def variables(self, conversation: Conversation, template: str) -> dict[str, Any]:
        """What the template is shown, as JSON could hold it; control tokens that users spell are marked in it."""
        as_text = self._templates[template].joins_arguments
        messages = [self._message(turn, as_text) for turn in conversation.turns]
        if conversation.continues:
            messages[-1]["content"] += self._end
        return {
            **self._marked(conversation.template_args),
            **self._tokens,
            "messages": messages,
            "tools": [self._tool(tool) for tool in conversation.shown_tools] or None,
            "add_generation_prompt": not conversation.continues,
        }

    def prompt(self, written: str, conversation: Conversation, path: str) -> str:
        """The prompt's text of what a template wrote; control tokens that users spelled are still marked in it.

        Raises INVALID_ARGUMENT where a turn that is to be continued is not in it.
        """
        if not conversation.continues:
            return written
        prompt, end, _ = written.rpartition(self._end)
        if not end:
            raise invalid(path, "the model's chat template does not show the last one, which is to be continued")
        return prompt

    def ids(self, prompt: str) -> tuple[int, ...]:
        """Of a prompt's text."""
        return self._controls.encode(prompt)

    def render(self, conversation: Conversation, path: str, most_characters: int = 1 << 24) -> str:
        """The prompt's text, made in this process: a template that does not end is not ended."""
        name = self.template_for(conversation, path)
        template = self._templates[name]
        try:
            written = template.render(self.variables(conversation, name), most_characters)
        except RefusalError as error:
            said = template.own_words(str(error))
            raise invalid(path, f"the model's chat template refuses them: {said}", "CHAT_TEMPLATE") from error
        except Exception as error:  # a template is a program: whatever it raises is its answer to these messages
            raise invalid(path, f"the model's chat template fails: {type(error).__name__}", "CHAT_TEMPLATE") from error
        return self.prompt(written, conversation, path)

    def _message(self, turn: Turn, arguments_as_text: bool) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": turn.role,
            "content": self._controls.mark(turn.text, answer=turn.role == "assistant"),
        }
        if turn.name:
            message["name"] = self._controls.mark(turn.name)
        if turn.reasoning:
            # Templates look for the one or the other.
            message["reasoning_content"] = message["reasoning"] = self._controls.mark(turn.reasoning)
        if turn.calls:
            message["tool_calls"] = [self._call(call, arguments_as_text) for call in turn.calls]
        if turn.call_id:
            message["tool_call_id"] = self._controls.mark(turn.call_id)
        return message

    def _call(self, call: PastCall, arguments_as_text: bool) -> dict[str, Any]:
        arguments = self._controls.mark(call.written) if arguments_as_text else self._marked(call.arguments)
        function = {"name": self._controls.mark(call.name), "arguments": arguments}
        return {"id": self._controls.mark(call.id), "type": "function", "function": function}

    def _tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self._controls.mark(tool.name)}
        if tool.description:
            function["description"] = self._controls.mark(tool.description)
        function["parameters"] = self._marked(tool.schema or _NO_ARGUMENTS)
        return {"type": "function", "function": function}

    def _marked(self, value: Any) -> Any:
        """A JSON value whose texts, keys too, are marked."""
        if isinstance(value, str):
            return self._controls.mark(value)
        if isinstance(value, Mapping):
            return {self._controls.mark(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        return value


def _read_text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


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
