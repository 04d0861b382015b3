"""The Python client against a public API server that says what the test wrote down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2
from triptych.inference.v1 import inference_pb2 as pb

from services.common.errors import RequestError, invalid, unavailable
from tests.client.scripted import REQUEST_ID, Scripted, scripted_server
from triptych_client import Client, Delta, Finish, FinishReason, Message, OptionArgs, TriptychError, Usage, Violation

PROMPT = pb.PromptInfo(prompt_tokens=3, seed=2**63 + 1, max_tokens=9, fingerprint="abc")
USAGE = pb.Usage(prompt_tokens=3, completion_tokens=4)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Scripted, Client]]:
    async with scripted_server() as (scripted, address), Client(address, retry=None) as client:
        yield scripted, client


def _choice(text: str, *ids: int, **more: Any) -> pb.ChatResponse:
    return pb.ChatResponse(choices=[pb.Choice(text=text, token_ids=ids, **more)])


def _whole_stream() -> list[pb.ChatResponse]:
    finish = pb.Finish(reason=generation_pb2.FINISH_REASON_STOP, eos_token_id=2)
    return [
        pb.ChatResponse(prompt=PROMPT),
        _choice("Hel", 10, 11),
        _choice("lo", 12, 2, finish=finish),
        pb.ChatResponse(usage=USAGE),
    ]


async def test_a_chat_streams_its_deltas_and_ends_with_the_usage(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.messages = _whole_stream()
    stream = client.chat([{"role": "system", "content": "Be brief."}, Message("user", "Hi")], max_tokens=9)
    assert await stream.request_id() == REQUEST_ID
    deltas = [delta async for delta in stream]
    assert deltas == [
        Delta(text="Hel", token_ids=(10, 11)),
        Delta(text="lo", token_ids=(12, 2), finish=Finish(FinishReason.STOP, eos_token_id=2)),
        Delta(usage=Usage(3, 4, 0)),
    ]
    assert stream.usage == Usage(3, 4, 0)
    assert stream.prompt is not None
    assert (stream.prompt.seed, stream.prompt.fingerprint) == (2**63 + 1, "abc")
    sent = scripted.requests[0]
    assert [(m.role, m.content[0].text) for m in sent.messages] == [
        (pb.ROLE_SYSTEM, "Be brief."),
        (pb.ROLE_USER, "Hi"),
    ]
    assert sent.options.max_tokens == 9


async def test_a_collected_stream_equals_the_unary_answer(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.messages = _whole_stream()
    scripted.answer = pb.ChatUnaryResponse(
        response=pb.ChatResponse(
            prompt=PROMPT,
            choices=[
                pb.Choice(
                    text="Hello",
                    token_ids=[10, 11, 12, 2],
                    finish=pb.Finish(reason=generation_pb2.FINISH_REASON_STOP, eos_token_id=2),
                )
            ],
            usage=USAGE,
        )
    )
    streamed = await client.chat("Hi").collect()
    assert streamed == await client.chat_unary("Hi")
    assert (streamed.text, streamed.token_ids, streamed.request_id) == ("Hello", (10, 11, 12, 2), REQUEST_ID)


async def test_the_deltas_of_several_choices_are_joined_by_index(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.messages = [
        pb.GenerateResponse(prompt=PROMPT),
        pb.GenerateResponse(choices=[pb.Choice(index=1, text="b", token_ids=[1]), pb.Choice(text="a", token_ids=[2])]),
        pb.GenerateResponse(choices=[pb.Choice(index=1, text="B", token_ids=[3])]),
        pb.GenerateResponse(usage=USAGE),
    ]
    whole = await client.generate("x").collect()
    assert [(c.index, c.text, c.token_ids) for c in whole.choices] == [(0, "a", (2,)), (1, "bB", (1, 3))]


async def test_the_pieces_of_a_tool_call_are_joined(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.messages = [
        pb.ChatResponse(prompt=PROMPT),
        _choice("", 1, tool_calls=[pb.ToolCall(index=0, id="c1", name="add", arguments='{"a":')]),
        _choice("", 2, tool_calls=[pb.ToolCall(index=0, arguments="1}")]),
        pb.ChatResponse(usage=USAGE),
    ]
    call = (await client.chat("x").collect()).choices[0].tool_calls[0]
    assert (call.id, call.name, call.arguments) == ("c1", "add", '{"a":1}')


async def test_a_raw_prompt_is_sent_as_text_or_as_ids(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.answer = pb.GenerateUnaryResponse(response=pb.GenerateResponse(choices=[pb.Choice()]))
    await client.generate_unary("once", add_special_tokens=False)
    await client.generate_unary([5, 6])
    await client.generate_unary([])
    text, ids, empty = (request.request for request in scripted.requests)
    assert (text.text, text.HasField("add_special_tokens"), text.add_special_tokens) == ("once", True, False)
    assert (list(ids.token_ids.ids), ids.HasField("add_special_tokens")) == ([5, 6], False)
    assert empty.WhichOneof("prompt") == "token_ids"


VALUES: OptionArgs = {
    "allowed_token_ids": [1],
    "banned_token_ids": [2],
    "logit_bias": {3: float("-inf")},
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.0,
    "temperature": 0.0,
    "top_k": -1,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 2**64 - 1,
    "n": 2,
    "best_of": 3,
    "grammar": generation_pb2.Grammar(regex="a+"),
    "max_tokens": 0,
    "min_tokens": 1,
    "stop": ["a", "b"],
    "stop_token_ids": [4],
    "ignore_eos": True,
    "include_stop_string": True,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "echo": True,
    "raw_bytes": True,
    "skip_special_tokens": False,
    "min_delta_tokens": 5,
    "min_delta_interval_ms": 6,
    "priority": -7,
    "cache_salt": "salt",
    "adapter": "lora",
    "label": "mine",
    "truncate_prompt_tokens": 7,
    "resume": pb.Resume(seed=1),
}


def test_every_field_of_the_contract_has_its_keyword() -> None:
    fields = {f.name for f in pb.Options.DESCRIPTOR.fields} - {"sampling"}
    fields |= {f.name for f in generation_pb2.Sampling.DESCRIPTOR.fields}
    assert fields == set(OptionArgs.__annotations__) == set(VALUES)


async def test_every_option_reaches_the_server_also_with_a_zero_value(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.answer = pb.GenerateUnaryResponse(response=pb.GenerateResponse(choices=[pb.Choice()]))
    await client.generate_unary("x", **VALUES)
    options = scripted.requests[0].request.options
    for name, value in VALUES.items():
        message = options if name in pb.Options.DESCRIPTOR.fields_by_name else options.sampling
        got = getattr(message, name)
        if isinstance(value, list):
            assert list(got) == value
        elif isinstance(value, dict):
            assert dict(got) == value
        else:
            assert got == value
        if pb.Options.DESCRIPTOR.fields_by_name.get(name) is None and not isinstance(value, list | dict):
            assert message.HasField(name)
    assert options.HasField("max_tokens")
    assert options.HasField("logprobs")


async def test_prompt_logprobs_of_several_messages_are_there_with_the_first_delta(
    served: tuple[Scripted, Client],
) -> None:
    scripted, client = served
    tokens = [pb.TokenLogprob(token_id=i, logprob=-i / 2, rank=i, raw=b"x") for i in (1, 2)]
    told = [pb.PositionLogprobs(), *(pb.PositionLogprobs(token=token) for token in tokens)]
    scripted.messages = [
        pb.GenerateResponse(prompt=pb.PromptInfo(prompt_tokens=3, text="abc", token_ids=[0, 1, 2])),
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(start=0, positions=told[:2])),
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(start=2, positions=told[2:])),
        pb.GenerateResponse(choices=[pb.Choice(finish=pb.Finish(reason=generation_pb2.FINISH_REASON_LENGTH))]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3)),
    ]
    stream = client.generate("abc", prompt_logprobs=0, max_tokens=0, echo=True)
    await anext(stream)
    assert [entry.token and (entry.token.token_id, entry.token.logprob) for entry in stream.prompt_logprobs] == [
        None,
        (1, -0.5),
        (2, -1.0),
    ]
    assert stream.prompt is not None and (stream.prompt.text, stream.prompt.token_ids) == ("abc", (0, 1, 2))
    whole = await client.generate("abc", prompt_logprobs=0, max_tokens=0).collect()
    assert whole.prompt_logprobs == stream.prompt_logprobs and whole.text == ""


async def test_options_left_out_or_none_stay_unset(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.answer = pb.GenerateUnaryResponse(response=pb.GenerateResponse(choices=[pb.Choice()]))
    await client.generate_unary("x", temperature=None, stop=None, max_tokens=None)
    assert scripted.requests[0].request.options == pb.Options()


async def test_one_stop_string_is_not_split_into_letters(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.answer = pb.GenerateUnaryResponse(response=pb.GenerateResponse(choices=[pb.Choice()]))
    await client.generate_unary("x", stop="END")
    assert list(scripted.requests[0].request.options.stop) == ["END"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": -1}, ValueError, "max_tokens"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"temperature": "hot"}, ValueError, "temperature"),
        ({"stop_token_ids": [-1]}, ValueError, "stop_token_ids"),
        ({"temprature": 1.0}, TypeError, "temprature"),
    ],
)
async def test_an_option_that_cannot_be_written_is_refused_here_by_name(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Client().chat("Hi", **options)


@pytest.mark.parametrize("messages", [[{"role": "robot", "content": "x"}], [{"role": "user"}], [7]])
async def test_a_message_that_is_none_is_refused_here(messages: Any) -> None:
    with pytest.raises(ValueError, match="role"):
        Client().chat(messages)


async def test_an_error_carries_what_the_server_said(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.error = invalid("options.stop[1]", "must not be empty")
    with pytest.raises(TriptychError) as caught:
        await client.chat("Hi").collect()
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_FIELD"
    assert error.message == "options.stop[1]: must not be empty"
    assert error.violations == (Violation("options.stop[1]", "must not be empty"),)
    assert error.retry_after_s is None
    assert error.request_id == REQUEST_ID


async def test_an_unary_error_says_when_to_come_back(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.error = unavailable("DRAINING", "this frontend drains", retry_after_s=2.5)
    with pytest.raises(TriptychError, match="this frontend drains") as caught:
        await client.chat_unary("Hi")
    assert (caught.value.reason, caught.value.retry_after_s) == ("DRAINING", 2.5)


async def test_an_error_after_some_deltas_comes_after_them(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.messages = _whole_stream()[:2]
    scripted.error = RequestError(grpc.StatusCode.INTERNAL, "BAD_LOGITS", "the model's output is not a number")
    seen = []
    with pytest.raises(TriptychError, match="not a number"):
        async for delta in client.chat("Hi"):
            seen.append(delta.text)
    assert seen == ["Hel"]


async def test_nothing_listening_is_unavailable_without_a_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets the port meanwhile
        async with Client(f"127.0.0.1:{taken.getsockname()[1]}") as client:
            with pytest.raises(TriptychError) as caught:
                await client.get_model()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == ""


async def test_the_deadline_travels_and_is_kept(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.hang = True
    with pytest.raises(TriptychError) as caught:
        await client.chat("Hi", timeout_s=1.5).collect()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert scripted.time_remaining_s is not None
    assert 0 < scripted.time_remaining_s < 1.52  # gRPC rounds it up to three digits on its way, by 1% at most


async def _read_one(client: Client) -> None:
    async for _ in client.chat("Hi"):
        break


async def _read_one_then_leave_the_block(client: Client) -> None:
    async with client.chat("Hi") as stream:
        await anext(stream)


async def _read_one_then_cancel(client: Client) -> None:
    stream = client.chat("Hi")
    await anext(stream)
    stream.cancel()
    with pytest.raises(TriptychError, match="CANCELLED"):
        await anext(stream)


async def _read_until_the_task_is_cancelled(client: Client) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.chat("Hi").collect(), timeout=0.3)


@pytest.mark.parametrize(
    "leave", [_read_one, _read_one_then_leave_the_block, _read_one_then_cancel, _read_until_the_task_is_cancelled]
)
async def test_leaving_a_stream_cancels_it_on_the_server(served: tuple[Scripted, Client], leave: Any) -> None:
    scripted, client = served
    scripted.messages = _whole_stream()[:2]
    scripted.hang = True
    await leave(client)
    await asyncio.wait_for(scripted.left.wait(), timeout=3)


async def test_closing_the_client_ends_its_streams_with_an_error_not_a_cancelled_task(
    served: tuple[Scripted, Client],
) -> None:
    scripted, client = served
    scripted.hang = True
    reading = asyncio.ensure_future(client.chat("Hi").collect())
    await asyncio.sleep(0.2)
    await client.close()
    with pytest.raises(TriptychError, match="CANCELLED"):
        await reading


async def test_metadata_goes_with_every_call() -> None:
    async with scripted_server() as (scripted, address):
        scripted.answer = pb.ListModelsResponse()
        async with Client(address, metadata=[("authorization", "Bearer x")]) as client:
            await client.list_models()
        assert scripted.metadata["authorization"] == "Bearer x"


async def test_tokenize_takes_text_or_a_conversation(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.answer = pb.TokenizeResponse(token_ids=[1, 2])
    assert await client.tokenize("a b", add_special_tokens=False) == (1, 2)
    assert await client.tokenize([Message("user", "Hi")]) == (1, 2)
    text, chat = scripted.requests
    assert (text.text, text.add_special_tokens) == ("a b", False)
    assert chat.chat.messages[0].content[0].text == "Hi"


async def test_detokenize_gives_text(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.answer = pb.DetokenizeResponse(text="a b")
    assert await client.detokenize([1, 2], skip_special_tokens=False) == "a b"
    assert list(scripted.requests[0].token_ids) == [1, 2]


async def test_a_models_defaults_read_like_options(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    defaults = pb.Options(n=1, sampling=generation_pb2.Sampling(temperature=0.5, top_k=0))
    scripted.answer = pb.GetModelResponse(
        model=pb.Model(name="m", context_tokens=8, eos_token_ids=[2], defaults=defaults, limits={"max_stops": 4})
    )
    model = await client.get_model("m")
    assert scripted.requests[0].model == "m"
    assert (model.name, model.context_tokens, model.eos_token_ids) == ("m", 8, (2,))
    assert model.defaults == {"n": 1, "temperature": 0.5, "top_k": 0}
    assert model.limits == {"max_stops": 4}


async def test_a_tenant_goes_with_every_call_and_none_is_no_key(served: tuple[Scripted, Client]) -> None:
    scripted, client = served
    scripted.answer = pb.GenerateUnaryResponse(response=pb.GenerateResponse(choices=[pb.Choice()]))
    async with Client(client.address, tenant="acme", metadata=[("x-mine", "1")]) as named:
        await named.generate_unary("x")
        assert (scripted.metadata["triptych-tenant"], scripted.metadata["x-mine"]) == ("acme", "1")
        async for _ in named.chat("x"):
            pass
        assert scripted.metadata["triptych-tenant"] == "acme"
    await client.generate_unary("x")
    assert "triptych-tenant" not in scripted.metadata


@pytest.mark.parametrize("tenant", ["é", "a\nb", "a\0b", "\x7f", "x" * 129])
def test_a_tenant_that_metadata_cannot_carry_is_refused_when_it_is_named(tenant: str) -> None:
    with pytest.raises(ValueError, match="128 bytes of printable ASCII"):
        Client(tenant=tenant)


async def test_choices_of_one_message_are_deltas_of_their_own_and_collected_by_index(
    served: tuple[Scripted, Client],
) -> None:
    scripted, client = served
    finish = pb.Finish(reason=generation_pb2.FINISH_REASON_LENGTH)
    scripted.messages = [
        pb.GenerateResponse(prompt=pb.PromptInfo(prompt_tokens=1)),
        pb.GenerateResponse(choices=[pb.Choice(index=i, text="ab"[i], token_ids=[i]) for i in (1, 0)]),
        pb.GenerateResponse(choices=[pb.Choice(index=1, text="c", token_ids=[3], finish=finish)]),
        pb.GenerateResponse(choices=[pb.Choice(index=0, text="d", token_ids=[4], finish=finish)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=4, cached_tokens=16)),
    ]
    deltas = [delta async for delta in client.generate("x", n=2)]
    assert [(delta.index, delta.text) for delta in deltas[:-1]] == [(1, "b"), (0, "a"), (1, "c"), (0, "d")]
    whole = await client.generate("x", n=2).collect()
    assert [(choice.text, choice.token_ids) for choice in whole.choices] == [("ad", (0, 4)), ("bc", (1, 3))]
    assert whole.usage.cached_tokens == 16
