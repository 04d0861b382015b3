"""The one model a frontend serves: its name, tokenizer, template and defaults, read once at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from services.common import checkpoint
from services.common.errors import RequestError
from services.frontend import chat, tokenizer
from services.frontend.control_tokens import ControlTokens
from services.frontend.conversation import Calling, Conversation, ToolUse
from services.frontend.defaults import sampling_defaults
from services.frontend.output_reader import OutputFormats
from services.frontend.reasoning import tags
from services.frontend.reasoning.tags import ReasoningFormat
from services.frontend.request import EngineFacts, Sampling
from services.frontend.template_processes import Budget, TemplateProcesses
from services.frontend.tokenizer import TextTokenizer, off_loop
from services.frontend.tool_calls import formats
from services.frontend.tool_calls.format import ToolCallFormat

TEMPLATE_BUDGET = Budget(time_s=5.0, text_bytes=4 * 1024 * 1024)
AUTO = "auto"
"""The format that the chat template shows."""


@dataclass(frozen=True)
class ChatPrompt:
    """Ids, and what is looked for in the answer to them. `reasoning_until` ends the reasoning that is to come first."""

    ids: tuple[int, ...]
    formats: OutputFormats | None = None
    reasoning_until: str = ""


@dataclass(frozen=True)
class ServedModel:
    """Text goes in and comes out through this; nothing in it changes after start."""

    name: str
    aliases: tuple[str, ...]
    revision: str
    folder: Path
    tokenizer: TextTokenizer
    tokenizer_hash: str
    chat: chat.ChatEncoder
    templates: TemplateProcesses
    """Renders what `chat` makes ready."""
    defaults: Sampling
    eos_ids: frozenset[int]
    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Optional parts that this model has here."""
        has = {"tools": self.tool_calls is not None and self.chat.takes_tools, "reasoning": self.reasoning is not None}
        return tuple(name for name, there in has.items() if there)

    def check_name(self, name: str) -> None:
        """Raises NOT_FOUND for a model that is not this one, by name or alias; an empty name is."""
        if name and name != self.name and name not in self.aliases:
            also = f" (also as {', '.join(map(repr, self.aliases))})" if self.aliases else ""
            raise RequestError(
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
                f"model {name[:100]!r} is not served here, {self.name!r} is{also}",
            )

    def vocab_size(self, facts: EngineFacts) -> int:
        """Ids that a request may name lie below it: those of the tokenizer that the engine's model has too.

        A model's own vocabulary may be padded past the tokenizer's; what is there stands for no text.
        """
        return min(self.tokenizer.vocab_size, facts.vocab_size)

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Ids of a text, off the event loop when it is large."""
        return await off_loop(len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, conversation: Conversation, path: str) -> ChatPrompt:
        """Prompt ids of a conversation, off the event loop when it is large. Raises RequestError.

        `path` is of the messages.
        """
        name = self.chat.template_for(conversation, path)
        variables = await off_loop(conversation.size, lambda: self.chat.variables(conversation, name))
        written = await self.templates.render(name, variables, path)
        prompt = self.chat.prompt(written, conversation, path)
        ids = await off_loop(len(prompt), lambda: self.chat.ids(prompt))
        found = self._formats(conversation, prompt)
        return ChatPrompt(ids, found, self._reasoning_until(conversation, prompt, found))

    def check_tools(self, conversation: Conversation, path: str) -> None:
        """Raises FAILED_PRECONDITION for tools that the model cannot be told of, or whose calls nobody could read.

        `path` is of the request.
        """
        if not conversation.shown_tools:
            return
        if self.chat.fault is None and not self.chat.takes_tools:
            said = "the model's chat template takes no tools" if self.chat.has_template else "this model cannot chat"
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "NO_TOOLS", f"{path}tools: {said}; leave them out")
        if self.tool_calls is None:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_TOOL_CALL_FORMAT",
                f"{path}tools: it is not known how this model writes calls; start the frontend with --tool-call-format",
            )

    def call_format(self, tool_use: ToolUse) -> ToolCallFormat | None:
        """How the calls of an answer are written; None where there are to be none."""
        return None if tool_use.calling is Calling.NONE else self.tool_calls

    def _reasoning_until(self, conversation: Conversation, prompt: str, found: OutputFormats | None) -> str:
        if found is None or found.reasoning is None:
            return ""
        left_out = conversation.continues or found.reasoning.is_closed(prompt)
        return found.reasoning.close if found.in_reasoning or not left_out else ""

    def _formats(self, conversation: Conversation, prompt: str) -> OutputFormats | None:
        """What is looked for in the answer; None for nothing, and text is text."""
        tool_use = conversation.tool_use
        schemas = {tool.name: tool.schema for tool in tool_use.tools}
        found = OutputFormats(self.reasoning, self.call_format(tool_use), schemas=schemas)
        if found.reasoning is None:
            return None if found.tool_calls is None else found
        if conversation.continues:
            return replace(found, in_reasoning=found.reasoning.is_left_open(conversation.turns[-1].text))
        return replace(found, in_reasoning=found.reasoning.is_open(prompt))


def load(
    model: str,
    served_name: str | None,
    aliases: Sequence[str] = (),
    *,
    revision: str | None = None,
    offline: bool = False,
    template_budget: Budget = TEMPLATE_BUDGET,
    tool_call_format: str = AUTO,
    reasoning_format: str = AUTO,
) -> ServedModel:
    """Reads a checkpoint folder's text side; a hub's is fetched first where it must be. Raises StartError."""
    path = checkpoint.find(model, revision=revision, offline=offline)
    definition = tokenizer.load_definition(path)
    config = checkpoint.read_config(path)
    name = served_name or checkpoint.name(path)
    texts = tokenizer.load(definition, path)
    encoder = chat.ChatEncoder(chat.load_source(path), ControlTokens(definition))
    template = "\n".join(encoder.sources.values())
    return ServedModel(
        name=name,
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias != name),
        revision=checkpoint.revision(path),
        folder=path,
        tokenizer=texts,
        tokenizer_hash=checkpoint.tokenizer_hash(path),
        chat=encoder,
        templates=TemplateProcesses(encoder.sources, template_budget),
        defaults=sampling_defaults(config.generation),
        eos_ids=frozenset(config.eos_token_ids),
        tool_calls=(formats.recognise(template) if tool_call_format == AUTO else formats.FORMATS.get(tool_call_format)),
        reasoning=tags.recognise(template) if reasoning_format == AUTO else tags.FORMATS.get(reasoning_format),
    )
