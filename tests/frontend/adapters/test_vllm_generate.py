"""The adapter's Generate: from ids and from text, streamed and not, against a stub engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from loadtest.stub_logprobs import alternatives
from loadtest.stub_steps import prompt_score
from services.frontend.adapters.vllm.door import DOOR
from tests.frontend.harness import Served, fields_at_fault, reason, scripted, serving, text_checkpoint
from tests.support.checkpoints import EOS_ID
from tests.support.vllm_calls import by_ids, by_text, failure, generate, stub


@pytest.fixture
async def served(text_model: Path) -> AsyncIterator[Served]:
    async with serving(text_model, scripted([50, 51, 52, EOS_ID]), vllm_adapter=True) as served:
        yield served


async def test_ids_are_streamed_as_they_come_and_then_told_whole(served: Served) -> None:
    reply = await generate(served.channel, by_ids([10, 11], stream=True))
    assert reply.streamed() == [50, 51, 52, EOS_ID]  # a client that is slow gets several in one chunk
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in reply.chunks)
    assert {chunk.prompt_tokens for chunk in reply.chunks} == {2}
    assert reply.messages[-1].complete == pb.GenerateComplete(
        output_ids=[50, 51, 52, EOS_ID], finish_reason="stop", prompt_tokens=2, completion_tokens=4
    )
    assert len(reply.completes) == 1


async def test_without_a_stream_one_message_tells_all(served: Served) -> None:
    reply = await generate(served.channel, by_ids([10, 11], max_tokens=2))
    assert reply.messages == [
        pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=[50, 51], finish_reason="length", prompt_tokens=2, completion_tokens=2
            )
        )
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_tokenized_as_by_our_own_api(served: Served, stream: bool) -> None:
    reply = await generate(served.channel, by_text("hello there", stream=stream))
    assert reply.ids == [50, 51, 52, EOS_ID]
    assert list(served.engine.prompts[0]) == served.ids("hello there")


async def test_prefix_cache_hits_are_counted(served: Served) -> None:
    prompt = list(range(40))
    for cached in (0, 32):
        reply = await generate(served.channel, by_ids(prompt, stream=True))
        assert reply.complete.cached_tokens == cached and reply.chunks[-1].cached_tokens == cached


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_has_its_own_chunks_and_one_complete(served: Served, stream: bool) -> None:
    reply = await generate(served.channel, by_ids([10], stream=stream, n=3, max_tokens=2))
    assert sorted(complete.index for complete in reply.completes) == [0, 1, 2]
    for complete in reply.completes:
        ids = [50 + complete.index, 51 + complete.index]
        assert list(complete.output_ids) == ids and complete.completion_tokens == 2
        assert reply.streamed(complete.index) == (ids if stream else [])
        assert complete.prompt_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_asked_to_stop_it_is_told(served: Served, stream: bool) -> None:
    by_id = (await generate(served.channel, by_ids([10], stream=stream, stop_token_ids=[51]))).complete
    assert by_id.WhichOneof("matched_stop") == "matched_token_id" and by_id.matched_token_id == 51
    text = served.decode([51])
    by_string = (await generate(served.channel, by_ids([10], stream=stream, stop=[text]))).complete
    assert by_string.matched_stop_str == text and by_string.finish_reason == "stop"
    by_eos = (await generate(served.channel, by_ids([10], stream=stream))).complete
    assert by_eos.WhichOneof("matched_stop") is None and by_eos.finish_reason == "stop"
    ignored = await generate(served.channel, by_ids([10], stream=stream, ignore_eos=True, max_tokens=5))
    assert ignored.ids == [50, 51, 52, EOS_ID, 50]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_and_alternatives_of_each_id(served: Served, stream: bool) -> None:
    reply = await generate(served.channel, by_ids([10], stream=stream, logprobs=2, max_tokens=3))
    told = [c.output_logprobs for c in reply.chunks] if stream else [reply.complete.output_logprobs]
    assert [i for each in told for i in each.token_ids] == [50, 51, 52]
    assert [value for each in told for value in each.token_logprobs] == [-1 / 8, -2 / 8, -3 / 8]
    tops = [list(zip(top.token_ids, top.values, strict=True)) for each in told for top in each.top_logprobs]
    assert tops == [alternatives(position, 2) for position in range(3)]
    assert not reply.complete.HasField("output_logprobs") or not stream
    plain = await generate(served.channel, by_ids([10], logprobs=0, max_tokens=1))
    assert list(plain.complete.output_logprobs.token_ids) == [50] and not plain.complete.output_logprobs.top_logprobs


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_logprobs_stand_in_the_first_message_of_each_choice(
    served: Served, stream: bool, max_tokens: int
) -> None:
    prompt = [10, 11, 12, 13]
    request = by_ids(prompt, stream=stream, prompt_logprobs=1, n=2, max_tokens=max_tokens)
    reply = await generate(served.channel, request)
    first = {}
    for message in reply.messages:
        part = message.chunk if message.HasField("chunk") else message.complete
        if part.index in first:
            assert not part.HasField("input_logprobs")
        else:
            first[part.index] = part.input_logprobs
    assert sorted(first) == [0, 1]
    for told in first.values():
        assert list(told.token_ids) == prompt
        assert [entry.value if entry.HasField("value") else None for entry in told.token_logprobs] == [
            None,
            *(prompt_score(at)[0] for at in (1, 2, 3)),
        ]
        tops = [list(zip(top.token_ids, top.values, strict=True)) for top in told.top_logprobs]
        assert tops == [[], *(alternatives(at, 1) for at in (1, 2, 3))]


async def test_a_prompt_of_one_id_has_nothing_that_foretells_it(served: Served) -> None:
    reply = await generate(served.channel, by_ids([10], prompt_logprobs=0, max_tokens=0))
    told = reply.complete.input_logprobs
    assert list(told.token_ids) == [10] and not told.token_logprobs[0].HasField("value") and not told.top_logprobs
    assert served.engine.submits == []


async def test_zero_means_off_as_in_vllm_and_not_the_checkpoints_default(tmp_path: Path) -> None:
    generation = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.5}
    model = text_checkpoint(tmp_path / "m", generation=generation)
    async with serving(model, scripted([50]), vllm_adapter=True) as served:
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[10]))
        request.sampling_params.max_tokens = 1
        await generate(served.channel, request)
        sampling = served.engine.submits[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1, 1, -1, 1)


SET: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 9,
    "min_p": 0.125,
    "frequency_penalty": 0.25,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.25,
}


async def test_every_parameter_reaches_the_engine(served: Served) -> None:
    request = by_ids([10, 11], max_tokens=20, min_tokens=4, stop_token_ids=[77], seed=-5, **SET)
    request.sampling_params.logit_bias[60] = 1.5
    await generate(served.channel, request)
    (submit,) = served.engine.submits
    assert {name: getattr(submit.sampling, name) for name in SET} == SET
    assert dict(submit.sampling.logit_bias) == {60: 1.5}
    assert (submit.max_tokens, submit.min_tokens, submit.seed) == (20, 4, 2**64 - 5)
    assert np.frombuffer(submit.stop_ids, "<u4").tolist() == [EOS_ID, 77]


UNSERVED: dict[str, Any] = {
    "kv_transfer_params": pb.KvTransferParams(remote_host="h"),
    "kv_transfer_params_json": "{}",
    "mm_inputs": pb.MultimodalInputs(mm_hashes=["a"]),
    "extra_mm_inputs": [pb.MultimodalInputs()],
    "media_refs": pb.MediaRefs(),
    "data_parallel_rank": 0,
}


@pytest.mark.parametrize("field", sorted(UNSERVED))
async def test_a_field_that_is_not_served_is_refused_by_its_name(served: Served, field: str) -> None:
    request = by_ids([10])
    request.MergeFrom(pb.GenerateRequest(**{field: UNSERVED[field]}))
    error = await failure(generate(served.channel, request))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED and fields_at_fault(error)[0].startswith(field)
    assert served.engine.submits == []


def test_every_field_of_a_request_is_served_or_named_here() -> None:
    """A field that a later version of the package brings shows up here."""
    for message, unserved in ((pb.GenerateRequest, set(UNSERVED)), (pb.SamplingParams, set())):
        served = DOOR._served[message.DESCRIPTOR.full_name]
        assert {field.name for field in message.DESCRIPTOR.fields} == served | unserved
        assert not served & unserved


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_cut_to_its_last_tokens_on_request(served: Served, stream: bool) -> None:
    request = by_ids([10, 11, 12], truncate_prompt_tokens=2, max_tokens=1, stream=stream)
    reply = await generate(served.channel, request)
    assert served.engine.prompts[-1] == (11, 12) and reply.complete.prompt_tokens == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "sampling_params.temperature"),
    ({"top_p": 1.5}, "sampling_params.top_p"),
    ({"min_p": -0.5}, "sampling_params.min_p"),
    ({"repetition_penalty": -1.0}, "sampling_params.repetition_penalty"),
    ({"presence_penalty": 3.0}, "sampling_params.presence_penalty"),
    ({"frequency_penalty": float("nan")}, "sampling_params.frequency_penalty"),
    ({"n": 17}, "sampling_params.n"),
    ({"logprobs": 21}, "sampling_params.logprobs"),
    ({"logprobs": -1}, "sampling_params.logprobs"),
    ({"prompt_logprobs": -1}, "sampling_params.prompt_logprobs"),
    ({"max_tokens": 5000}, "sampling_params.max_tokens"),
    ({"truncate_prompt_tokens": 0}, "sampling_params.truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1}, "sampling_params.truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5000}, "sampling_params.truncate_prompt_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "sampling_params.min_tokens"),
    ({"stop": ["a" * 2000]}, "sampling_params.stop[0]"),
    ({"json_object": False}, "sampling_params.json_object"),
]


@pytest.mark.parametrize(("params", "field"), WRONG)
async def test_a_value_out_of_range_is_refused_by_the_adapters_own_name(
    served: Served, params: dict[str, Any], field: str
) -> None:
    error = await failure(generate(served.channel, by_ids([10], **params)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]
    assert (error.details() or "").startswith(f"{field}: ") and served.engine.submits == []


async def test_no_prompt_and_an_id_too_long_are_refused(served: Served) -> None:
    for request, field in (
        (pb.GenerateRequest(), "input"),
        (by_ids([]), "tokenized.input_ids"),
        (by_text(""), "text"),
        (by_ids([10], request_id="x" * 129), "request_id"),
    ):
        error = await failure(generate(served.channel, request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]


async def test_a_refusal_comes_without_the_start_of_a_stream(served: Served) -> None:
    """A gateway can still make an HTTP status of it."""
    call = stub(served.channel).Generate(by_ids([10], stream=True, top_p=2.0))
    assert not list(await call.initial_metadata() or ())
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    call = stub(served.channel).Generate(by_ids([10], stream=True))
    assert [key for key, _ in await call.initial_metadata()] == ["triptych-request-id"]
    assert [message async for message in call][-1].HasField("complete")


async def test_an_answer_larger_than_a_message_is_refused_with_what_to_do(text_model: Path) -> None:
    engine = scripted([50], scores_per_step=1000)
    async with serving(text_model, engine, vllm_adapter=True, max_message_bytes=4096, max_prompt_bytes=1000) as served:
        error = await failure(generate(served.channel, by_ids([10] * 300, prompt_logprobs=5, max_tokens=1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "ANSWER_TOO_LARGE"
        assert "max_message_bytes" in (error.details() or "")


async def test_without_the_switch_the_adapter_is_not_there(text_model: Path) -> None:
    async with serving(text_model) as served:
        error = await failure(generate(served.channel, by_ids([10])))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_trace_and_the_tenant_of_a_call_go_to_the_engine(served: Served) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    metadata = (("traceparent", trace), ("tracestate", "a=1"), ("triptych-tenant", "blue"))
    await generate(served.channel, by_ids([10]), metadata=metadata)
    (submit,) = served.engine.submits
    assert (submit.traceparent, submit.tracestate, submit.tenant) == (trace, "a=1", "blue")
