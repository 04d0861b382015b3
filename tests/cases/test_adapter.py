"""Rows T, S, C and G on the vllm.grpc.engine adapter, where it has the field: against a stub engine.

The adapter sends ids alone; text is made all the same, since stop strings are found in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from triptych.engine.v1 import engine_pb2

from loadtest.stub_engine import Faults
from services.frontend import served_model
from tests.frontend.harness import fields_at_fault, reason, scripted, serving, text_checkpoint
from tests.frontend.made_tokenizers import llama2_like
from tests.support.checkpoints import EOS_ID
from tests.support.vllm_calls import Reply, by_ids, by_text, failure, generate, stub

CONTEXT = 32
BOTH = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("adapter") / "tiny-text")


def refused(error: grpc.aio.AioRpcError) -> list[str]:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    return fields_at_fault(error)


# -- text


@BOTH
@pytest.mark.parametrize("bad_id", [2**32 - 1, 512, 2**31])
async def test_T3_an_id_outside_the_vocabulary_ends_that_call_alone(
    model: Path, bad_id: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(bad_id_at=3, bad_id=bad_id, only_prompt=(10,))
    async with serving(model, scripted([50, 51, 52], faults=faults, step_s=0.005), vllm_adapter=True) as served:
        caplog.clear()
        calls = [generate(served.channel, by_ids([n], max_tokens=20, stream=stream)) for n in (10, 11, 12)]
        broken, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(broken, grpc.aio.AioRpcError) and broken.code() is grpc.StatusCode.INTERNAL
        assert reason(broken) == "BAD_TOKEN_ID"
        assert all(isinstance(other, Reply) and len(other.ids) == 20 for other in others)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@BOTH
async def test_T5_a_tokenizer_that_raises_in_the_middle_ends_the_call_and_the_engines_work(
    model: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model, scripted([50], step_s=0.005), vllm_adapter=True) as served:

        class Raising:
            def step(self, tokenizer: Any, token_id: Any, /) -> str:
                raise RuntimeError("the tokenizer broke")

        tokenizer = served.frontend.model.tokenizer
        working = tokenizer.decode

        def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
            if 50 in ids:
                raise RuntimeError("the tokenizer broke")
            return working(ids, skip_special_tokens=skip_special_tokens)

        monkeypatch.setattr(tokenizer, "stream", lambda ids, *, skip_special_tokens: Raising())
        monkeypatch.setattr(tokenizer, "decode", decode)
        error = await failure(generate(served.channel, by_ids([10], max_tokens=100, stream=stream)))
        assert error.code() is grpc.StatusCode.INTERNAL and reason(error) == "DETOKENIZE"
        await served.engine.wait_until(lambda engine: engine.num_running == 0)


@BOTH
@pytest.mark.parametrize("ids_per_step", [1, 4, 64])
@pytest.mark.parametrize(
    ("stops", "found"),
    [
        (["rvic"], "rvic"),
        (["e engine: the front"], "e engine: the front"),
        (["engine", "the", "ne eng"], "ne eng"),
        (["on", "one", "o"], "one"),
    ],
)
async def test_T6_ids_end_with_the_one_that_completes_a_stop_string(
    model: Path, stops: list[str], found: str, ids_per_step: int, stream: bool
) -> None:
    tokenizer = served_model.load(str(model), None).tokenizer
    output = list(tokenizer.encode("Three services make one engine: the frontend", add_special_tokens=False))
    needed = next(n for n in range(len(output) + 1) if found in tokenizer.decode(output[:n], skip_special_tokens=True))
    async with serving(model, scripted([*output, EOS_ID], ids_per_step=ids_per_step), vllm_adapter=True) as served:
        for include in (False, True):
            request = by_ids([10], stop=stops, stream=stream, include_stop_str_in_output=include)
            reply = await generate(served.channel, request)
            assert reply.ids == output[:needed] and reply.complete.completion_tokens == needed
            assert reply.complete.matched_stop_str == found and reply.complete.finish_reason == "stop"
            assert reply.streamed() == (reply.ids if stream else [])


@BOTH
async def test_T7_ids_of_text_that_is_held_back_are_told_at_once_and_at_every_end(model: Path, stream: bool) -> None:
    tokenizer = served_model.load(str(model), None).tokenizer
    output = list(tokenizer.encode("so far: STO", add_special_tokens=False))
    async with serving(model, scripted([*output, EOS_ID]), vllm_adapter=True) as served:
        whole = await generate(served.channel, by_ids([10], stop=["STOP"], stream=stream))
        assert whole.ids == [*output, EOS_ID] and whole.complete.finish_reason == "stop"
        cut = await generate(served.channel, by_ids([10], stop=["STOP"], stream=stream, max_tokens=len(output) - 1))
        assert cut.ids == output[:-1] and cut.complete.finish_reason == "length"


@BOTH
@pytest.mark.parametrize(("stop", "place"), [([""], 0), (["a", ""], 1)])
async def test_T8_an_empty_stop_string_is_refused(model: Path, stop: list[str], place: int, stream: bool) -> None:
    async with serving(model, vllm_adapter=True) as served:
        error = await failure(generate(served.channel, by_ids([10], stop=stop, stream=stream)))
        assert refused(error) == [f"sampling_params.stop[{place}]"] and served.engine.submits == []


@BOTH
async def test_T11_one_bos_before_a_text_that_may_have_it_already(tmp_path: Path, stream: bool) -> None:
    model = text_checkpoint(tmp_path / "m")
    (model / "tokenizer.json").write_text(llama2_like(adds_bos=True))
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = served_model.load(str(model), None).tokenizer
    bos = tokenizer.backend.token_to_id("<s>")
    async with serving(model, scripted([2], vocab_size=tokenizer.vocab_size), vllm_adapter=True) as served:
        for text in ("the dog", "<s>the dog"):
            await generate(served.channel, by_text(text, max_tokens=1, stream=stream))
            assert served.engine.prompts[-1].count(bos) == 1 and served.engine.prompts[-1][0] == bos
        await generate(served.channel, by_ids([5, 6], max_tokens=1, stream=stream))
        assert served.engine.prompts[-1] == (5, 6), "ids are taken as they are"


@BOTH
async def test_T12_a_text_too_long_is_refused_before_it_is_tokenized(
    model: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with serving(model, vllm_adapter=True, max_prompt_bytes=1000) as served:
        monkeypatch.setattr(served.frontend.model.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        error = await failure(generate(served.channel, by_text("a" * 1001, stream=stream)))
        assert refused(error) == ["text"] and reason(error) == "PROMPT_TOO_LONG"


# -- sampling and limits

OUTSIDE = (512, 575, 576, 2**31 - 1)


@BOTH
@pytest.mark.parametrize("token_id", [*OUTSIDE, 2**31, 2**32 - 1])
async def test_S1_an_id_outside_the_vocabulary_is_refused_in_every_field(
    model: Path, token_id: int, stream: bool
) -> None:
    async with serving(model, scripted([50], vocab_size=576), vllm_adapter=True) as served:
        asked = [
            (by_ids([10, token_id], stream=stream), "tokenized.input_ids[1]"),
            (by_ids([10], stop_token_ids=[7, token_id], stream=stream), "sampling_params.stop_token_ids[1]"),
        ]
        if token_id in OUTSIDE:  # the field is a signed one
            asked.append(
                (by_ids([10], logit_bias={token_id: 1.0}, stream=stream), f"sampling_params.logit_bias[{token_id}]")
            )
        for request, field in asked:
            assert refused(await failure(generate(served.channel, request))) == [field]
        assert served.engine.submits == []


@BOTH
@pytest.mark.parametrize("token_id", [-1, -(2**31)])
async def test_S1_a_negative_id_is_refused_where_the_contract_can_say_it(
    model: Path, token_id: int, stream: bool
) -> None:
    async with serving(model, vllm_adapter=True) as served:
        error = await failure(generate(served.channel, by_ids([10], logit_bias={token_id: 1.0}, stream=stream)))
        assert refused(error) == [f"sampling_params.logit_bias[{token_id}]"]


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
async def test_S2_a_tiny_temperature_reaches_the_engine_as_it_is(model: Path, temperature: float, stream: bool) -> None:
    async with serving(model, scripted([50]), vllm_adapter=True) as served:
        await generate(served.channel, by_ids([10], temperature=temperature, max_tokens=1, stream=stream))
        assert served.engine.submits[0].sampling.temperature == pytest.approx(temperature, rel=1e-6)


@BOTH
@pytest.mark.parametrize(("top_k", "sent"), [(0, -1), (1, 1), (511, 511), (512, -1), (9_999_999, -1), (2**32 - 1, -1)])
async def test_S3_top_k_at_its_edges(model: Path, top_k: int, sent: int, stream: bool) -> None:
    async with serving(model, scripted([50]), vllm_adapter=True) as served:
        await generate(served.channel, by_ids([10], top_k=top_k, max_tokens=1, stream=stream))
        assert served.engine.submits[0].sampling.top_k == sent


@BOTH
async def test_S4_penalties_reach_the_engine_as_they_are(model: Path, stream: bool) -> None:
    asked = {"repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 2.0}
    async with serving(model, scripted([50]), vllm_adapter=True) as served:
        await generate(served.channel, by_ids([10], max_tokens=1, stream=stream, **asked))
        sampling = served.engine.submits[0].sampling
        assert {name: getattr(sampling, name) for name in asked} == asked


@BOTH
async def test_S5_a_seed_is_the_callers_or_drawn_anew(model: Path, stream: bool) -> None:
    async with serving(model, scripted([50]), vllm_adapter=True) as served:
        for seed in ({"seed": 7}, {"seed": 7}, {"seed": 0}, {}, {}):
            await generate(served.channel, by_ids([10], temperature=1.0, max_tokens=1, **seed, stream=stream))
        seeds = [submit.seed for submit in served.engine.submits]
        assert seeds[:3] == [7, 7, 0] and len(set(seeds)) == 4


@BOTH
async def test_S6_max_tokens_and_prompts_at_their_edges(model: Path, stream: bool) -> None:
    async with serving(model, scripted([50], context_tokens=CONTEXT), vllm_adapter=True) as served:
        nothing = await generate(served.channel, by_ids([10, 11], max_tokens=0, stream=stream))
        assert nothing.messages == [
            pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="length", prompt_tokens=2))
        ]
        assert served.engine.submits == []
        assert (await generate(served.channel, by_ids([1], max_tokens=1, stream=stream))).ids == [50]
        assert (await generate(served.channel, by_text(" ", max_tokens=1, stream=stream))).ids == [50]
        for request, field in (
            (by_ids([], stream=stream), "tokenized.input_ids"),
            (by_text("", stream=stream), "text"),
        ):
            assert refused(await failure(generate(served.channel, request))) == [field]
        unset = await generate(served.channel, by_ids([10], stream=stream))
        assert len(unset.ids) == CONTEXT - 1


@BOTH
@pytest.mark.parametrize("max_tokens", [0, 1, None])
@pytest.mark.parametrize("prompt_tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
async def test_S7_prompt_and_max_tokens_fit_the_context_by_one_rule(
    model: Path, prompt_tokens: int, max_tokens: int | None, stream: bool
) -> None:
    params = {} if max_tokens is None else {"max_tokens": max_tokens}
    async with serving(model, scripted([50], context_tokens=CONTEXT), vllm_adapter=True) as served:
        call = generate(served.channel, by_ids([10] * prompt_tokens, **params, stream=stream))
        if prompt_tokens + (max_tokens or 0) <= CONTEXT:
            reply = await call
            assert len(reply.ids) == (CONTEXT - prompt_tokens if max_tokens is None else max_tokens)
            return
        error = await failure(call)
        too_long = prompt_tokens > CONTEXT
        assert refused(error) == ["tokenized.input_ids" if too_long else "sampling_params.max_tokens"]
        assert f"{prompt_tokens} tokens" in (error.details() or "") and f"holds {CONTEXT}" in (error.details() or "")


HUGE: list[tuple[dict[str, Any], str]] = [
    ({"n": 10**6}, "n"),
    ({"logprobs": 512}, "logprobs"),
    ({"prompt_logprobs": 512}, "prompt_logprobs"),
    ({"stop": ["x"] * 10**5}, "stop"),
    ({"stop_token_ids": [1] * 10**5}, "stop_token_ids"),
    ({"logit_bias": dict.fromkeys(range(10**5), 1.0)}, "logit_bias"),
]


@BOTH
@pytest.mark.parametrize(("params", "field"), HUGE, ids=[field for _, field in HUGE])
async def test_S8_what_is_huge_is_refused_by_configuration(
    model: Path, params: dict[str, Any], field: str, stream: bool
) -> None:
    async with serving(model, vllm_adapter=True) as served:
        assert refused(await failure(generate(served.channel, by_ids([10], **params, stream=stream)))) == [
            f"sampling_params.{field}"
        ]
        assert served.engine.submits == []


# -- constraints

UNCOMPILED: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": '{"type": "objekt"}'},
    "regex": {"regex": "("},
    "grammar": {"grammar": 'begin: "a"'},
    "choice": {"choice": pb.ChoiceConstraint(choices=["a", ""])},
    "structural_tag": {"structural_tag": "{"},
}


@BOTH
@pytest.mark.parametrize("field", UNCOMPILED)
async def test_X1_what_does_not_compile_is_refused_by_the_callers_own_field(
    model: Path, field: str, stream: bool
) -> None:
    async with serving(model, vllm_adapter=True) as served:
        error = await failure(generate(served.channel, by_ids([10], stream=stream, **UNCOMPILED[field])))
        (named,) = refused(error)
        assert named.startswith(f"sampling_params.{field}") and served.engine.submits == []


# -- cancels and ids


@BOTH
async def test_C1_a_call_that_is_cancelled_at_any_time_leaves_nothing_behind(model: Path, stream: bool) -> None:
    async with serving(model, scripted([50], step_s=0.002), vllm_adapter=True) as served:
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.05):
            call = stub(served.channel).Generate(by_ids([10], stream=stream, request_id="c"))
            await asyncio.sleep(delay_s)
            call.cancel()
        await asyncio.wait_for(served.frontend.drain(), 10)
        await served.engine.wait_until(lambda engine: engine.num_running == 0)


@BOTH
async def test_C2_an_abort_ends_all_calls_of_its_id_and_none_that_comes_later(model: Path, stream: bool) -> None:
    async with serving(model, scripted([50], step_s=0.005), vllm_adapter=True) as served:

        async def abort(*ids: str) -> None:
            await stub(served.channel).Abort(pb.AbortRequest(request_ids=ids))

        def begin(request_id: str) -> asyncio.Task[Reply]:
            return asyncio.create_task(
                generate(served.channel, by_ids([10], request_id=request_id, max_tokens=900, stream=stream))
            )

        twins, other = [begin("x"), begin("x")], begin("y")
        await served.engine.wait_until(lambda engine: engine.num_running == 3)
        await abort("x", "unknown", "x")
        again = asyncio.create_task(generate(served.channel, by_ids([10], request_id="x", max_tokens=3, stream=stream)))
        await abort("unknown")
        for twin in await asyncio.gather(*twins):
            assert twin.complete.finish_reason == "abort"
        assert (await again).complete.finish_reason == "length"
        assert not other.done()
        await abort("y")
        await abort("y")
        assert (await other).complete.finish_reason == "abort"
        await served.engine.wait_until(lambda engine: engine.num_running == 0)
        assert len({submit.request_id for submit in served.engine.submits}) == 4


# -- streams


@BOTH
@pytest.mark.parametrize(
    ("script", "params", "ended"),
    [
        ([50, EOS_ID], {}, "stop"),
        ([50], {"max_tokens": 3}, "length"),
        ([50, 60], {"stop_token_ids": [60]}, "stop"),
        ([50], {"max_tokens": 0}, "length"),
    ],
)
async def test_G1_a_call_that_ends_well_has_one_complete_and_it_is_the_last_message(
    model: Path, script: list[int], params: dict[str, Any], ended: str, stream: bool
) -> None:
    async with serving(model, scripted(script), vllm_adapter=True) as served:
        reply = await generate(served.channel, by_ids([10], stream=stream, **params))
        assert reply.complete.finish_reason == ended and reply.messages[-1].HasField("complete")
        assert reply.streamed() == (reply.ids if stream else [])


@BOTH
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_G1_a_call_that_fails_has_no_complete_and_a_status(
    model: Path, code: grpc.StatusCode, stream: bool
) -> None:
    failed = engine_pb2.Failed(code=code.value[0], reason="BROKEN", message="the engine broke")
    async with serving(model, scripted([50], faults=Faults(failed=failed, failed_at=2)), vllm_adapter=True) as served:
        call = stub(served.channel).Generate(by_ids([10], stream=stream))
        messages = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in call:
                messages.append(message)
        assert caught.value.code() is code and reason(caught.value) == "BROKEN"
        assert not any(message.HasField("complete") for message in messages)
        assert [i for message in messages for i in message.chunk.token_ids] == ([50, 50] if stream else [])


@BOTH
@pytest.mark.parametrize("ids_per_step", [1, 7])
async def test_G2_tokens_are_counted_however_they_were_cut(model: Path, stream: bool, ids_per_step: int) -> None:
    async with serving(model, scripted([50, 51, 52], ids_per_step=ids_per_step), vllm_adapter=True) as served:
        reply = await generate(served.channel, by_ids([10, 11, 12], n=3, max_tokens=20, stream=stream))
        for complete in reply.completes:
            assert complete.completion_tokens == len(complete.output_ids) == 20 and complete.prompt_tokens == 3
            if stream:
                counts = [chunk.completion_tokens for chunk in reply.chunks if chunk.index == complete.index]
                assert sum(counts) == 20


@BOTH
async def test_G3_a_full_queue_is_said_with_a_message(model: Path, stream: bool) -> None:
    failed = engine_pb2.Failed(
        code=8, reason="QUEUE_FULL", message="1 request waits, the limit is 1", retry_after_ms=50
    )
    async with serving(model, scripted([50], faults=Faults(failed=failed)), vllm_adapter=True) as served:
        error = await failure(generate(served.channel, by_ids([10], stream=stream)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "the limit is 1" in (error.details() or "")


@BOTH
async def test_G5_a_shutdown_ends_a_call_that_waits(model: Path, stream: bool) -> None:
    async with serving(model, scripted([50], faults=Faults(silent=True)), vllm_adapter=True) as served:
        call = asyncio.create_task(generate(served.channel, by_ids([10], stream=stream)))
        await served.engine.wait_until(lambda engine: len(engine.submits) == 1)
        drain = asyncio.create_task(served.frontend.drain())
        await asyncio.sleep(0.1)
        assert not call.done()
        error = await failure(generate(served.channel, by_ids([11], stream=stream)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "DRAINING"
        drain.cancel()
        error = await failure(asyncio.wait_for(call, 3))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


@BOTH
async def test_G6_a_message_past_the_limit_is_refused_both_ways(model: Path, stream: bool) -> None:
    async with serving(model, vllm_adapter=True, max_message_bytes=8192, max_prompt_bytes=4096) as served:
        error = await failure(generate(served.channel, by_ids([500] * 20_000, stream=stream)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_C1_a_client_that_takes_nothing_is_let_go_after_its_time(model: Path) -> None:
    engine = scripted([50], context_tokens=200_000, ids_per_step=512)
    async with serving(model, engine, vllm_adapter=True, slow_reader_s=0.3) as served:
        call = stub(served.channel).Generate(by_ids([10], stream=True, ignore_eos=True))
        await call.read()  # and never again
        await served.engine.wait_until(lambda engine: engine.num_running == 0)
        call.cancel()
