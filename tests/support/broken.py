"""A stream that breaks after so many messages, and what its client knows then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.inference.v1 import inference_pb2


def resume_of(messages: Sequence[Any]) -> inference_pb2.Resume:
    """What a client that has had these messages, the first at least, sends along."""
    resume = inference_pb2.Resume(seed=messages[0].prompt.seed, fingerprint=messages[0].prompt.fingerprint)
    received: dict[int, inference_pb2.Resume.Received] = {}
    for message in messages:
        for choice in message.choices:
            if choice.index not in received:
                received[choice.index] = resume.choices.add(index=choice.index)
            one = received[choice.index]
            one.token_ids.extend(choice.token_ids)
            called = [part for call in choice.tool_calls for part in (call.name, call.arguments)]
            one.text_bytes += sum(len(part.encode()) for part in (choice.text, choice.reasoning, *called))
            one.finished |= choice.HasField("finish")
            if choice.logprobs:
                one.cumulative_logprob += sum(entry.token.logprob for entry in choice.logprobs)
    return resume


def joined(messages: Sequence[Any]) -> dict[int, inference_pb2.Choice]:
    """Each choice whole: text, reasoning, calls, ids, logprobs, its one finish."""
    whole: dict[int, inference_pb2.Choice] = {}
    for message in messages:
        for choice in message.choices:
            one = whole.setdefault(choice.index, inference_pb2.Choice())
            assert not one.HasField("finish"), "something comes after the finish"
            text, reasoning = one.text + choice.text, one.reasoning + choice.reasoning
            calls = _with_calls(one, choice)
            one.MergeFrom(choice)
            one.text, one.reasoning = text, reasoning
            del one.tool_calls[:]
            one.tool_calls.extend(calls)
    return dict(sorted(whole.items()))


def _with_calls(one: inference_pb2.Choice, more: inference_pb2.Choice) -> list[inference_pb2.ToolCall]:
    calls = {call.index: call for call in one.tool_calls}
    for piece in more.tool_calls:
        call = calls.setdefault(piece.index, inference_pb2.ToolCall(index=piece.index))
        assert not (call.name and piece.name), "a call's name comes twice"
        call.id, call.name, call.arguments = (
            call.id or piece.id,
            call.name or piece.name,
            call.arguments + piece.arguments,
        )
    return list(calls.values())
