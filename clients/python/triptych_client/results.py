"""What the server answers, as frozen dataclasses."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from triptych.inference.v1 import generation_pb2, inference_pb2

from triptych_client import options as _options


class FinishReason(enum.Enum):
    """Why a choice ended: a stop (EOS, stop id or stop string), the length limit, or whole tool calls."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True)
class Finish:
    """The end of a choice; at most one of the three causes is set, and none of them with LENGTH."""

    reason: FinishReason
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Usage:
    """Ids counted over all choices; `cached_tokens` of the prompt were found in a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class TokenLogprob:
    """An id's natural log-probability, and its rank from 1, the likeliest."""

    token_id: int
    logprob: float
    rank: int
    raw: bytes


@dataclass(frozen=True)
class PositionLogprobs:
    """Of one position: its own id (None for the first prompt id) and the likeliest alternatives."""

    token: TokenLogprob | None
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; in deltas its arguments (JSON) come in pieces, joined by index."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What is new: of one choice, or, in the stream's last, the usage alone (no text, no ids)."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    raw: bytes = b""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: Finish | None = None
    cumulative_logprob: float | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None


@dataclass(frozen=True)
class PromptInfo:
    """Facts about the prompt; seed and fingerprint are what it takes to have the same ids again."""

    prompt_tokens: int
    seed: int
    max_tokens: int
    fingerprint: str
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Completion:
    """A whole answer; `choices` hold each choice in one Delta."""

    request_id: str
    prompt: PromptInfo
    prompt_logprobs: tuple[PositionLogprobs, ...]
    choices: tuple[Delta, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's."""
        return self.choices[0].token_ids

    @property
    def finish(self) -> Finish | None:
        """The first choice's."""
        return self.choices[0].finish

    @property
    def reasoning(self) -> str:
        """The first choice's."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first choice's."""
        return self.choices[0].tool_calls


@dataclass(frozen=True)
class Model:
    """The model served; `defaults` are what unset options mean, under the options' own names."""

    name: str
    aliases: tuple[str, ...]
    revision: str
    fingerprint: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    limits: Mapping[str, int]
    has_chat_template: bool
    tool_call_format: str
    reasoning_format: str
    features: tuple[str, ...]


def join(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """Each choice's deltas in one, in the order of their index."""
    of_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        if delta.usage is None:
            of_choice.setdefault(delta.index, []).append(delta)
    return tuple(_joined(of_choice[index]) for index in sorted(of_choice))


def _joined(parts: list[Delta]) -> Delta:
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        raw=b"".join(part.raw for part in parts),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=_join_tool_calls(tuple(chain.from_iterable(part.tool_calls for part in parts))),
    )


def _join_tool_calls(pieces: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        call = calls.get(piece.index, ToolCall(piece.index, "", "", ""))
        arguments = call.arguments + piece.arguments
        calls[piece.index] = ToolCall(piece.index, call.id or piece.id, call.name or piece.name, arguments)
    return tuple(calls.values())


def delta(choice: inference_pb2.Choice) -> Delta:
    """From the contract's Choice."""
    return Delta(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        raw=choice.raw,
        logprobs=positions(choice.logprobs),
        finish=_finish(choice.finish) if choice.HasField("finish") else None,
        cumulative_logprob=choice.cumulative_logprob if choice.HasField("cumulative_logprob") else None,
        reasoning=choice.reasoning,
        tool_calls=tuple(ToolCall(c.index, c.id, c.name, c.arguments) for c in choice.tool_calls),
    )


def positions(found: Iterable[inference_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    """From the contract's PositionLogprobs."""
    return tuple(
        PositionLogprobs(_token(p.token) if p.HasField("token") else None, tuple(_token(t) for t in p.top))
        for p in found
    )


def prompt_info(info: inference_pb2.PromptInfo) -> PromptInfo:
    """From the contract's PromptInfo."""
    return PromptInfo(
        info.prompt_tokens, info.seed, info.max_tokens, info.fingerprint, tuple(info.token_ids), info.text
    )


def completion(request_id: str, response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> Completion:
    """From the contract's response that holds a whole answer."""
    return Completion(
        request_id,
        prompt_info(response.prompt),
        positions(response.prompt_logprobs.positions),
        tuple(delta(choice) for choice in response.choices),
        usage(response.usage),
    )


def usage(found: inference_pb2.Usage) -> Usage:
    """From the contract's Usage."""
    return Usage(found.prompt_tokens, found.completion_tokens, found.cached_tokens)


def model(found: inference_pb2.Model) -> Model:
    """From the contract's Model."""
    return Model(
        name=found.name,
        aliases=tuple(found.aliases),
        revision=found.revision,
        fingerprint=found.fingerprint,
        context_tokens=found.context_tokens,
        vocab_size=found.vocab_size,
        eos_token_ids=tuple(found.eos_token_ids),
        defaults=_options.from_proto(found.defaults),
        limits=dict(found.limits),
        has_chat_template=found.has_chat_template,
        tool_call_format=found.tool_call_format,
        reasoning_format=found.reasoning_format,
        features=tuple(found.features),
    )


_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


def _finish(finish: inference_pb2.Finish) -> Finish:
    reason = _REASONS.get(finish.reason)
    if reason is None:
        raise ValueError(f"finish reason {finish.reason} is newer than this client; upgrade triptych-client")
    cause = finish.WhichOneof("stopped_by")
    return Finish(reason, **({cause: getattr(finish, cause)} if cause else {}))


def _token(token: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.rank, token.raw)
