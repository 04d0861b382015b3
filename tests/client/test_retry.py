"""Calls that break: tried again before the first message, resumed after it, within bounds; async and blocking alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2
from triptych.inference.v1 import inference_pb2 as pb

from services.common.errors import RequestError, invalid, unavailable
from tests.client.scripted import Scripted, scripted_server
from triptych_client import Client, Completion, Delta, Retry, SyncClient, TriptychError
from triptych_client.retry import Attempts

QUICK = Retry(attempts=3, first_wait_s=0.01, most_wait_s=0.02)
PROMPT = pb.PromptInfo(prompt_tokens=3, seed=2**63 + 1, max_tokens=9, fingerprint="abc")
FINISH = pb.Finish(reason=generation_pb2.FINISH_REASON_LENGTH)
USAGE = pb.Usage(prompt_tokens=3, completion_tokens=4)
FULL = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_after_s=0.05)
SLOW = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", "slow")
GONE = unavailable("ENGINE_LOST", "the engine was lost", retry_after_s=0.0)

Ask = Callable[..., Any]
"""Runs a generation to its end in the way that is tested: async or blocking."""


def whole_stream() -> list[pb.GenerateResponse]:
    return [
        pb.GenerateResponse(prompt=PROMPT),
        pb.GenerateResponse(choices=[pb.Choice(text="é", token_ids=[1])]),
        pb.GenerateResponse(choices=[pb.Choice(index=1, text="x", token_ids=[2, 3], finish=FINISH)]),
        pb.GenerateResponse(choices=[pb.Choice(text="z", token_ids=[4], finish=FINISH)]),
        pb.GenerateResponse(usage=USAGE),
    ]


@pytest.fixture
async def server() -> AsyncIterator[tuple[Scripted, str]]:
    async with scripted_server() as (scripted, address):
        scripted.messages = whole_stream()
        yield scripted, address


async def streamed(address: str, *, retry: Retry | None = QUICK, timeout_s: float | None = None, **options: Any) -> Any:
    async with Client(address, retry=retry) as client:
        return [delta async for delta in client.generate("x", timeout_s=timeout_s, **options)]


async def blocking(address: str, *, retry: Retry | None = QUICK, timeout_s: float | None = None, **options: Any) -> Any:
    def run() -> list[Delta]:
        with SyncClient(address, retry=retry) as client:
            return list(client.generate("x", timeout_s=timeout_s, **options))

    return await asyncio.to_thread(run)


async def unary(address: str, *, retry: Retry | None = QUICK, timeout_s: float | None = None, **options: Any) -> Any:
    async with Client(address, retry=retry) as client:
        return await client.generate_unary("x", timeout_s=timeout_s, **options)


async def blocking_unary(
    address: str, *, retry: Retry | None = QUICK, timeout_s: float | None = None, **options: Any
) -> Any:
    def run() -> Completion:
        with SyncClient(address, retry=retry) as client:
            return client.generate_unary("x", timeout_s=timeout_s, **options)

    return await asyncio.to_thread(run)


STREAMS = pytest.mark.parametrize("ask", [streamed, blocking])
ALL = pytest.mark.parametrize("ask", [streamed, blocking, unary, blocking_unary])


@ALL
@pytest.mark.parametrize("error", [GONE, FULL])
async def test_a_call_that_fails_before_its_first_message_is_made_again(
    server: tuple[Scripted, str], ask: Ask, error: RequestError
) -> None:
    scripted, address = server
    scripted.answer = pb.GenerateUnaryResponse(response=pb.GenerateResponse(choices=[pb.Choice()]))
    scripted.breaks.extend([(0, error)] * 2)
    await ask(address)
    assert len(scripted.requests) == 3 and len({request.SerializeToString() for request in scripted.requests}) == 1


@ALL
@pytest.mark.parametrize(
    "error", [SLOW, invalid("options.n", "is 0"), RequestError(grpc.StatusCode.INTERNAL, "X", "x")]
)
async def test_what_another_try_would_not_mend_is_raised_at_once(
    server: tuple[Scripted, str], ask: Ask, error: RequestError
) -> None:
    scripted, address = server
    scripted.breaks.append((0, error))
    with pytest.raises(TriptychError) as caught:
        await ask(address)
    assert caught.value.reason == error.reason and len(scripted.requests) == 1


@ALL
async def test_the_tries_are_counted(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    scripted.error = GONE
    scripted.breaks.extend([(0, GONE)] * 3)
    with pytest.raises(TriptychError, match="the engine was lost"):
        await ask(address)
    assert len(scripted.requests) == 3
    scripted.breaks.append((0, GONE))
    with pytest.raises(TriptychError, match="the engine was lost"):
        await ask(address, retry=None)
    assert len(scripted.requests) == 4


@ALL
async def test_a_wait_that_would_pass_the_deadline_is_not_begun(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    scripted.breaks.append((0, unavailable("DRAINING", "drains", retry_after_s=60)))
    async with asyncio.timeout(5):
        with pytest.raises(TriptychError, match="drains"):
            await ask(address, timeout_s=10)
    assert len(scripted.requests) == 1


@STREAMS
async def test_a_stream_that_breaks_is_resumed_with_what_had_come(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    messages = whole_stream()
    for broken_after in range(1, 5):
        scripted.requests.clear()
        scripted.messages = messages
        scripted.breaks.append((broken_after, GONE))
        # The scripted server sends all again: enough to see what it was asked.
        await ask(address, n=2)
        first, second = scripted.requests
        assert not first.options.HasField("resume") and first.text == second.text == "x"
        resume = second.options.resume
        assert (resume.seed, resume.fingerprint) == (2**63 + 1, "abc")
        told = {one.index: (list(one.token_ids), one.text_bytes, one.finished) for one in resume.choices}
        expected = {0: ([1], 2, False)} if broken_after > 1 else {}
        expected |= {1: ([2, 3], 1, True)} if broken_after > 2 else {}
        expected |= {0: ([1, 4], 3, True)} if broken_after > 3 else {}
        assert told == expected


@STREAMS
async def test_the_parts_of_a_stream_that_broke_twice_are_one(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    first, *rest = whole_stream()
    parts = iter([[first, *rest[:1]], [first, *rest[1:2]], [first, *rest[2:]]])

    async def serve(request: Any, context: Any) -> Any:
        await scripted._note(request, context)
        part = next(parts)
        for message in part:
            yield message
        if not part[-1].HasField("usage"):
            raise GONE

    scripted.Generate = serve  # type: ignore[method-assign]
    scripted._stream = serve  # type: ignore[method-assign]
    deltas = await ask(address, retry=Retry(attempts=2, first_wait_s=0.01, most_wait_s=0.01))
    assert [(d.index, d.text, d.token_ids) for d in deltas[:-1]] == [(0, "é", (1,)), (1, "x", (2, 3)), (0, "z", (4,))]
    assert deltas[-1].usage is not None, "each try that brings something new begins the count again"


@STREAMS
async def test_logprobs_that_had_come_are_summed_for_the_server(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    own = [pb.PositionLogprobs(token=pb.TokenLogprob(token_id=1, logprob=value)) for value in (-0.5, -0.25)]
    scripted.messages = [
        pb.GenerateResponse(prompt=PROMPT),
        pb.GenerateResponse(choices=[pb.Choice(token_ids=[1, 1], logprobs=own)]),
    ]
    scripted.breaks.append((2, GONE))
    await ask(address, logprobs=0)
    assert scripted.requests[1].options.resume.choices[0].cumulative_logprob == -0.75


@STREAMS
async def test_a_server_that_does_not_resume_leaves_the_error_that_broke_the_stream(
    server: tuple[Scripted, str], ask: Ask
) -> None:
    scripted, address = server
    scripted.breaks.append((2, GONE))
    scripted.breaks.append((0, RequestError(grpc.StatusCode.UNIMPLEMENTED, "FIELD_NOT_SERVED", "options.resume")))
    with pytest.raises(TriptychError, match="the engine was lost") as caught:
        await ask(address)
    assert isinstance(caught.value.__cause__, TriptychError) and caught.value.__cause__.reason == "FIELD_NOT_SERVED"


@STREAMS
async def test_another_fingerprint_ends_the_stream_in_its_own_words(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    scripted.breaks.append((2, GONE))
    error = RequestError(grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH", "begin anew")
    scripted.breaks.append((0, error))
    with pytest.raises(TriptychError, match="begin anew"):
        await ask(address)


@STREAMS
async def test_the_likeliest_of_several_are_not_resumed_in_the_middle(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    scripted.breaks.append((2, GONE))
    with pytest.raises(TriptychError, match="the engine was lost"):
        await ask(address, n=2, best_of=3)
    assert len(scripted.requests) == 1


@STREAMS
async def test_a_stream_that_its_caller_resumes_goes_on_from_both(server: tuple[Scripted, str], ask: Ask) -> None:
    scripted, address = server
    mine = pb.Resume(seed=2**63 + 1, fingerprint="abc", choices=[pb.Resume.Received(token_ids=[9], text_bytes=4)])
    scripted.breaks.append((2, GONE))
    await ask(address, resume=mine)
    (one,) = scripted.requests[1].options.resume.choices
    assert (list(one.token_ids), one.text_bytes) == ([9, 1], 6)


async def test_prompt_logprobs_that_come_again_are_not_there_twice(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    told = pb.PromptLogprobs(positions=[pb.PositionLogprobs()])
    scripted.messages.insert(1, pb.GenerateResponse(prompt_logprobs=told))
    scripted.breaks.append((2, GONE))
    async with Client(address, retry=QUICK) as client:
        assert len((await client.generate("x", prompt_logprobs=0).collect()).prompt_logprobs) == 1


async def test_a_stream_that_is_left_while_it_waits_is_not_begun_again(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    scripted.breaks.extend([(0, unavailable("DRAINING", "drains", retry_after_s=0.3))] * 2)
    async with Client(address) as client:
        stream = client.generate("x")
        reading = asyncio.ensure_future(stream.collect())
        await asyncio.sleep(0.15)
        stream.cancel()
        with pytest.raises(TriptychError, match="CANCELLED"):
            await reading
        reading = asyncio.ensure_future(client.generate("x").collect())
        await asyncio.sleep(0.15)
        await client.close()
        with pytest.raises(TriptychError, match="CANCELLED"):
            await reading
    assert len(scripted.requests) == 2


@pytest.mark.parametrize("how", ["break", "with", "cancel", "close"])
async def test_leaving_a_blocking_stream_cancels_it_on_the_server(server: tuple[Scripted, str], how: str) -> None:
    scripted, address = server
    scripted.messages = whole_stream()[:2]
    scripted.hang = True

    def run() -> None:
        client = SyncClient(address)
        if how == "break":
            for _ in client.generate("x"):
                break
        elif how == "with":
            with client.generate("x") as stream:
                next(stream)
        else:
            stream = client.generate("x")
            next(stream)
            threading.Timer(0.1, stream.cancel if how == "cancel" else client.close).start()
            with pytest.raises(TriptychError, match="CANCELLED"):
                next(stream)

    await asyncio.to_thread(run)
    await asyncio.wait_for(scripted.left.wait(), timeout=3)


async def test_the_blocking_client_asks_and_is_answered_as_the_other(server: tuple[Scripted, str]) -> None:
    scripted, address = server
    scripted.messages = [pb.ChatResponse.FromString(message.SerializeToString()) for message in whole_stream()]

    async def both(ask: Callable[[Any], Any]) -> None:
        async with Client(address) as client:
            theirs = ask(client)
            theirs = await (theirs.collect() if hasattr(theirs, "collect") else theirs)

        def run() -> Any:
            with SyncClient(address) as client:
                mine = ask(client)
                return mine.collect() if hasattr(mine, "collect") else mine

        assert await asyncio.to_thread(run) == theirs
        first, second = scripted.requests
        assert first == second
        scripted.requests.clear()

    await both(lambda client: client.chat("Hi", max_tokens=3, template_args={"a": 1}))
    scripted.answer = pb.ChatUnaryResponse(response=pb.ChatResponse(choices=[pb.Choice(text="a")]))
    await both(lambda client: client.chat_unary("Hi", seed=4))
    scripted.answer = pb.TokenizeResponse(token_ids=[1, 2])
    await both(lambda client: client.tokenize("a b"))
    scripted.answer = pb.DetokenizeResponse(text="a b")
    await both(lambda client: client.detokenize([1]))
    scripted.answer = pb.GetModelResponse(model=pb.Model(name="m"))
    await both(lambda client: client.get_model())
    scripted.answer = pb.ListModelsResponse(models=[pb.Model(name="m")])
    await both(lambda client: client.list_models())


def test_waits_double_up_to_the_most_and_never_undercut_the_server() -> None:
    attempts = Attempts(Retry(attempts=6, first_wait_s=1, most_wait_s=4), None)
    error = TriptychError(grpc.StatusCode.UNAVAILABLE, "", "gone")
    waits = [attempts.wait_s(error) for _ in range(5)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, [1, 2, 4, 4, 4], strict=True))
    with pytest.raises(TriptychError):
        attempts.wait_s(error)
    attempts.progressed()
    assert attempts.wait_s(TriptychError(grpc.StatusCode.UNAVAILABLE, "", "x", retry_after_s=9)) == 9


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_wait_s": -1}, {"first_wait_s": 2, "most_wait_s": 1}])
def test_a_policy_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attempts is 1 or more"):
        Retry(**wrong)
