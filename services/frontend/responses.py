"""Answers of the public API, from own types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from triptych.inference.v1 import generation_pb2, inference_pb2

from services.frontend.engine import Scores
from services.frontend.request import Delta, Job, Options, Sampling, Stopped
from services.frontend.tokenizer import TextTokenizer

R = TypeVar("R", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)

_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
    "tool_calls": generation_pb2.FINISH_REASON_TOOL_CALLS,
}

_PIECE_IDS = 4096

_SCORES_A_MESSAGE = 1024
"""Positions whose messages take a few milliseconds to make: the event loop has others to serve."""
_POSITION_BYTES = 32
"""Of one on the wire at most, its raw bytes and its alternatives aside: 4 numbers of 5 bytes with their tags, and 2
messages around them."""
_TOP_BYTES = 24
"""Of an alternative, its raw bytes aside: 3 numbers of 5 bytes with their tags, and a message around them."""


def prompt_info(job: Job) -> inference_pb2.PromptInfo:
    """The facts that come before any token."""
    return inference_pb2.PromptInfo(
        prompt_tokens=len(job.prompt_ids),
        seed=job.options.seed,
        max_tokens=job.max_tokens,
        fingerprint=job.engine.fingerprint,
        token_ids=job.prompt_ids if job.options.echo else (),
        text=job.prompt_text or "",
    )


def prompt_logprobs(
    job: Job, scores: Scores, tokenizer: TextTokenizer, message_bytes: int
) -> Iterator[inference_pb2.PromptLogprobs]:
    """Messages of at most `message_bytes`; the first position, which nothing foretells, stands before the second."""
    start = 0 if scores.start <= 1 else scores.start
    positions = [inference_pb2.PositionLogprobs()] if start == 0 else []
    size = _POSITION_BYTES
    most = max(1, _SCORES_A_MESSAGE // (1 + scores.top_ids.shape[1]))
    for at, (logprob, rank) in enumerate(zip(scores.logprobs.tolist(), scores.ranks.tolist(), strict=True)):
        token_id = job.prompt_ids[scores.start + at]
        token = inference_pb2.TokenLogprob(
            token_id=token_id, logprob=logprob, rank=rank, raw=tokenizer.token_bytes(token_id)
        )
        top = zip(scores.top_ids[at].tolist(), scores.top_logprobs[at].tolist(), strict=True)
        position = inference_pb2.PositionLogprobs(token=token, top=_top(top, tokenizer))
        added = _POSITION_BYTES + len(token.raw) + sum(_TOP_BYTES + len(one.raw) for one in position.top)
        if positions and (size + added > message_bytes or len(positions) >= most):
            yield inference_pb2.PromptLogprobs(start=start, positions=positions)
            start, positions, size = scores.start + at, [], 0
        size += added
        positions.append(position)
    yield inference_pb2.PromptLogprobs(start=start, positions=positions)


def choices(message: R, deltas: Sequence[tuple[int, Delta]], tokenizer: TextTokenizer, *, raw: bool = False) -> R:
    """The message with deltas, each of a choice, filled in, with the ids' bytes where `raw`.

    One a token: set in place, where arguments are copied.
    """
    for index, delta in deltas:
        choice = message.choices.add()
        if index:
            choice.index = index
        choice.text = delta.text
        if delta.reasoning:
            choice.reasoning = delta.reasoning
        for called in delta.calls:
            choice.tool_calls.add(index=called.index, id=called.id, name=called.name, arguments=called.arguments)
        choice.token_ids.extend(delta.token_ids)
        if raw:
            choice.raw = b"".join(map(tokenizer.token_bytes, delta.token_ids))
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False):
            position = choice.logprobs.add()
            position.token.MergeFrom(
                inference_pb2.TokenLogprob(
                    token_id=token_id, logprob=entry.logprob, rank=entry.rank, raw=tokenizer.token_bytes(token_id)
                )
            )
            position.top.extend(_top(entry.top, tokenizer))
        if delta.stopped is not None:
            choice.finish.CopyFrom(_finish(delta.stopped))
        if delta.cumulative_logprob is not None:
            choice.cumulative_logprob = delta.cumulative_logprob
    return message


def _top(entries: Iterable[tuple[int, float]], tokenizer: TextTokenizer) -> list[inference_pb2.TokenLogprob]:
    """Alternatives, likeliest first: the rank of each is its place."""
    return [
        inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, raw=tokenizer.token_bytes(token_id))
        for rank, (token_id, logprob) in enumerate(entries, start=1)
    ]


def tokenized(ids: Sequence[int], tokenizer: TextTokenizer) -> inference_pb2.TokenizeResponse:
    """Ids, and each one's bytes. Made in pieces: a single call for a million would keep the GIL from others."""
    answer = inference_pb2.TokenizeResponse()
    for start in range(0, len(ids), _PIECE_IDS):
        piece = ids[start : start + _PIECE_IDS]
        answer.token_ids.extend(piece)
        answer.raw.extend([tokenizer.token_bytes(i) for i in piece])
    return answer


def usage(job: Job, completion_tokens: int, cached_tokens: int) -> inference_pb2.Usage:
    """What was used, over all choices."""
    return inference_pb2.Usage(
        prompt_tokens=len(job.prompt_ids), completion_tokens=completion_tokens, cached_tokens=cached_tokens
    )


def _finish(stopped: Stopped) -> inference_pb2.Finish:
    finish = inference_pb2.Finish(reason=_REASONS[stopped.reason])
    if stopped.eos_token_id is not None:
        finish.eos_token_id = stopped.eos_token_id
    elif stopped.stop_token_id is not None:
        finish.stop_token_id = stopped.stop_token_id
    elif stopped.stop_string is not None:
        finish.stop_string = stopped.stop_string
    return finish


def defaults(sampling: Sampling) -> inference_pb2.Options:
    """What unset means, in the contract's own words."""
    return inference_pb2.Options(
        sampling=generation_pb2.Sampling(
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        ),
        n=1,
        skip_special_tokens=Options(sampling, seed=0).skip_special_tokens,
    )


class Fold(Generic[R]):
    """A stream's messages folded into one: the unary twin's answer."""

    def __init__(self, empty: R) -> None:
        self._folded: R = empty
        self._texts: dict[int, list[str]] = {}
        self._reasoning: dict[int, list[str]] = {}
        self._raw: dict[int, list[bytes]] = {}
        self._calls: dict[int, dict[int, inference_pb2.ToolCall]] = {}
        self._choices: dict[int, inference_pb2.Choice] = {}

    async def write(self, message: R) -> None:
        """Takes the next message of the stream."""
        if message.HasField("prompt"):
            self._folded.prompt.CopyFrom(message.prompt)
        if message.HasField("prompt_logprobs"):  # in order, from position 0
            self._folded.prompt_logprobs.positions.extend(message.prompt_logprobs.positions)
        if message.HasField("usage"):
            self._folded.usage.CopyFrom(message.usage)
        self._add_choices(message.choices)

    def result(self) -> R:
        """The whole."""
        for index in sorted(self._choices):
            choice = self._choices[index]
            choice.text = "".join(self._texts[index])
            choice.reasoning = "".join(self._reasoning[index])
            choice.raw = b"".join(self._raw[index])
            choice.tool_calls.extend(self._calls[index].values())
            self._folded.choices.append(choice)
        return self._folded

    def _add_choices(self, deltas: Sequence[inference_pb2.Choice]) -> None:
        for delta in deltas:
            # Repeated fields append, a finish is set once; only what is text has to be joined by hand.
            whole = self._choices.setdefault(delta.index, inference_pb2.Choice())
            self._texts.setdefault(delta.index, []).append(delta.text)
            self._reasoning.setdefault(delta.index, []).append(delta.reasoning)
            self._raw.setdefault(delta.index, []).append(delta.raw)
            calls = self._calls.setdefault(delta.index, {})
            for piece in delta.tool_calls:
                call = calls.setdefault(piece.index, inference_pb2.ToolCall(index=piece.index))
                call.id, call.name = call.id or piece.id, call.name or piece.name
                call.arguments += piece.arguments
            del delta.tool_calls[:]  # the message is ours: nobody else was given it
            whole.MergeFrom(delta)
