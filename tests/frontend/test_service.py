"""The public API as a client sees it: doors, facts, twins, logprobs, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.stub_engine import Faults, StubEngine
from loadtest.stub_executor import StubExecutor
from loadtest.stub_logprobs import alternatives
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import (
    VOCAB_SIZE,
    Served,
    attached,
    fields_at_fault,
    message,
    reason,
    retry_after_s,
    scripted,
    serving,
    text_checkpoint,
    user,
)
from tests.support.attached import scheduler_for
from tests.support.calls import by_ids, by_text, chat, generate, greedy
from tests.support.checkpoints import EOS_ID

Options = inference_pb2.Options
Sampling = generation_pb2.Sampling

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
"""Of a client that is to feel at once that it does not read."""


@pytest.fixture
async def served(text_model: Path) -> AsyncIterator[Served]:
    """Ids 50 to 53 and EOS, for every prompt."""
    async with serving(text_model, scripted([50, 51, 52, 53, EOS_ID])) as served:
        yield served


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(adapter="a"), "options.adapter"),
    ],
)
async def test_options_that_are_not_served_are_refused_by_name(served: Served, options: Options, field: str) -> None:
    error = await failure(generate(served.channel, by_ids([10], options)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert fields_at_fault(error) == [field] and field in (error.details() or "")
    assert served.engine.submits == []


async def test_a_field_nobody_knows_is_refused_not_ignored(served: Served) -> None:
    unknown = inference_pb2.GenerateRequest.FromString(by_ids([10], greedy()).SerializeToString() + b"\xf8\x3f\x01")
    error = await failure(generate(served.channel, unknown))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED and fields_at_fault(error) == ["1023"]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.ChatRequest(), "messages"),
        (inference_pb2.ChatRequest(messages=[message(inference_pb2.ROLE_UNSPECIFIED, "x")]), "messages[0].role"),
        (
            inference_pb2.ChatRequest(
                messages=[
                    inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=[inference_pb2.ContentPart()])
                ]
            ),
            "messages[0].content[0]",
        ),
        (inference_pb2.ChatRequest(messages=[user("x")], options=Options(label="l" * 129)), "options.label"),
    ],
)
async def test_chats_that_cannot_be_are_refused(served: Served, request_: Message, field: str) -> None:
    error = await failure(chat(served.channel, request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]


async def test_every_answer_has_its_request_id_before_anything_else(served: Served) -> None:
    stub = served.stub
    bad = Options(n=0)
    calls = [
        stub.Generate(by_ids([10], greedy())),
        stub.Generate(by_ids([10], bad)),
        stub.GetModel(inference_pb2.GetModelRequest()),
        stub.GetModel(inference_pb2.GetModelRequest(model="another")),
    ]
    seen = {dict(await call.initial_metadata())["triptych-request-id"] for call in calls}
    assert len(seen) == len(calls) and all(len(value) == 32 for value in seen)


async def test_prompt_facts_come_first_and_tell_what_was_decided(served: Served) -> None:
    answer = await generate(served.channel, by_ids([10, 11], Options()))
    assert answer.messages[0].prompt.prompt_tokens == 2 and answer.prompt.max_tokens == 1022
    assert answer.prompt.fingerprint == "f" * 64
    (submit,) = served.engine.submits
    assert submit.seed == answer.prompt.seed and submit.max_tokens == 1022 and submit.num_choices == 1
    assert (await generate(served.channel, by_ids([10], Options(seed=7)))).prompt.seed == 7
    assert served.engine.submits[-1].seed == 7


async def test_a_chat_reaches_the_engine_as_the_templates_ids(served: Served) -> None:
    parts = inference_pb2.ChatMessage(
        role=inference_pb2.ROLE_USER,
        content=[inference_pb2.ContentPart(text="Hello "), inference_pb2.ContentPart(text="there")],
    )
    messages = [message(inference_pb2.ROLE_DEVELOPER, "be brief"), parts]
    answer = await chat(served.channel, inference_pb2.ChatRequest(messages=messages, options=greedy()))
    rendered = (
        "<|im_start|>developer\nbe brief<|im_end|>\n<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(served.engine.prompts[0]) == served.ids(rendered)
    assert answer.ids == [50, 51, 52, 53, EOS_ID] and answer.text == served.decode([50, 51, 52, 53])
    assert answer.finishes[0].eos_token_id == EOS_ID


@pytest.mark.parametrize("kind", ["generate", "chat"])
async def test_a_unary_twin_is_its_stream_folded(served: Served, kind: str) -> None:
    options = greedy(seed=3, logprobs=0, min_tokens=1)
    if kind == "generate":
        request = by_text("the town", options)
        stream = (await generate(served.channel, request)).messages
        unary = await served.stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(request=request))
    else:
        asked = inference_pb2.ChatRequest(messages=[user("the town")], options=options)
        stream = (await chat(served.channel, asked)).messages
        unary = await served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=asked))
    response = unary.response
    (choice,) = response.choices
    deltas = [c for m in stream for c in m.choices]
    assert response.prompt == stream[0].prompt and response.usage == stream[-1].usage
    assert choice.text == "".join(delta.text for delta in deltas)
    assert list(choice.token_ids) == [i for delta in deltas for i in delta.token_ids]
    assert list(choice.logprobs) == [entry for delta in deltas for entry in delta.logprobs]
    assert choice.finish == deltas[-1].finish
    assert choice.cumulative_logprob == deltas[-1].cumulative_logprob


async def test_logprobs_are_one_an_id_and_summed_with_the_finish(served: Served) -> None:
    answer = await generate(served.channel, by_ids([10], greedy(logprobs=0)))
    entries = [entry.token for m in answer.messages for c in m.choices for entry in c.logprobs]
    # The stub's made-up values: -(position + 1) / 8, rank position + 1.
    assert [entry.logprob for entry in entries] == [-(n + 1) / 8 for n in range(5)]
    assert [entry.rank for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry.token_id for entry in entries] == answer.ids
    assert b"".join(entry.raw for entry in entries[:-1]).decode() == answer.text
    sums = [c.cumulative_logprob for m in answer.messages for c in m.choices if c.HasField("cumulative_logprob")]
    assert sums == [-15 / 8]
    plain = await generate(served.channel, by_ids([10], greedy()))
    assert not any(c.logprobs or c.HasField("cumulative_logprob") for m in plain.messages for c in m.choices)


@pytest.mark.parametrize("count", [1, 5, 20])
async def test_the_likeliest_ids_stand_beside_each_id_in_order_with_their_bytes(served: Served, count: int) -> None:
    answer = await generate(served.channel, by_ids([10], greedy(logprobs=count)))
    positions = [entry for m in answer.messages for c in m.choices for entry in c.logprobs]
    assert len(positions) == len(answer.ids) > 1
    for at, position in enumerate(positions):
        expected = alternatives(at, count)
        assert [(one.token_id, one.logprob) for one in position.top] == expected
        assert [one.rank for one in position.top] == list(range(1, count + 1))
        assert all(one.raw == served.frontend.model.tokenizer.token_bytes(one.token_id) for one in position.top)
        assert position.token.token_id == answer.ids[at] and position.token.logprob == -(at + 1) / 8
    whole = await served.stub.GenerateUnary(
        inference_pb2.GenerateUnaryRequest(request=by_ids([10], greedy(logprobs=count)))
    )
    assert list(whole.response.choices[0].logprobs) == positions
    assert served.engine.submits[0].logprobs == count


async def test_alternatives_of_ids_after_a_stop_string_are_dropped_and_choices_have_their_own(
    text_model: Path,
) -> None:
    async with serving(text_model, scripted([50, 51, 52, 53], ids_per_step=4)) as served:
        options = greedy(logprobs=2, n=2, stop=[served.decode([51])], min_delta_tokens=3)
        answer = await generate(served.channel, by_ids([10], options))
        for index in (0, 1):
            of = [c for m in answer.messages for c in m.choices if c.index == index]
            positions = [entry for c in of for entry in c.logprobs]
            ids = [token_id for c in of for token_id in c.token_ids]
            assert ids == [50, 51][index:]  # choice i begins at the script's i-th
            assert [[(one.token_id, one.logprob) for one in p.top] for p in positions] == [
                alternatives(at, 2) for at in range(len(ids))
            ]


async def test_logprobs_of_ids_after_a_stop_string_are_dropped_with_them(text_model: Path) -> None:
    async with serving(text_model, scripted([50, 51, 52, 53], ids_per_step=4)) as served:
        answer = await generate(served.channel, by_ids([10], greedy(logprobs=0, stop=[served.decode([51])])))
        entries = [entry for m in answer.messages for c in m.choices for entry in c.logprobs]
        assert answer.ids == [50, 51] and len(entries) == 2
        assert answer.messages[-2].choices[0].cumulative_logprob == -3 / 8


async def test_stop_strings_wait_for_min_tokens(text_model: Path) -> None:
    async with serving(text_model, scripted([50])) as served:
        stop = [served.decode([50])]
        answer = await generate(served.channel, by_ids([10], greedy(stop=stop, min_tokens=4, max_tokens=10)))
        assert answer.ids == [50] * 4 and answer.text == stop[0] * 3


async def test_special_tokens_show_in_text_only_when_asked(served: Served) -> None:
    hidden = await generate(served.channel, by_ids([10], greedy()))
    shown = await generate(served.channel, by_ids([10], greedy(skip_special_tokens=False)))
    assert hidden.ids == shown.ids and shown.text == hidden.text + "<|im_end|>"


async def test_names_of_the_model(served: Served) -> None:
    assert (await generate(served.channel, inference_pb2.GenerateRequest(model="tiny-text", text="x"))).reason == "STOP"
    asks = [
        generate(served.channel, inference_pb2.GenerateRequest(model="another", text="x")),
        chat(served.channel, inference_pb2.ChatRequest(model="another", messages=[user("x")])),
        served.stub.Tokenize(inference_pb2.TokenizeRequest(model="another", text="x")),
        served.stub.Detokenize(inference_pb2.DetokenizeRequest(model="another")),
        served.stub.GetModel(inference_pb2.GetModelRequest(model="another")),
    ]
    for ask in asks:
        error = await failure(ask)
        assert error.code() is grpc.StatusCode.NOT_FOUND and "tiny-text" in (error.details() or "")


async def test_a_model_may_be_served_under_another_name(text_model: Path) -> None:
    async with serving(text_model, served_model_name="house") as served:
        listed = await served.stub.ListModels(inference_pb2.ListModelsRequest())
        assert [model.name for model in listed.models] == ["house"]
        assert (await failure(served.stub.GetModel(inference_pb2.GetModelRequest(model="tiny-text")))).code() is (
            grpc.StatusCode.NOT_FOUND
        )


async def test_an_alias_is_as_good_as_the_name_in_every_call(text_model: Path) -> None:
    aliases = ("small", "org/small-1", "small", "house")
    async with serving(text_model, scripted([50]), served_model_name="house", served_model_alias=aliases) as served:
        options = greedy(max_tokens=1)
        for name in ("house", "small", "org/small-1", ""):
            await generate(served.channel, inference_pb2.GenerateRequest(model=name, text="x", options=options))
            asked = inference_pb2.ChatRequest(model=name, messages=[user("x")], options=options)
            await chat(served.channel, asked)
            await served.stub.Tokenize(inference_pb2.TokenizeRequest(model=name, text="x"))
            asked.ClearField("options")
            await served.stub.Tokenize(inference_pb2.TokenizeRequest(chat=asked))
            await served.stub.Detokenize(inference_pb2.DetokenizeRequest(model=name, token_ids=[50]))
            model = (await served.stub.GetModel(inference_pb2.GetModelRequest(model=name))).model
            assert (model.name, list(model.aliases)) == ("house", ["small", "org/small-1"])
        error = await failure(served.stub.GetModel(inference_pb2.GetModelRequest(model="tiny-text")))
        assert error.code() is grpc.StatusCode.NOT_FOUND and "'org/small-1'" in (error.details() or "")


async def test_a_checkpoint_in_a_hub_clients_cache_tells_its_commit_as_revision(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    for folder, revision in ((tmp_path / "snapshots" / commit, commit), (tmp_path / "plain", "")):
        async with serving(text_checkpoint(folder)) as served:
            assert (await served.stub.GetModel(inference_pb2.GetModelRequest())).model.revision == revision


async def test_a_context_lowered_to_the_kv_pool_is_what_the_frontend_tells_and_holds_prompts_to(
    text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # 41 blocks of 8 tokens, one of them the null block: 320 tokens, where the checkpoint says 1024.
    async with (
        StubExecutor(kv_bytes=41 * 1024, block_bytes=1024) as executor,
        scheduler_for(executor, text_model, block_size=8) as scheduler,
    ):
        (line,) = [r.getMessage() for r in caplog.records if "the context is lowered" in r.getMessage()]
        assert "320 tokens" in line and "from 1024" in line and "--kv-memory-bytes" in line
        frontend = Frontend(FrontendConfig(port=0, engine=f"127.0.0.1:{scheduler.server.port}", model=str(text_model)))
        await frontend.start()
        await attached(frontend)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert (await stub.GetModel(inference_pb2.GetModelRequest())).model.context_tokens == 320
            answer = await generate(channel, by_ids([10] * 300, greedy(ignore_eos=True)))
            assert answer.prompt.max_tokens == 20 and len(answer.ids) == 20
            error = await failure(generate(channel, by_ids([10] * 321, greedy())))
            assert "holds 320" in (error.details() or "")
        await frontend.close()


async def test_unset_options_are_what_get_model_tells_and_what_the_engine_is_given(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "max_new_tokens": 3,
    }
    documented = Sampling(
        temperature=1,
        top_k=-1,
        top_p=1,
        min_p=0,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
    )
    own = Sampling()
    own.CopyFrom(documented)
    own.MergeFrom(Sampling(temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, repetition_penalty=1.5))
    for name, written, told in (("own", generation, own), ("none", {}, documented)):
        async with serving(text_checkpoint(tmp_path / name, generation=written), scripted([50])) as served:
            defaults = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model.defaults
            assert defaults.sampling == told
            assert (defaults.n, defaults.skip_special_tokens, defaults.HasField("max_tokens")) == (1, True, False)
            answer = await generate(served.channel, by_ids([10], Options()))
            assert served.engine.submits[0].sampling == told
            assert answer.prompt.max_tokens == 1023  # to the end of the context, whatever the checkpoint says


async def test_a_model_is_described_as_it_serves(tmp_path: Path) -> None:
    model = text_checkpoint(tmp_path / "m", generation={"temperature": 0.5, "top_k": 40})
    async with serving(model, max_stop_strings=5) as served:
        described = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model
        assert (described.context_tokens, described.vocab_size) == (1024, VOCAB_SIZE)
        assert list(described.eos_token_ids) == [EOS_ID] and described.has_chat_template
        sampling = described.defaults.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 40, 1.0)
        assert described.limits["max_stop_strings"] == 5
        # What is told is what is used.
        await generate(served.channel, by_ids([10], Options(max_tokens=1)))
        assert served.engine.submits[0].sampling == sampling


async def test_tokenize_and_detokenize_are_inverse(served: Served) -> None:
    text = "the painter 😀 <|im_end|>"
    tokenized = await served.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
    assert b"".join(tokenized.raw) == text.encode() and EOS_ID in tokenized.token_ids
    ids = list(tokenized.token_ids)
    shown = await served.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
    hidden = await served.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
    assert shown.text == text and hidden.text == "the painter 😀 "
    error = await failure(served.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[10, VOCAB_SIZE])))
    assert fields_at_fault(error) == ["token_ids[1]"]
    assert fields_at_fault(await failure(served.stub.Tokenize(inference_pb2.TokenizeRequest()))) == ["input"]
    chat_request = inference_pb2.TokenizeRequest(
        chat=inference_pb2.ChatRequest(messages=[user("x")]), add_special_tokens=True
    )
    assert fields_at_fault(await failure(served.stub.Tokenize(chat_request))) == ["add_special_tokens"]
    chat_request.ClearField("add_special_tokens")
    chat_request.chat.options.seed = 1
    assert fields_at_fault(await failure(served.stub.Tokenize(chat_request))) == ["chat.options"]


async def test_without_an_engine_text_is_served_and_generation_is_not(text_model: Path) -> None:
    engine = StubEngine()
    await engine.start()
    await engine.stop()
    frontend = Frontend(FrontendConfig(port=0, engine=engine.address, model=str(text_model)))
    await frontend.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
            served = Served(frontend, engine, channel)
            for ask in (
                generate(channel, by_ids([10], greedy())),
                served.stub.GetModel(inference_pb2.GetModelRequest()),
                served.stub.ListModels(inference_pb2.ListModelsRequest()),
            ):
                error = await failure(ask)
                assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "NO_ENGINE"
                assert retry_after_s(error) > 0
            assert (await served.stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))).token_ids
    finally:
        await frontend.close()


async def test_a_slow_client_gets_fewer_and_larger_deltas(text_model: Path) -> None:
    # Paced, so that the frontend has read what the engine has sent.
    engine = scripted([50, 51], context_tokens=20_000, ids_per_step=4, step_s=0.001)
    async with serving(text_model, engine) as served:
        address = f"127.0.0.1:{served.frontend.server.port}"
        async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            stream = stub.Generate(by_ids([10], greedy(max_tokens=6_000, logprobs=0)))
            assert (await stream.read()).HasField("prompt")
            await served.engine.wait_until(lambda engine: bool(engine.submits) and engine.num_running == 0, 60)
            sizes: list[int] = []
            ids: list[int] = []
            while (m := await stream.read()) is not grpc.aio.EOF:
                for choice in m.choices:
                    sizes.append(len(choice.token_ids))
                    ids += choice.token_ids
    assert ids == [50, 51] * 3_000
    assert max(sizes) > 400 and len(sizes) < 1_500 - 100  # a step has 4


async def test_a_cancel_by_a_client_that_does_not_read_frees_the_engine(text_model: Path) -> None:
    async with serving(text_model, scripted([50], context_tokens=2**30)) as served:
        stream = served.stub.Generate(by_ids([10], greedy(logprobs=0)))
        await stream.read()
        await served.engine.wait_until(lambda engine: engine.num_running == 1)
        await asyncio.sleep(1.0)  # the stream's window is full: the handler waits to write
        stream.cancel()
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 1 and engine.num_running == 0, 5)
        await asyncio.wait_for(served.frontend.drain(), 5)


async def test_a_client_that_reads_nothing_for_too_long_is_left(text_model: Path) -> None:
    async with (
        serving(text_model, scripted([50], context_tokens=2**30), slow_reader_s=0.5) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.frontend.server.port}", options=SMALL_WINDOW) as channel,
    ):
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(by_ids([10], greedy(logprobs=0)))
        await stream.read()
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 1 and engine.num_running == 0, 10)
        await asyncio.wait_for(served.frontend.drain(), 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # once it reads on
            while await stream.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(caught.value) == "SLOW_READER"
    assert "took nothing for 0.5 s" in (caught.value.details() or "")


async def test_a_client_that_falls_too_far_behind_is_left_after_what_fits(text_model: Path) -> None:
    engine = scripted([50], context_tokens=2**30, ids_per_step=64)
    async with (
        serving(text_model, engine, max_unread_tokens=3_000) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.frontend.server.port}", options=SMALL_WINDOW) as channel,
    ):
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(by_ids([10], greedy(logprobs=0)))
        await stream.read()
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 1 and engine.num_running == 0, 10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(caught.value) == "SLOW_READER"
    assert "more than 3000 ids" in (caught.value.details() or "")


async def test_a_client_that_pauses_for_less_than_that_loses_nothing(text_model: Path) -> None:
    async with serving(text_model, scripted([50]), slow_reader_s=0.5) as served:
        stream = served.stub.Generate(by_ids([10], greedy(max_tokens=900, logprobs=0)))
        ids: list[int] = []
        while (message := await stream.read()) is not grpc.aio.EOF:
            ids += [token_id for choice in message.choices for token_id in choice.token_ids]
            if len(ids) in (1, 2):
                await asyncio.sleep(0.3)
    assert ids == [50] * 900


@pytest.mark.parametrize("turns", range(6))
async def test_a_drain_that_begins_as_the_engines_state_changes_ends(text_model: Path, turns: int) -> None:
    async with serving(text_model) as served:
        await asyncio.sleep(0.05)  # the watch sleeps
        served.frontend.engine.changed.set()
        for _ in range(turns):  # of the event loop: the watch has woken by so much when it is cancelled
            await asyncio.sleep(0)
        drain = asyncio.create_task(served.frontend.drain())
        done, _ = await asyncio.wait({drain}, timeout=5)
        assert done == {drain}


async def test_a_label_is_escaped_where_it_is_logged(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(text_model, scripted([50], faults=Faults(bad_id_at=0))) as served:
        await failure(generate(served.channel, by_ids([10], greedy(label="a\nFAKE LINE"))))
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if "BAD" in record.getMessage() or "label" in record.getMessage()
        ]
        assert "\n" not in line and "a\\nFAKE LINE" in line


async def test_errors_and_logs_hold_no_prompt_text(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "once upon a secret"
    async with serving(text_model, scripted([50], context_tokens=4, faults=Faults(bad_id_at=0))) as served:
        for request in (by_text(secret, greedy()), by_text(secret, Options(n=0)), by_text("a", greedy(stop=[secret]))):
            error = await failure(generate(served.channel, request))
            assert "secret" not in (error.details() or "")
    assert "secret" not in caplog.text
