"""Everything about a generation except its prompt, as keyword arguments; the server's defaults hold for what is unset.

All fields of the contract can be set. One that the server does not serve yet is refused by it with UNIMPLEMENTED naming
the field, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.message import Message as ProtoMessage
from triptych.inference.v1 import generation_pb2, inference_pb2


class SamplingArgs(TypedDict, total=False):
    """How one id is drawn, applied in this order; ranges and defaults stand in generation.proto."""

    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


class OptionArgs(SamplingArgs, total=False):
    """Fields of inference.proto's Options, `sampling` spread out; None is the same as leaving one out."""

    seed: int | None
    n: int | None
    best_of: int | None
    grammar: generation_pb2.Grammar | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_string: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool | None
    raw_bytes: bool | None
    skip_special_tokens: bool | None
    min_delta_tokens: int | None
    min_delta_interval_ms: int | None
    priority: int | None
    cache_salt: str | None
    adapter: str | None
    label: str | None
    resume: inference_pb2.Resume | None
    truncate_prompt_tokens: int | None


_SAMPLING = frozenset(SamplingArgs.__annotations__)
_KNOWN = frozenset(OptionArgs.__annotations__)


def to_proto(args: OptionArgs) -> inference_pb2.Options:
    """Raises TypeError for a name that is no option, ValueError for a value that its field cannot hold."""
    options = inference_pb2.Options()
    for name, value in args.items():
        if name not in _KNOWN:
            raise TypeError(f"{name!r} is not an option; known: {', '.join(sorted(_KNOWN))}")
        if value is not None:
            _set(options.sampling if name in _SAMPLING else options, name, value)
    return options


def from_proto(options: inference_pb2.Options) -> dict[str, Any]:
    """The fields that are set, as keyword arguments."""
    found: dict[str, Any] = {}
    for message in (options.sampling, options):
        for field, value in message.ListFields():
            if field.name == "sampling":
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                found[field.name] = dict(value)
            elif field.is_repeated:
                found[field.name] = tuple(value)
            else:
                found[field.name] = value
    return found


def _set(message: ProtoMessage, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    try:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            getattr(message, name).CopyFrom(value)
        elif field.message_type is not None:
            getattr(message, name).update(value)
        elif field.is_repeated:
            getattr(message, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
