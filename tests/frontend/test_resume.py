"""Options.resume: a stream that breaks anywhere goes on, on another frontend, as if it had not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from loadtest.stub_engine import Faults, StubEngine
from services.frontend import tokenizer
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import VOCAB_SIZE, Served, attached, fields_at_fault, reason, scripted, serving, user
from tests.support.broken import joined, resume_of
from tests.support.calls import Answer, by_ids, chat, generate, greedy
from tests.support.checkpoints import EOS_ID

Options = inference_pb2.Options
Received = inference_pb2.Resume.Received
PROMPT = [10, 11, 12]
SEED = 2**63 + 5


TEXT = "tea for two, 猫と🦊 and an é at the end"

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "to the length": {"max_tokens": 9},
    "three choices": {"n": 3, "max_tokens": 7},
    "three choices, coalesced": {"n": 3, "max_tokens": 12, "min_delta_tokens": 5},
    "logprobs": {"logprobs": 2, "max_tokens": 9},
    "logprobs of three choices": {"logprobs": 0, "n": 3, "max_tokens": 6},
    "a stop string over several ids": {"stop": ["and an"]},
    "the same, left in the text": {"stop": ["and an"], "include_stop_string": True},
    "a stop string that almost matches": {"stop": ["two, 猫と🐈"]},
    "no stop before": {"stop": ["tea", "two"], "min_tokens": 10},
    "prompt logprobs": {"prompt_logprobs": 1, "max_tokens": 5},
    "nothing but prompt logprobs": {"prompt_logprobs": 0, "max_tokens": 0},
    "ids that end nothing": {"ignore_eos": True, "max_tokens": 60},
}


def engine(model: Path, **arguments: Any) -> StubEngine:
    """It answers each prompt with TEXT."""
    text = tokenizer.load(tokenizer.load_definition(model), model)
    script = [*text.encode(TEXT, add_special_tokens=False), EOS_ID]
    return scripted(script, **arguments)


async def resumed(served: Served, options: Options, messages: list[Any]) -> list[Any]:
    """What a frontend sends of a stream of which `messages` had arrived."""
    again = Options()
    again.CopyFrom(options)
    again.resume.CopyFrom(resume_of(messages))
    return (await generate(served.channel, by_ids(PROMPT, again))).messages


async def test_an_engine_without_the_feature_is_asked_for_no_stream_to_go_on(text_model: Path) -> None:
    options = greedy(seed=SEED)
    async with serving(text_model, engine(text_model, features=())) as served:
        whole = (await generate(served.channel, by_ids(PROMPT, options))).messages
        assert joined([whole[0], *await resumed(served, options, whole[:1])]) == joined(whole)  # nothing had arrived
        num_submits = len(served.engine.submits)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await resumed(served, options, whole[:3])
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert fields_at_fault(refused.value) == ["options.resume"]
        assert len(served.engine.submits) == num_submits


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_goes_on_from_every_message(text_model: Path, way: str) -> None:
    options = greedy(seed=SEED, **WAYS[way])
    async with serving(text_model, engine(text_model)) as first, another(text_model, first.engine) as served:
        whole = (await generate(first.channel, by_ids(PROMPT, options))).messages
        for cut in range(1, len(whole)):
            rest = await resumed(served, options, whole[:cut])
            assert joined([*whole[:cut], *rest]) == joined(whole), f"after {cut} of {len(whole)} messages"
            assert rest[0].prompt == whole[0].prompt
            assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
            if any(message.choices for message in whole[:cut]):
                assert not any(message.HasField("prompt_logprobs") for message in rest)
            else:
                assert [m.prompt_logprobs for m in rest if m.HasField("prompt_logprobs")] == [
                    m.prompt_logprobs for m in whole if m.HasField("prompt_logprobs")
                ]


@asynccontextmanager
async def another(model: Path, engine: StubEngine) -> AsyncIterator[Served]:
    """A second frontend of an engine that runs."""
    frontend = Frontend(FrontendConfig(port=0, engine=engine.address, model=str(model)))
    await frontend.start()
    try:
        await attached(frontend)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
            yield Served(frontend, engine, channel)
    finally:
        await frontend.close()


async def test_ids_whose_text_had_not_arrived_are_not_run_again_and_their_text_comes(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        whole = (await generate(served.channel, by_ids(PROMPT, greedy(seed=SEED)))).messages
        text, ids = joined(whole)[0].text, list(joined(whole)[0].token_ids)
        for had in range(len(text) + 1):
            resume = inference_pb2.Resume(seed=SEED, fingerprint="f" * 64)
            resume.choices.add(token_ids=ids[:-1], text_bytes=len(text[:had].encode()))
            answer = await generate(served.channel, by_ids(PROMPT, greedy(resume=resume)))
            assert answer.text == text[had:] and answer.ids == [EOS_ID]


@pytest.mark.parametrize(
    ("had", "options", "told"),
    [
        ("tea for", {"stop": ["for"]}, "stop_string"),
        ("tea for", {"max_tokens": "exactly"}, None),
        ("all", {}, "eos_token_id"),
    ],
)
async def test_a_finish_that_had_not_arrived_comes_without_the_engine(
    text_model: Path, had: str, options: dict[str, Any], told: str | None
) -> None:
    async with serving(text_model, engine(text_model)) as served:
        ids = served.ids(TEXT)
        ids = (
            [*ids, EOS_ID]
            if had == "all"
            else next(ids[:count] for count in range(len(ids)) if served.decode(ids[:count]).startswith(had))
        )
        if options.get("max_tokens"):
            options = {"max_tokens": len(ids)}
        resume = inference_pb2.Resume(seed=SEED, fingerprint="f" * 64)
        resume.choices.add(token_ids=ids)
        answer = await generate(served.channel, by_ids(PROMPT, greedy(resume=resume, **options)))
        assert answer.ids == [] and answer.finishes[0].WhichOneof("stopped_by") == told
        assert answer.usage.completion_tokens == len(ids)
        assert served.engine.submits == []


async def test_only_what_had_not_finished_is_run(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        resume = inference_pb2.Resume(seed=SEED, fingerprint="f" * 64)
        resume.choices.add(index=0, token_ids=[1, 2, 3], finished=True)
        resume.choices.add(index=2, token_ids=[70])
        answer = await generate(served.channel, by_ids(PROMPT, greedy(resume=resume, n=4, max_tokens=6)))
        (submit,) = served.engine.submits
        assert [(one.choice, len(one.token_ids) // 4) for one in submit.resumed] == [(1, 0), (2, 1), (3, 0)]
        assert (submit.num_choices, submit.seed, submit.max_tokens) == (4, SEED, 6)
        assert set(joined(answer.messages)) == {1, 2, 3}
        assert answer.usage.completion_tokens == 3 + 6 * 3


@pytest.mark.parametrize("left", [0, 1])
async def test_a_resumed_stream_is_charged_for_what_is_computed_again_and_for_what_is_new(
    text_model: Path, left: int
) -> None:
    """What is left of the burst lets one more request in where it is a token, and none where it is nothing."""
    first, again = len(PROMPT) + 9, len(PROMPT) + 4 + (9 - 4)
    rate = {"tenant_tokens_per_min": 1e-6, "tenant_burst_tokens": first + again + left}
    async with serving(text_model, engine(text_model), **rate) as served:
        options = greedy(seed=SEED, max_tokens=9)
        whole = (await generate(served.channel, by_ids(PROMPT, options))).messages
        assert joined(whole)[0].token_ids and whole[-1].usage.completion_tokens == 9
        rest = await resumed(served, options, whole[: 1 + 4])  # prompt facts, and four messages of an id
        assert len(joined(rest)[0].token_ids) == 9 - 4
        if left:
            await generate(served.channel, by_ids(PROMPT, greedy(max_tokens=1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(served.channel, by_ids(PROMPT, greedy(max_tokens=1)))
        assert reason(refused.value) == "TENANT_TOKEN_RATE"


async def test_choices_that_had_finished_before_are_charged_nothing(text_model: Path) -> None:
    """The burst is as much as is charged, and a token: one more request is let in, and no second one."""
    rate = {"tenant_tokens_per_min": 1e-6, "tenant_burst_tokens": len(PROMPT) + 1 + 5 + 1}
    async with serving(text_model, engine(text_model), **rate) as served:
        resume = inference_pb2.Resume(seed=SEED, fingerprint="f" * 64)
        resume.choices.add(index=0, token_ids=[1, 2, 3], finished=True)
        resume.choices.add(index=1, token_ids=[70])
        answer = await generate(served.channel, by_ids(PROMPT, greedy(resume=resume, n=2, max_tokens=6)))
        assert answer.usage.completion_tokens == 3 + 6
        await generate(served.channel, by_ids(PROMPT, greedy(max_tokens=1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(served.channel, by_ids(PROMPT, greedy(max_tokens=1)))
        assert reason(refused.value) == "TENANT_TOKEN_RATE"


async def test_a_refusal_of_a_request_whose_first_choice_is_not_run_ends_the_call(text_model: Path) -> None:
    failed = engine_pb2.Failed(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], reason="QUEUE_FULL", message="full")
    async with serving(text_model, engine(text_model, faults=Faults(failed=failed))) as served:
        resume = inference_pb2.Resume(seed=SEED, fingerprint="f" * 64)
        resume.choices.add(index=0, token_ids=[1], finished=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, by_ids(PROMPT, greedy(resume=resume, n=2)), timeout_s=10)
        assert reason(caught.value) == "QUEUE_FULL"


async def test_a_chat_and_a_unary_call_go_on_too(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        request = inference_pb2.ChatRequest(messages=[user("hi")], options=greedy(seed=SEED))
        whole = (await chat(served.channel, request)).messages
        request.options.resume.CopyFrom(resume_of(whole[:6]))
        rest = (await chat(served.channel, request)).messages
        assert joined([*whole[:6], *rest]) == joined(whole)
        stub = inference_pb2_grpc.InferenceServiceStub(served.channel)
        answer = await stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=request))
        assert joined([*whole[:6], answer.response]) == joined(whole)


async def test_a_seed_that_was_drawn_is_gone_on_with(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        whole = (await generate(served.channel, by_ids(PROMPT, greedy()))).messages
        await resumed(served, greedy(), whole[:4])
        assert [submit.seed for submit in served.engine.submits] == [whole[0].prompt.seed] * 2


def refused(*choices: Received, seed: int = SEED, fingerprint: str = "f" * 64, **options: Any) -> Options:
    resume = inference_pb2.Resume(seed=seed, fingerprint=fingerprint, choices=choices)
    return greedy(resume=resume, **{"max_tokens": 8, **options})


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        (refused(fingerprint=""), "options.resume.fingerprint", "is empty"),
        (refused(Received(index=1)), "options.resume.choices[0].index", "is 1; the request has the choices [0, 1)"),
        (refused(Received(), Received()), "options.resume.choices[1].index", "is 0 for a second time"),
        (
            refused(Received(token_ids=[1, VOCAB_SIZE])),
            "options.resume.choices[0].token_ids[1]",
            "ids lie below the vocabulary size",
        ),
        (refused(Received(token_ids=[70] * 9)), "options.resume.choices[0].token_ids", "has 9 ids, max_tokens is 8"),
        (
            refused(Received(token_ids=[VOCAB_SIZE] * 10**5)),
            "options.resume.choices[0].token_ids",
            "has 100000 ids, the context holds 1024",
        ),
        (refused(*[Received()] * 17), "options.resume.choices", "at most 16 are taken (max_choices)"),
        (
            refused(Received(token_ids=[70, EOS_ID, 70])),
            "options.resume.choices[0].token_ids",
            "goes on past a stop at 1; send the same request",
        ),
        (
            refused(Received(token_ids=[70], text_bytes=1000)),
            "options.resume.choices[0].text_bytes",
            "is 1000, the ids have",
        ),
        (
            refused(Received(token_ids=[70]), logprobs=0),
            "options.resume.choices[0].cumulative_logprob",
            "is missing",
        ),
        (
            refused(Received(token_ids=[70], cumulative_logprob=float("nan")), logprobs=0),
            "options.resume.choices[0].cumulative_logprob",
            "a finite number is needed",
        ),
    ],
)
async def test_what_does_not_fit_the_request_is_refused(
    text_model: Path, options: Options, field: str, says: str
) -> None:
    async with serving(text_model, engine(text_model)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, by_ids(PROMPT, options))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_at_fault(caught.value) == [field] and says in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            stub = inference_pb2_grpc.InferenceServiceStub(served.channel)
            await stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(request=by_ids(PROMPT, options)))
        assert fields_at_fault(caught.value) == [f"request.{field}"]
        assert served.engine.submits == []


async def test_a_stop_string_in_the_middle_of_what_arrived_is_refused(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        ids = served.ids(TEXT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(
                served.channel, by_ids(PROMPT, refused(Received(token_ids=ids), stop=["for"], max_tokens=100))
            )
        assert fields_at_fault(caught.value) == ["options.resume.choices[0].token_ids"]


async def test_half_a_character_cannot_have_arrived(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        ids = served.ids("é")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, by_ids(PROMPT, refused(Received(token_ids=ids, text_bytes=1))))
        assert "in the middle of a character" in (caught.value.details() or "")


async def test_another_seed_beside_the_streams_is_refused(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            resume = inference_pb2.Resume(seed=7, fingerprint="f" * 64)
            await generate(served.channel, by_ids(PROMPT, greedy(seed=8, resume=resume)))
        assert fields_at_fault(caught.value) == ["options.seed"]


async def test_an_engine_of_another_fingerprint_cannot_go_on(text_model: Path) -> None:
    async with serving(text_model, engine(text_model)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, by_ids(PROMPT, refused(fingerprint="e" * 64)))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason(caught.value) == "FINGERPRINT_MISMATCH"


async def test_a_very_long_stream_is_read_again_off_the_event_loop(text_model: Path) -> None:
    async with serving(text_model, engine(text_model, context_tokens=2**20)) as served:
        resume = inference_pb2.Resume(seed=SEED, fingerprint="f" * 64)
        resume.choices.add(token_ids=[70] * 60_000)
        answer: Answer = await generate(
            served.channel, by_ids(PROMPT, greedy(resume=resume, max_tokens=60_002, ignore_eos=True))
        )
        assert len(answer.ids) == 2 and answer.text.startswith(served.decode([70]) * 60_000)
