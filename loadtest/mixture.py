"""Calls of many kinds, each of which checks its own answer: what a server meets over a day, drawn at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"

TIMEOUT_S = 300.0
MAX_TOKENS = (8, 64)
WORDS = (
    "the",
    "a",
    "red",
    "small",
    "river",
    "house",
    "walks",
    "sings",
    "makes",
    "under",
    "with",
    "light",
    "name",
    "why",
)
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}


class WrongAnswerError(Exception):
    """An answer that ended well and is not what was asked for."""


@dataclass
class Folded:
    """The messages of a call: text, ids and finishes by choice."""

    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, list[inference_pb2.Finish]] = field(default_factory=dict)
    logprobs: int = 0
    prompt_logprobs: int = 0
    usage: inference_pb2.Usage | None = None

    def add(self, message: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> None:
        """One message more."""
        for choice in message.choices:
            self.text[choice.index] = self.text.get(choice.index, "") + choice.text
            self.ids.setdefault(choice.index, []).extend(choice.token_ids)
            self.logprobs += len(choice.logprobs)
            if choice.HasField("finish"):
                self.finishes.setdefault(choice.index, []).append(choice.finish)
        self.prompt_logprobs += len(message.prompt_logprobs.positions)
        if message.HasField("usage"):
            self.usage = message.usage

    @property
    def output_tokens(self) -> int:
        """Ids of all choices."""
        return sum(map(len, self.ids.values()))

    def check(self, choices: int, counted: bool = True) -> Folded:
        """Raises WrongAnswerError unless each choice has ended once and usage, last, counts every id."""
        _require(sorted(self.finishes) == list(range(choices)), f"finishes are {self.finishes}")
        _require(all(len(one) == 1 for one in self.finishes.values()), f"finishes are {self.finishes}")
        _require(self.usage is not None, "no usage came")
        if counted:
            told = self.usage.completion_tokens if self.usage is not None else 0
            _require(told == self.output_tokens, f"usage tells of {told} ids, {self.output_tokens} came")
        return self


Kind = Callable[["Stub", random.Random], Awaitable[int]]
"""Makes a call and checks it; the number of ids that came. Raises WrongAnswerError, or AioRpcError as grpc does."""


async def greedy(stub: Stub, rng: random.Random) -> int:
    """A text, streamed to its length."""
    options = _options(rng, ignore_eos=True)
    answer = (await _stream(stub.Generate(_text(rng, options), timeout=TIMEOUT_S))).check(1)
    _require(answer.output_tokens == options.max_tokens, f"{answer.output_tokens} ids of {options.max_tokens}")
    return answer.output_tokens


async def seeded(stub: Stub, rng: random.Random) -> int:
    """Drawn by a seed, in one message."""
    request = _text(rng, _options(rng, temperature=1.0, seed=rng.getrandbits(63)))
    wrapped = inference_pb2.GenerateUnaryRequest(request=request)
    return _one((await stub.GenerateUnary(wrapped, timeout=TIMEOUT_S)).response).check(1).output_tokens


async def chat(stub: Stub, rng: random.Random) -> int:
    """A conversation, streamed."""
    request = _chat(rng, _options(rng, temperature=0.8))
    return (await _stream(stub.Chat(request, timeout=TIMEOUT_S))).check(1).output_tokens


async def chat_unary(stub: Stub, rng: random.Random) -> int:
    """A conversation, in one message."""
    wrapped = inference_pb2.ChatUnaryRequest(request=_chat(rng, _options(rng)))
    return _one((await stub.ChatUnary(wrapped, timeout=TIMEOUT_S)).response).check(1).output_tokens


async def choices(stub: Stub, rng: random.Random) -> int:
    """Several of one prompt."""
    request = _text(rng, _options(rng, temperature=1.0, n=3))
    return (await _stream(stub.Generate(request, timeout=TIMEOUT_S))).check(3).output_tokens


async def scored(stub: Stub, rng: random.Random) -> int:
    """With the logprobs of prompt and output."""
    request = _text(rng, _options(rng, logprobs=3, prompt_logprobs=1))
    answer = (await _stream(stub.Generate(request, timeout=TIMEOUT_S))).check(1)
    _require(answer.logprobs == answer.output_tokens, f"{answer.logprobs} logprobs of {answer.output_tokens} ids")
    told = answer.usage.prompt_tokens if answer.usage is not None else 0
    _require(answer.prompt_logprobs == told, f"{answer.prompt_logprobs} logprobs of {told} prompt ids")
    return answer.output_tokens


async def stopped(stub: Stub, rng: random.Random) -> int:
    """By a string, which text never holds."""
    ends = [rng.choice("etaoin"), "zzzz"]
    request = _text(rng, _options(rng, temperature=1.0, stop=ends))
    answer = (await _stream(stub.Generate(request, timeout=TIMEOUT_S))).check(1, counted=False)
    _require(not any(end in answer.text.get(0, "") for end in ends), f"the text {answer.text} holds one of {ends}")
    return answer.output_tokens


async def json_schema(stub: Stub, rng: random.Random) -> int:
    """Held to a schema."""
    grammar = generation_pb2.Grammar(json_schema=json.dumps(SCHEMA))
    options = _options(rng, temperature=1.0, grammar=grammar)
    options.max_tokens = 200
    answer = (await _stream(stub.Generate(_text(rng, options), timeout=TIMEOUT_S))).check(1)
    if answer.finishes[0][0].reason == generation_pb2.FINISH_REASON_STOP:
        found = json.loads(answer.text[0])
        _require(found.get("n") in (1, 2, 3), f"{found} is not what the schema says")
    return answer.output_tokens


async def one_of(stub: Stub, rng: random.Random) -> int:
    """Held to two answers."""
    grammar = generation_pb2.Grammar(choices=generation_pb2.Grammar.Choices(values=["yes", "no"]))
    answer = await _stream(stub.Chat(_chat(rng, _options(rng, grammar=grammar)), timeout=TIMEOUT_S))
    _require(answer.check(1).text[0] in ("yes", "no"), f"{answer.text[0]!r} is neither yes nor no")
    return answer.output_tokens


async def cancelled(stub: Stub, rng: random.Random) -> int:
    """Left by the client, before or after the first id."""
    call = stub.Generate(_text(rng, _options(rng, ignore_eos=True, n=rng.choice((1, 2)))), timeout=TIMEOUT_S)
    try:
        async with asyncio.timeout(rng.uniform(0.0, 0.3)):
            return (await _stream(call)).output_tokens
    except TimeoutError:
        return 0
    finally:
        call.cancel()


async def late(stub: Stub, rng: random.Random) -> int:
    """Whose deadline may pass."""
    try:
        request = _text(rng, _options(rng, ignore_eos=True))
        return (await _stream(stub.Generate(request, timeout=rng.uniform(0.01, 0.5)))).output_tokens
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return 0


async def refused(stub: Stub, rng: random.Random) -> int:
    """Asks for what is out of range."""
    wrong = rng.choice((_options(rng, temperature=-1.0), _options(rng, stop=[""]), _options(rng, n=10**6)))
    try:
        await _stream(stub.Generate(_text(rng, wrong), timeout=TIMEOUT_S))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return 0
    raise WrongAnswerError(f"{wrong} was served")


async def tokenized(stub: Stub, rng: random.Random) -> int:
    """There and back."""
    text = _words(rng, 40)
    ids = (await stub.Tokenize(inference_pb2.TokenizeRequest(text=text), timeout=TIMEOUT_S)).token_ids
    back = (await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids), timeout=TIMEOUT_S)).text
    _require(back == text, f"{text!r} came back as {back!r}")
    return 0


KINDS: dict[str, tuple[int, Kind]] = {
    "greedy": (4, greedy),
    "seeded, unary": (2, seeded),
    "chat": (4, chat),
    "chat, unary": (2, chat_unary),
    "three choices": (2, choices),
    "logprobs": (2, scored),
    "stop strings": (2, stopped),
    "JSON schema": (2, json_schema),
    "one of two": (1, one_of),
    "cancelled": (2, cancelled),
    "short deadline": (1, late),
    "out of range": (1, refused),
    "tokenized": (1, tokenized),
}
"""By name: how often it is drawn, of the sum of all, and the call."""


def drawn(rng: random.Random) -> str:
    """One kind's name."""
    return rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]


def _options(rng: random.Random, temperature: float = 0.0, **fields: object) -> inference_pb2.Options:
    sampling = generation_pb2.Sampling(temperature=temperature)
    return inference_pb2.Options(sampling=sampling, max_tokens=rng.randint(*MAX_TOKENS), **fields)  # type: ignore[arg-type]


def _words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(2, most)))


def _text(rng: random.Random, options: inference_pb2.Options) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=_words(rng, 60), options=options)


def _chat(rng: random.Random, options: inference_pb2.Options) -> inference_pb2.ChatRequest:
    roles = [inference_pb2.ROLE_USER, *[inference_pb2.ROLE_ASSISTANT, inference_pb2.ROLE_USER] * rng.randrange(3)]
    messages = [
        inference_pb2.ChatMessage(role=role, content=[inference_pb2.ContentPart(text=_words(rng, 15))])
        for role in roles
    ]
    return inference_pb2.ChatRequest(messages=messages, options=options)


async def _stream(call: AsyncIterable[inference_pb2.GenerateResponse | inference_pb2.ChatResponse]) -> Folded:
    folded = Folded()
    async for message in call:
        folded.add(message)
    return folded


def _one(message: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> Folded:
    folded = Folded()
    folded.add(message)
    return folded


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongAnswerError(otherwise)
