"""The one model a frontend serves: its name, tokenizer, template and defaults, read once at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common import checkpoint
from services.common.errors import RequestError
from services.frontend import chat, tokenizer
from services.frontend.control_tokens import ControlTokens
from services.frontend.defaults import sampling_defaults
from services.frontend.request import EngineFacts, Sampling
from services.frontend.tokenizer import TextTokenizer, off_loop

_TURN_BYTES = 64
"""What a chat template writes around a message, roughly."""


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
    defaults: Sampling
    eos_ids: frozenset[int]

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

    async def encode_chat(self, messages: Sequence[tuple[str, str]], path: str) -> tuple[int, ...]:
        """Prompt ids of a conversation, off the event loop when it is large. Raises RequestError."""
        # What a template writes around a message counts too: many empty ones are work as well.
        size = sum(len(text) + _TURN_BYTES for _, text in messages)
        return await off_loop(size, lambda: self.chat.encode(messages, path))


def load(
    model: str,
    served_name: str | None,
    aliases: Sequence[str] = (),
    *,
    revision: str | None = None,
    offline: bool = False,
) -> ServedModel:
    """Reads a checkpoint folder's text side; a hub's is fetched first where it must be. Raises StartError."""
    path = checkpoint.find(model, revision=revision, offline=offline)
    definition = tokenizer.load_definition(path)
    config = checkpoint.read_config(path)
    name = served_name or checkpoint.name(path)
    return ServedModel(
        name=name,
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias != name),
        revision=checkpoint.revision(path),
        folder=path,
        tokenizer=tokenizer.load(definition, path),
        tokenizer_hash=checkpoint.tokenizer_hash(path),
        chat=chat.ChatEncoder(chat.load_source(path), ControlTokens(definition)),
        defaults=sampling_defaults(config.generation),
        eos_ids=frozenset(config.eos_token_ids),
    )
