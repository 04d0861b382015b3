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
            one.text_bytes += len(choice.text.encode())
            one.finished |= choice.HasField("finish")
            if choice.logprobs:
                one.cumulative_logprob += sum(entry.token.logprob for entry in choice.logprobs)
    return resume


def joined(messages: Sequence[Any]) -> dict[int, inference_pb2.Choice]:
    """Each choice whole: text, ids, logprobs, its one finish."""
    whole: dict[int, inference_pb2.Choice] = {}
    for message in messages:
        for choice in message.choices:
            one = whole.setdefault(choice.index, inference_pb2.Choice())
            assert not one.HasField("finish"), "something comes after the finish"
            text = one.text + choice.text
            one.MergeFrom(choice)
            one.text = text
    return dict(sorted(whole.items()))
