"""Rows T12, S8 and G6: requests far too large are refused by a limit, by name, before anything is made of them."""

from __future__ import annotations

import asyncio
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import StubExecutor
from services.common.errors import RequestError
from services.common.server import Server, channel_options, server_options
from services.frontend import sizes
from services.frontend.config import FrontendConfig
from services.frontend.request import Sampling
from services.frontend.validation import check_scored, read_options
from tests.frontend.harness import (
    VOCAB_SIZE,
    Served,
    fields_at_fault,
    message,
    reason,
    scripted,
    serving,
    text_checkpoint,
    user,
)
from tests.frontend.test_process import SERVING, process, watched
from tests.support.attached import bench, write_model
from tests.support.calls import EVERY_CALL, STREAM_AND_UNARY, ask, by_ids, by_text, call, chat, generate, greedy, place

MIB = 1024 * 1024
STALL_S = 3 * 0.1
"""Three times the 100 ms within which health answers."""
Options = inference_pb2.Options
Chat = inference_pb2.ChatRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("huge") / "tiny-text")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    """A frontend with small limits."""
    limits = {"max_prompt_bytes": 100, "max_messages": 3, "max_content_parts": 4, "max_detokenize_ids": 5}
    async with serving(model, scripted([50]), **limits) as served:
        yield served


async def failure(running: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    return caught.value


Ask = Callable[[Served, int], Any]
LIMITS: dict[str, tuple[Ask, int, str, str]] = {
    "text": (lambda s, n: generate(s.channel, by_text("é" * (n // 2) + "a" * (n % 2), greedy())), 100, "text", "bytes"),
    "chat": (
        lambda s, n: chat(s.channel, Chat(messages=[user("a" * 60), user("b" * (n - 60))], options=greedy())),
        100,
        "messages",
        "max_prompt_bytes",
    ),
    "unary": (
        lambda s, n: s.stub.GenerateUnary(
            inference_pb2.GenerateUnaryRequest(request=by_text("a" * n, greedy(max_tokens=1)))
        ),
        100,
        "request.text",
        "max_prompt_bytes",
    ),
    "chat unary": (
        lambda s, n: s.stub.ChatUnary(
            inference_pb2.ChatUnaryRequest(request=Chat(messages=[user("a")] * n, options=greedy(max_tokens=1)))
        ),
        3,
        "request.messages",
        "max_messages",
    ),
    "tokenize": (
        lambda s, n: s.stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * n)),
        100,
        "text",
        "max_prompt_bytes",
    ),
    "tokenize a chat": (
        lambda s, n: s.stub.Tokenize(inference_pb2.TokenizeRequest(chat=Chat(messages=[user("a" * n)]))),
        100,
        "chat.messages",
        "max_prompt_bytes",
    ),
    "messages": (
        lambda s, n: chat(s.channel, Chat(messages=[user("a")] * n, options=greedy(max_tokens=1))),
        3,
        "messages",
        "max_messages",
    ),
    "parts": (
        lambda s, n: chat(
            s.channel,
            Chat(
                messages=[
                    inference_pb2.ChatMessage(
                        role=inference_pb2.ROLE_USER, content=[inference_pb2.ContentPart(text="a")] * n
                    )
                ],
                options=greedy(max_tokens=1),
            ),
        ),
        4,
        "messages",
        "max_content_parts",
    ),
    "detokenize": (
        lambda s, n: s.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[50] * n)),
        5,
        "token_ids",
        "max_detokenize_ids",
    ),
}


@pytest.mark.parametrize("what", LIMITS)
async def test_S8_a_size_at_its_limit_is_served_and_one_more_is_refused_by_field_value_and_limit(
    served: Served, what: str
) -> None:
    sized, limit, field, key = LIMITS[what]
    await sized(served, limit)
    submits = len(served.engine.submits)
    error = await failure(sized(served, limit + 1))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]
    for part in (field, f"has {limit + 1} ", f"at most {limit} ", key):
        assert part in (error.details() or "")
    assert len(served.engine.submits) == submits


HUGE: dict[str, tuple[Callable[[], Message], grpc.StatusCode, str]] = {
    "n": (lambda: Options(n=10**6), grpc.StatusCode.INVALID_ARGUMENT, "options.n"),
    "logprobs": (lambda: Options(logprobs=VOCAB_SIZE), grpc.StatusCode.INVALID_ARGUMENT, "options.logprobs"),
    "prompt_logprobs": (
        lambda: Options(prompt_logprobs=VOCAB_SIZE),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.prompt_logprobs",
    ),
    "stops": (lambda: Options(stop=["a"] * 10**5), grpc.StatusCode.INVALID_ARGUMENT, "options.stop"),
    "a long stop": (lambda: Options(stop=["a" * 10**6]), grpc.StatusCode.INVALID_ARGUMENT, "options.stop[0]"),
    "stop ids": (
        lambda: Options(stop_token_ids=[1] * 10**6),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.stop_token_ids",
    ),
    "biases": (
        lambda: Options(sampling=generation_pb2.Sampling(logit_bias=dict.fromkeys(range(10**6), 1.0))),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.sampling.logit_bias",
    ),
    "allowed ids": (
        lambda: Options(sampling=generation_pb2.Sampling(allowed_token_ids=range(10**6))),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.sampling.allowed_token_ids",
    ),
    "banned ids": (
        lambda: Options(sampling=generation_pb2.Sampling(banned_token_ids=[1] * 10**6)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.sampling.banned_token_ids",
    ),
    "a salt": (lambda: Options(cache_salt="a" * 10**6), grpc.StatusCode.INVALID_ARGUMENT, "options.cache_salt"),
    "held ids": (
        lambda: Options(min_delta_tokens=2**32 - 1),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.min_delta_tokens",
    ),
    "held time": (
        lambda: Options(min_delta_interval_ms=2**32 - 1),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.min_delta_interval_ms",
    ),
    "a label": (lambda: Options(label="a" * 10**6), grpc.StatusCode.INVALID_ARGUMENT, "options.label"),
}


@EVERY_CALL
async def test_S8_huge_options_are_refused_by_name_and_the_server_serves_on(model: Path, rpc: str) -> None:
    async with serving(model, scripted([50]), max_message_bytes=32 * MIB) as served:
        for make, code, field in HUGE.values():
            error = await failure(ask(served.channel, rpc, make()))
            assert error.code() is code and fields_at_fault(error) == [place(rpc, field)]
            assert_small(error)
        assert served.engine.submits == []
        assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]


def assert_small(error: grpc.aio.AioRpcError) -> None:
    """Details under 3 KB, all trailing metadata under the 8 KB that peers take (base64 is 4/3)."""
    trailing = dict(error.trailing_metadata() or ())
    status = trailing["grpc-status-details-bin"]
    assert len(status) < 3 * 1024
    assert len(status) * 4 / 3 + 3 * len((error.details() or "").encode()) < 8 * 1024


@pytest.mark.parametrize("what", HUGE)
def test_S8_nothing_is_allocated_for_options_over_their_limits(what: str) -> None:
    options = HUGE[what][0]()
    limits = FrontendConfig().limits()

    def read() -> None:
        read_options(options, defaults=Sampling(), limits=limits, vocab_size=VOCAB_SIZE)

    assert peak_bytes(read) < (4 * MIB if what in ("a long stop", "a label", "a salt") else 64 * 1024)


def test_S8_nothing_is_allocated_for_a_chat_or_a_list_of_ids_over_its_limit() -> None:
    limits = FrontendConfig().limits()
    empty = inference_pb2.ChatMessage()
    crowded = inference_pb2.ChatMessage(content=[inference_pb2.ContentPart()] * 10**5)
    for request in (
        Chat(messages=[empty] * 10**5),
        Chat(messages=[crowded]),
        Chat(options=Options(resume=inference_pb2.Resume(choices=[inference_pb2.Resume.Received()] * 10**5))),
        inference_pb2.DetokenizeRequest(token_ids=[1] * 10**6),
    ):
        assert peak_bytes(lambda request=request: sizes.check(request, limits)) < 64 * 1024


def peak_bytes(refuse: Callable[[], None]) -> int:
    """Bytes of Python objects that are made until `refuse` has refused."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            refuse()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@STREAM_AND_UNARY
async def test_S8_a_prompt_of_too_many_ids_is_refused_by_their_number_alone(served: Served, rpc: str) -> None:
    ids = [VOCAB_SIZE] * 10**5  # each of them would be refused too, were it read
    error = await failure(generate(served.channel, by_ids(ids, greedy()), rpc=rpc))
    assert fields_at_fault(error) == [place(rpc, "token_ids")] and reason(error) == "PROMPT_TOO_LONG"
    assert "100000 tokens" in (error.details() or "") and "holds 1024" in (error.details() or "")


@STREAM_AND_UNARY
async def test_S8_prompt_logprobs_on_the_longest_prompt_are_capped_before_the_engine_is_asked(
    model: Path, rpc: str
) -> None:
    async with serving(model, scripted([50]), max_scored_tokens=8) as served:
        options = greedy(prompt_logprobs=0, max_tokens=0)
        for make in (lambda n: by_ids([10] * n, options), lambda n: by_text("1" * n, options)):
            await generate(served.channel, make(8), rpc=rpc)
            submits = len(served.engine.submits)
            for length in (9, 1024):
                error = await failure(generate(served.channel, make(length), rpc=rpc))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert fields_at_fault(error) == [place(rpc, "options.prompt_logprobs")]
                assert f"at most 8 tokens (max_scored_tokens), this one has {length}" in (error.details() or "")
            assert len(served.engine.submits) == submits
        assert (await generate(served.channel, by_ids([10] * 9, greedy(max_tokens=1)))).ids == [50]  # unscored: no cap


def test_S8_no_id_of_a_prompt_too_long_to_be_scored_is_read() -> None:
    ids, limits = [1] * 10**6, FrontendConfig().limits()
    options = read_options(Options(prompt_logprobs=0), defaults=Sampling(), limits=limits, vocab_size=VOCAB_SIZE)
    assert peak_bytes(lambda: check_scored(options, prompt_tokens=len(ids), limits=limits)) < 64 * 1024


async def test_S8_every_limit_is_told_under_its_configuration_key(served: Served) -> None:
    limits = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model.limits
    of_the_process = {"max_calls", "max_connection_age_s", "max_connection_age_grace_s"}
    keys = {key for key in FrontendConfig.model_fields if key.startswith("max_")} - of_the_process
    assert set(limits) == keys
    assert (limits["max_prompt_bytes"], limits["max_messages"], limits["max_detokenize_ids"]) == (100, 3, 5)
    assert (limits["max_choices"], limits["max_logprobs"]) == (16, 20)


@EVERY_CALL
async def test_G6_a_prompt_past_the_message_limit_is_refused_with_both_sizes(model: Path, rpc: str) -> None:
    text = "a" * (5 * MIB)
    request = Chat(messages=[user(text)]) if rpc.startswith("Chat") else by_text(text, greedy())
    async with serving(model, scripted([50])) as served:
        error = await failure(call(served.channel, rpc, request))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        sizes_told = re.search(r"larger than max \((\d+) vs\. (\d+)\)", error.details() or "")
        assert sizes_told and int(sizes_told[1]) > 5 * MIB and int(sizes_told[2]) == 4 * MIB
        limits = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model.limits
        assert limits["max_message_bytes"] == 4 * MIB
        assert (await generate(served.channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]


@STREAM_AND_UNARY
async def test_G6_a_5_mb_prompt_passes_the_first_hop_where_the_operator_allows_it(model: Path, rpc: str) -> None:
    prompt = [300, 301] * 1_300_000  # two bytes an id in the request, four in the Submit
    engine = scripted([50], context_tokens=3_000_000)
    async with serving(model, engine, max_message_bytes=16 * MIB) as served:
        request = by_ids(prompt, greedy(max_tokens=2))
        assert request.ByteSize() > 5_000_000
        assert (await generate(served.channel, request, rpc=rpc)).ids == [50, 50]
        assert engine.submits[0].prompt_ids == np.array(prompt, "<u4").tobytes()


async def test_G6_a_5_mb_prompt_passes_both_inner_hops(tmp_path: Path) -> None:
    length = 1_310_000
    model = write_model(tmp_path / "m", context_tokens=1_400_000)
    stub = StubExecutor(kv_bytes=1 << 40, block_bytes=1024)
    async with bench(model, stub=stub, block_size=1024, max_num_batched_tokens=1 << 21, max_num_seqs=2) as b:
        told = await b.frontend.run([7] * length, seed=3, max_tokens=2)
        assert told.ids == expected_ids([7] * length, 3, 2, VOCAB_SIZE)


def test_G6_every_inner_hop_has_one_explicit_limit_both_ways() -> None:
    keys = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    for size in (64 * MIB, 4096):
        ours = {option: value for make in (server_options, channel_options) for option, value in make(size)}
        assert [ours[key] for key in keys] == [size, size]
    for make in (server_options, channel_options):
        assert [dict(make())[key] for key in keys] == [64 * MIB, 64 * MIB]


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    async def Detokenize(self, request: Any, context: Any) -> Any:
        return inference_pb2.DetokenizeResponse(text="a" * len(request.token_ids))


async def test_G6_a_limit_holds_for_answers_too_and_is_told_with_both_sizes() -> None:
    server = Server("127.0.0.1", 0, max_message_bytes=4096)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Echo(), server.grpc)
    await server.start([])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for count in (4000, 4097):  # a byte an id
            call = stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1] * count))
            if count < 4096:
                assert len((await call).text) == count
            else:
                error = await failure(call)
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert re.search(r"larger than max \(\d+ vs\. 4096\)", error.details() or "")
    await server.stop()


async def test_G6_an_answer_that_is_no_message_any_more_says_so_and_what_to_do(model: Path) -> None:
    engine = scripted([50, 51], context_tokens=20_000, ids_per_step=64)
    async with serving(model, engine, max_message_bytes=4096) as served:
        request = by_ids([10], greedy(max_tokens=6000))
        unary = served.stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(request=request))
        asked = Chat(messages=[user("a")], options=greedy(max_tokens=6000))
        for call, advice in (
            (unary, "Generate, which streams"),
            (served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=asked)), "Chat, which streams"),
            (served.stub.Tokenize(inference_pb2.TokenizeRequest(text="12" * 1500)), "in parts"),
        ):
            error = await failure(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "ANSWER_TOO_LARGE"
            assert "at most 4096 (max_message_bytes)" in (error.details() or "") and advice in (error.details() or "")
        assert len((await generate(served.channel, request)).ids) == 6000


async def test_G6_prompt_logprobs_of_8k_tokens_come_in_messages_under_the_limit_and_fold_into_none(model: Path) -> None:
    length = 8192
    limit = 64 * 1024
    async with serving(
        model, scripted([50], context_tokens=length), max_message_bytes=limit, max_prompt_bytes=1000
    ) as s:
        request = by_ids([10] * length, greedy(prompt_logprobs=0, max_tokens=0))
        answer = await generate(s.channel, request)
        told = [m.prompt_logprobs for m in answer.messages if m.HasField("prompt_logprobs")]
        assert sum(len(piece.positions) for piece in told) == length
        assert len(told) > 1 and max(m.ByteSize() for m in answer.messages) <= limit // 2
        error = await failure(s.stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(request=request)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "ANSWER_TOO_LARGE"
        assert f"at most {limit} (max_message_bytes); use Generate" in (error.details() or "")
        assert len(s.engine.submits) == 2 and s.engine.num_running == 0


@STREAM_AND_UNARY
async def test_G6_an_echo_that_is_no_message_any_more_says_so_and_asks_no_engine(model: Path, rpc: str) -> None:
    async with serving(model, scripted([50]), max_message_bytes=4096, max_prompt_bytes=1000) as served:
        # 1,000 ids of two bytes fit the request; with the text that they stand for they are too many for the answer.
        ids = [400] * 1000
        error = await failure(generate(served.channel, by_ids(ids, greedy(echo=True, max_tokens=1)), rpc=rpc))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "ANSWER_TOO_LARGE"
        assert "leave out echo" in (error.details() or "") and served.engine.submits == []


async def worst_health_s(address: str, call: Callable[[grpc.aio.Channel], Any]) -> float:
    """The slowest answer of health while `call` runs; each on a connection of its own."""
    async with grpc.aio.insecure_channel(address) as beside, grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(beside)
        ask = health_pb2.HealthCheckRequest(service="liveness")
        await health.Check(ask)
        running = asyncio.ensure_future(call(channel))
        worst_s = 0.0
        while not running.done():
            asked_s = time.monotonic()
            assert (await health.Check(ask)).status == SERVING
            worst_s = max(worst_s, time.monotonic() - asked_s)
            await asyncio.sleep(0.005)
        await running
        return worst_s


async def raw(channel: grpc.aio.Channel, method: str, request: bytes) -> None:
    """A call whose bytes are made before: the client's own work would count as the server's delay."""
    async for _ in channel.unary_stream(f"/triptych.inference.v1.InferenceService/{method}")(request):
        pass


@EVERY_CALL
async def test_T12_a_prompt_over_the_byte_limit_is_refused_before_it_is_tokenized(
    model: Path, rpc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model, max_prompt_bytes=1000) as served:
        monkeypatch.setattr(served.frontend.model.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        text, field = "a" * 1001, "messages" if rpc.startswith("Chat") else "text"
        request = Chat(messages=[user(text)]) if rpc.startswith("Chat") else by_text(text, greedy())
        error = await failure(call(served.channel, rpc, request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [place(rpc, field)]
        assert reason(error) == "PROMPT_TOO_LONG" and served.engine.submits == []


async def test_T12_a_20_mb_prompt_is_refused_by_a_byte_limit_and_one_near_the_limit_stalls_nobody(
    model: Path,
) -> None:
    """Each measurement is the best of five: a stall of the event loop is there each time, a busy machine is not."""
    near = "a" * (MIB - 1)
    texts = {size: by_text("a" * size, greedy()).SerializeToString() for size in (MIB - 1, 20_000_000)}
    chats = [
        Chat(messages=messages).SerializeToString()
        for messages in ([message(inference_pb2.ROLE_USER, near)], [user("a")] * 2048)
    ]
    flags = ("--model", str(model), "--max-message-bytes", str(32 * MIB))

    async def refused(channel: grpc.aio.Channel) -> None:
        error = await failure(raw(channel, "Generate", texts[20_000_000]))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(error) == "PROMPT_TOO_LONG"
        assert error.details() == "text: has 20000000 bytes of text, at most 1048576 are taken (max_prompt_bytes)"

    async def tokenized(channel: grpc.aio.Channel) -> None:
        error = await failure(raw(channel, "Generate", texts[MIB - 1]))
        assert fields_at_fault(error) == ["text"] and "context holds 1024" in (error.details() or "")

    async def in_chat(channel: grpc.aio.Channel) -> None:
        error = await failure(raw(channel, "Chat", chats[0]))
        assert fields_at_fault(error) == ["messages"] and "context holds 1024" in (error.details() or "")

    async def crowded(channel: grpc.aio.Channel) -> None:
        error = await failure(raw(channel, "Chat", chats[1]))
        assert fields_at_fault(error) == ["messages"] and "context holds 1024" in (error.details() or "")

    async with (
        scripted([50]) as engine,
        process("--engine", engine.address, *flags) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        await watched(channel, "generate", SERVING, 30)
        for call in (refused, tokenized, in_chat, crowded):
            rounds = [await worst_health_s(address, call)]
            while rounds[-1] >= STALL_S and len(rounds) < 5:
                rounds.append(await worst_health_s(address, call))
            assert min(rounds) < STALL_S, (call.__name__, rounds)
        assert engine.submits == []
        assert (await generate(channel, by_ids([10], greedy(max_tokens=1)))).ids == [50]
