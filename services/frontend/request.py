"""What a request is once it is through the door: own types, every value resolved and in range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.grammar import Grammar
from services.frontend.output_reader import OutputFormats


@dataclass(frozen=True)
class Sampling:
    """How ids are drawn; fields as in the contract's Sampling, none unset. `top_k` -1 is off."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hold:
    """When a delta is sent that is held back: with `tokens` ids, or `interval_s` after the choice's last one.

    Either is enough; 0 is no condition, both 0 hold nothing back. An interval does not hold back the first delta.
    """

    tokens: int = 0
    interval_s: float = 0.0


@dataclass(frozen=True)
class Received:
    """What had arrived of a choice when its stream broke; `place` is its entry in the request, for errors."""

    place: int
    token_ids: tuple[int, ...]
    text_bytes: int
    is_finished: bool
    cumulative_logprob: float


@dataclass(frozen=True)
class Options:
    """Everything about a generation except its prompt. `max_tokens` None means to the end of the context."""

    sampling: Sampling
    seed: int
    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    raw_bytes: bool = False
    skip_special_tokens: bool = True
    hold: Hold = Hold()
    priority: int = 0
    cache_salt: str = ""
    label: str = ""
    grammar: Grammar | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def num_choices(self) -> int:
        """Those that are run."""
        return self.n if self.best_of is None else self.best_of

    def kept(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """A prompt's ids as it is run with."""
        if self.truncate_prompt_tokens is None:
            return tuple(prompt_ids)
        return tuple(prompt_ids[-self.truncate_prompt_tokens :])

    @property
    def engine_logprobs(self) -> int | None:
        """Alternatives to each id that the engine is asked for; choices that compete need their ids' own."""
        return 0 if self.logprobs is None and self.best_of is not None else self.logprobs

    received: Mapping[int, Received] = field(default_factory=dict)
    """By choice, of a stream that is resumed; empty: all choices start."""


@dataclass(frozen=True)
class EngineFacts:
    """An engine's hello. `block_tokens` is 0 where it takes no digests of blocks, `fragment_bytes` where no pieces."""

    engine_id: str
    model: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    block_tokens: int = 0
    max_choices: int = 1
    max_logprobs: int = 0
    fragment_bytes: int = 0
    features: frozenset[str] = frozenset()
    """Optional parts of the engine contract that it serves; what is not among them is not sent to it."""


@dataclass(frozen=True)
class Job:
    """A request that can be given to an engine. `max_tokens` is the effective one; `prompt_text` is for echo.

    `formats` say what is looked for in a chat's answer; None: its text is as it is.
    """

    prompt_ids: tuple[int, ...]
    options: Options
    max_tokens: int
    eos_ids: frozenset[int]
    engine: EngineFacts
    prompt_text: str | None = None
    formats: OutputFormats | None = None

    @property
    def asks_engine(self) -> bool:
        """There is an id to be sampled, or one of the prompt to be scored: the first has nothing before it."""
        return self.max_tokens > 0 or (self.options.prompt_logprobs is not None and len(self.prompt_ids) > 1)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a choice: the request's own, and EOS unless it is ignored."""
        eos = frozenset() if self.options.ignore_eos else self.eos_ids
        return tuple(sorted(eos | set(self.options.stop_token_ids)))


@dataclass(frozen=True)
class Limits:
    """Caps of the configuration on what one request may hold."""

    message_bytes: int
    prompt_bytes: int
    messages: int
    content_parts: int
    tools: int
    tool_schema_bytes: int
    rendered_bytes: int
    choices: int
    logprobs: int
    scored_tokens: int
    stop_strings: int
    stop_string_bytes: int
    stop_token_ids: int
    logit_biases: int
    allowed_token_ids: int
    banned_token_ids: int
    detokenize_ids: int
    cache_salt_bytes: int
    grammar_bytes: int
    min_priority: int
    min_delta_tokens: int
    min_delta_interval_ms: int
    unread_tokens: int
    slow_reader_s: float

    def named(self, engine: EngineFacts) -> dict[str, int]:
        """By configuration key; choices and logprobs no more than the engine takes."""
        return {
            "max_message_bytes": self.message_bytes,
            "max_prompt_bytes": self.prompt_bytes,
            "max_messages": self.messages,
            "max_content_parts": self.content_parts,
            "max_tools": self.tools,
            "max_tool_schema_bytes": self.tool_schema_bytes,
            "max_rendered_bytes": self.rendered_bytes,
            "max_choices": min(self.choices, engine.max_choices),
            "max_logprobs": min(self.logprobs, engine.max_logprobs),
            "max_scored_tokens": self.scored_tokens,
            "max_stop_strings": self.stop_strings,
            "max_stop_string_bytes": self.stop_string_bytes,
            "max_stop_token_ids": self.stop_token_ids,
            "max_logit_biases": self.logit_biases,
            "max_allowed_token_ids": self.allowed_token_ids,
            "max_banned_token_ids": self.banned_token_ids,
            "max_detokenize_ids": self.detokenize_ids,
            "max_cache_salt_bytes": self.cache_salt_bytes,
            "max_grammar_bytes": self.grammar_bytes,
            "max_min_delta_tokens": self.min_delta_tokens,
            "max_min_delta_interval_ms": self.min_delta_interval_ms,
            "max_unread_tokens": self.unread_tokens,
        }


@dataclass(frozen=True)
class Stopped:
    """Why a choice ended, and what stopped it (at most one of the others).

    `reason` is "stop", "length", or "tool_calls": a stop after at least one whole call.
    """

    reason: str
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Logprob:
    """Of an id that was sampled: natural logarithm, and rank from 1; `top` are its alternatives, likeliest first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob)"""


@dataclass(frozen=True)
class Called:
    """What is new of a tool call: `id` and `name` come once, `arguments` (JSON) in pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(NamedTuple):
    """What is new of a choice: text may lag behind ids; `logprobs` is as long as `token_ids`, or empty.

    One a token: a tuple is made in a fifth of the time that a frozen dataclass takes.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    stopped: Stopped | None = None
    cumulative_logprob: float | None = None
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
