"""Requests through a real scheduler: a frontend above it, an executor without a model below, gRPC between them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc
from triptych.inference.v1 import generation_pb2

from loadtest.stub_batch import expected_ids, own_logprob
from loadtest.stub_executor import StubExecutor
from loadtest.stub_logprobs import alternatives
from tests.support.attached import Frontend, Told, bench, finished, ids_column, until, until_idle

VOCAB = 512
SERVING, LENGTH, STOP = (
    engine_pb2.ENGINE_STATE_SERVING,
    generation_pb2.FINISH_REASON_LENGTH,
    generation_pb2.FINISH_REASON_STOP,
)


async def test_a_request_receives_its_ids_and_one_finish(model: Path) -> None:
    async with bench(model) as b:
        before_ns = time.time_ns()
        told = await b.frontend.run([5, 6, 7], max_tokens=9, seed=42)
        assert told.ids == expected_ids([5, 6, 7], 42, 9, VOCAB)
        assert told.finished is not None and told.started is not None
        assert told.finished.reason == LENGTH and not told.finished.HasField("stop_id")
        assert told.started.cached_tokens == 0
        times = [
            before_ns,
            told.started.queued_unix_ns,
            told.started.scheduled_unix_ns,
            told.started.first_token_unix_ns,
            told.finished.last_token_unix_ns,
            time.time_ns() + 1_000_000,  # two clocks: the scheduler's moves on by the monotonic one
        ]
        assert times == sorted(times)
        await b.idle()


async def test_the_hello_says_what_the_engine_is(model: Path) -> None:
    stub = StubExecutor(kv_bytes=41 * 1024, block_bytes=1024, weights_hash="cd" * 32)
    async with bench(model, stub=stub, block_size=8, served_model_name="mine") as b:
        hello = await b.frontend.greeted()
        assert (hello.version, hello.model, hello.vocab_size, hello.block_tokens) == (1, "mine", VOCAB, 8)
        # 41 blocks fit, one is the null block: 40 x 8 tokens, less than the model's 1024.
        assert (hello.pool_tokens, hello.context_tokens) == (320, 320)
        assert (hello.max_choices, hello.max_logprobs) == (16, 20)
        assert hello.engine_id and hello.fragment_bytes == 256 * 1024
        parts = ["cd" * 32, b.server.engine.model.tokenizer_hash, "float32", "float32"]
        assert hello.fingerprint == hashlib.sha256("\n".join(parts).encode()).hexdigest()


async def test_many_requests_of_many_frontends_with_equal_ids_stay_apart(model: Path) -> None:
    async with bench(model) as b, Frontend(b.server) as second, Frontend(b.server) as third:
        frontends = [b.frontend, second, third]
        told = {}
        for number in range(1, 21):
            for which, frontend in enumerate(frontends):
                prompt = [which + 1] * (number % 7 + 1)
                told[which, number] = await frontend.submit(prompt, request_id=number, max_tokens=12, seed=number)
        await finished(*told.values())
        for (which, number), mine in told.items():
            assert mine.ids == expected_ids([which + 1] * (number % 7 + 1), number, 12, VOCAB)
        await b.idle()


@pytest.mark.parametrize("budget", [1, 3, 16, 256])
@pytest.mark.parametrize("block_size", [1, 16])
async def test_ids_do_not_depend_on_chunks_or_block_size(model: Path, budget: int, block_size: int) -> None:
    async with bench(model, max_num_batched_tokens=budget, block_size=block_size) as b:
        prompts = [[n] * length for n, length in enumerate((1, 15, 16, 17, 40), start=1)]
        told = [await b.frontend.submit(prompt, max_tokens=6, seed=7) for prompt in prompts]
        await finished(*told)
        assert [mine.ids for mine in told] == [expected_ids(prompt, 7, 6, VOCAB) for prompt in prompts]


async def test_preempted_streams_equal_unpreempted_ones(model: Path) -> None:
    streams = {}
    for num_kv_blocks in (13, 600):
        async with bench(model, num_kv_blocks=num_kv_blocks, block_size=4) as b:
            told = [await b.frontend.submit([n, n], max_tokens=40, seed=n) for n in range(6)]
            await finished(*told)
            streams[num_kv_blocks] = [mine.ids for mine in told]
            assert (b.server.engine.core.counters.preemptions > 0) == (num_kv_blocks == 13)
            ends = [mine.finished for mine in told if mine.finished]
            assert (sum(end.preemptions for end in ends) > 0) == (num_kv_blocks == 13)
            await b.idle()
    assert streams[13] == streams[600]


async def test_a_stop_id_is_told_with_the_finish(model: Path) -> None:
    ids = expected_ids([1, 2], 5, 10, VOCAB)
    async with bench(model) as b:
        told = await b.frontend.run([1, 2], seed=5, max_tokens=10, stop_ids=[ids[4], 511])
        assert told.finished is not None
        assert (told.finished.reason, told.finished.stop_id) == (STOP, ids[4])
        assert told.ids == ids[: ids.index(ids[4]) + 1]


async def test_min_tokens_and_stop_ids_reach_the_executor(model: Path) -> None:
    async with bench(model) as b:
        told = await b.frontend.run([1, 2], max_tokens=6, min_tokens=4, stop_ids=range(300))
        assert len(told.ids) > 4
        assert all(token_id >= 300 for token_id in told.ids[:4])
        assert told.ids[-1] < 300 or len(told.ids) == 6


async def test_sampling_and_seed_reach_the_executor_unread(model: Path) -> None:
    sampling = generation_pb2.Sampling(temperature=0.5, top_k=-1, min_p=0.25, logit_bias={7: -3.0})
    async with bench(model) as b:
        await b.frontend.run([1, 2], sampling=sampling, seed=2**64 - 1)
        (started,) = b.stub.plans[0].started
        assert started.sampling == sampling
        assert started.seed == 2**64 - 1
        assert not started.HasField("logprobs")


async def test_logprobs_are_told_of_those_who_asked(model: Path) -> None:
    async with bench(model) as b:
        b.stub.hold()
        asked = await b.frontend.submit([1], logprobs=0, max_tokens=5)
        silent = await b.frontend.submit([2], max_tokens=5)
        also = await b.frontend.submit([3], logprobs=0, max_tokens=3)
        await b.frontend.synced()
        b.stub.release()
        await finished(asked, silent, also)
        assert silent.logprobs == []
        for mine in (asked, also):
            assert mine.logprobs == [own_logprob(token_id) for token_id in mine.ids]


# -- the hellos


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"min_version": 2, "max_version": 3}, "speaks versions 2 to 3, this scheduler 1"),
        ({"min_version": 0, "max_version": 0}, "speaks versions 0 to 0, this scheduler 1"),
        ({"tokenizer_hash": "feed"}, "tokenizer.json has hash feed"),
        ({"tokenizer_hash": ""}, "tokenizer.json has hash none"),
    ],
)
async def test_a_frontend_that_does_not_fit_is_refused(model: Path, hello: dict[str, Any], words: str) -> None:
    async with bench(model) as b, Frontend(b.server, **hello) as stranger:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await stranger.greeted()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await b.frontend.run([1])).finished


async def test_versions_of_a_range_that_holds_ours_are_served(model: Path) -> None:
    async with bench(model) as b, Frontend(b.server, min_version=0, max_version=9) as newer:
        assert (await newer.greeted()).version == 1


async def test_the_hello_comes_first_and_once(model: Path) -> None:
    async with bench(model) as b:
        async with Frontend(b.server) as twice:
            await twice.send(hello=engine_pb2.FrontendHello(min_version=1, max_version=1))
            await until(lambda: twice.ended is not None)
            assert twice.ended.code() is grpc.StatusCode.INVALID_ARGUMENT
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{b.server.server.port}")
        call = engine_pb2_grpc.EngineServiceStub(channel).Attach()
        await call.write(engine_pb2.AttachRequest(ping=engine_pb2.Ping(sent_unix_ns=1)))
        with pytest.raises(grpc.aio.AioRpcError, match="must be the first message"):
            await call.read()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()


# -- heartbeats


async def test_a_ping_is_answered_with_its_own_time_and_the_engines_state(model: Path) -> None:
    async with bench(model, max_num_seqs=1) as b:
        b.stub.hold()
        running = await b.frontend.submit([1] * 20, max_tokens=4)
        waiting = await b.frontend.submit([2] * 33, max_tokens=1)
        await b.stub.plan_arrived(1)
        beat = await b.frontend.synced()
        assert (beat.state, beat.running_requests, beat.waiting_requests) == (SERVING, 1, 1)
        assert beat.waiting_tokens == 33
        assert (beat.total_blocks, beat.free_blocks) == (b.total_blocks, b.total_blocks - 2)
        assert not beat.HasField("since_token_ms")
        assert beat.epoch == b.stub.epochs[0]
        b.stub.release()
        await finished(running, waiting)
        beat = await b.frontend.synced()
        assert beat.HasField("since_token_ms")
        assert beat.output_tokens_per_s > 0 and beat.prompt_tokens_per_s > 0
        assert beat.step >= 5


async def test_heartbeats_come_each_second(model: Path) -> None:
    async with bench(model) as b:
        await until(lambda: len(b.frontend.heartbeats) >= 3, timeout_s=6)
        sent = [beat.sent_unix_ns for beat in b.frontend.heartbeats[-2:]]
        assert 0.5e9 < sent[1] - sent[0] < 3e9


# -- the door


Resumed = engine_pb2.Submit.Resumed

UNSERVED = {
    "grammar": generation_pb2.Grammar(regex="a"),
    "adapter": "a",
}


@pytest.mark.parametrize("field", sorted(UNSERVED))
async def test_a_field_that_is_not_served_fails_its_request_alone(model: Path, field: str) -> None:
    async with bench(model) as b:
        told = await b.frontend.run([1], **{field: UNSERVED[field]})
        assert told.code is grpc.StatusCode.UNIMPLEMENTED
        assert told.failed is not None and field in told.failed.message and told.failed.reason == "FIELD_NOT_SERVED"
        assert (await b.frontend.run([1])).finished


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [512]}, "prompt_ids: holds id 512, the vocabulary has 512"),
        ({"prompt": [2**32 - 1]}, "the vocabulary has 512"),
        ({"prompt": []}, "at least 1 of each"),
        ({"max_tokens": 0}, "at least 1 of each"),
        ({"stop_ids": [512]}, "stop_ids: holds id 512"),
        ({"logprobs": 21}, "logprobs: is 21, at most 20 are taken here (the scheduler's --max-logprobs)"),
        ({"prompt_logprobs": 2**32 - 1}, "prompt_logprobs: is 4294967295, at most 20 are taken"),
        (
            {"sampling": generation_pb2.Sampling(allowed_token_ids=[1, 512])},
            "sampling.allowed_token_ids[1]: is 512; ids lie below the vocabulary size, 512",
        ),
        (
            {"sampling": generation_pb2.Sampling(banned_token_ids=range(512))},
            "sampling.banned_token_ids: leaves no id to draw",
        ),
        (
            {"sampling": generation_pb2.Sampling(banned_token_ids=[1] * 513)},
            "sampling.banned_token_ids: has 513 ids, the vocabulary 512",
        ),
        (
            {"sampling": generation_pb2.Sampling(temperature=1000.0)},
            "sampling.temperature: is 1000, not in [0, 100]",
        ),
        ({"sampling": generation_pb2.Sampling(top_k=-2)}, "sampling.top_k: is -2"),
        ({"sampling": generation_pb2.Sampling(top_p=float("nan"))}, "sampling.top_p: is nan"),
        (
            {"sampling": generation_pb2.Sampling(logit_bias={512: 1.0})},
            "sampling.logit_bias[512]: ids lie below",
        ),
        ({"sampling": generation_pb2.Sampling(logit_bias={5: float("nan")})}, "sampling.logit_bias[5]: is nan"),
        ({"min_tokens": 9}, "min_tokens: is 9, more than max_tokens 8"),
        ({"num_choices": 0}, "num_choices: is 0"),
        ({"num_choices": 17}, "num_choices: is 17, the limit is --max-choices 16"),
        ({"num_choices": 2**32 - 1}, "the limit is --max-choices 16"),
        ({"request_id": 2**64 - 1, "num_choices": 2}, "request_id: is 18446744073709551615, the last of its 2 choices"),
        ({"priority": 1001}, "priority: is 1001, not in [-1000, 1000]"),
        ({"priority": -1001}, "priority: is -1001"),
        ({"tenant": "é" * 65}, "tenant: has 130 bytes, the limit is 128"),
        ({"root_digest": b"x" * 31}, "root_digest: has 31 bytes; a digest has 32"),
        ({"block_digests": b"x" * 32}, "root_digest: has 0 bytes"),
        (
            {"prompt": [1] * 33, "root_digest": b"x" * 32, "block_digests": b"x" * 96},
            "block_digests: has 96 bytes; the prompt fills 2 blocks of 16 tokens, whose digests have 64",
        ),
        ({"resumed": [Resumed(choice=1)]}, "resumed[0].choice: is 1; the request has the choices [0, 1)"),
        ({"resumed": [Resumed(), Resumed()]}, "resumed[1].choice: is 0 for a second time"),
        ({"resumed": [Resumed(token_ids=b"abc")]}, "resumed[0].token_ids: has 3 bytes; a column of ids has 4 an id"),
        ({"resumed": [Resumed(token_ids=ids_column([512]))]}, "resumed[0].token_ids: holds id 512, the vocabulary"),
        (
            {"resumed": [Resumed(token_ids=ids_column([5] * 8))]},
            "resumed[0].token_ids: has 8 ids, max_tokens is 8; it has ended",
        ),
        ({"resumed": [Resumed()], "prompt_logprobs": 0}, "prompt_logprobs: is for choices from their start"),
        ({"prompt": [1] * 1020}, "prompt has 1020 tokens and max_tokens is 8, the context holds 1024"),
        ({"max_tokens": 2**32 - 1}, "the context holds 1024"),
    ],
)
async def test_bad_values_fail_their_request_alone(model: Path, fields: dict[str, Any], words: str) -> None:
    async with bench(model, stub=StubExecutor(kv_bytes=1 << 20)) as b:
        prompt = fields.pop("prompt", [1])
        told = await b.frontend.run(prompt, **fields)
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT
        assert told.failed is not None and words in told.failed.message
        assert (await b.frontend.run([1])).finished


async def test_a_column_of_the_wrong_width_is_refused(model: Path) -> None:
    async with bench(model) as b:
        told = b.frontend.told[77] = Told()
        await b.frontend.send(submit=engine_pb2.Submit(request_id=77, num_choices=1, max_tokens=1, prompt_ids=b"abc"))
        await finished(told)
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT
        async with Frontend(b.server) as other:
            await other.send(abort=engine_pb2.Abort(request_ids=b"1234"))
            await until(lambda: other.ended is not None)
            assert other.ended.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_field_number_that_is_not_known_is_refused(model: Path) -> None:
    async with bench(model) as b:
        plain = engine_pb2.Submit(request_id=6, num_choices=1, prompt_ids=ids_column([1]), max_tokens=1)
        extended = engine_pb2.Submit.FromString(plain.SerializeToString() + b"\xfa\x07\x01x")  # field 127
        told = b.frontend.told[6] = Told()
        await b.frontend.send(submit=extended)
        await finished(told)
        assert told.code is grpc.StatusCode.UNIMPLEMENTED
        assert told.failed is not None and "127" in told.failed.message


async def test_an_id_used_twice_has_one_end(model: Path) -> None:
    async with bench(model) as b:
        b.stub.hold()
        first = await b.frontend.submit([1], request_id=3, max_tokens=50)
        await b.stub.plan_arrived(1)
        second = await b.frontend.submit([2], request_id=3)
        await finished(second)
        assert second.code is grpc.StatusCode.INVALID_ARGUMENT
        b.stub.release()
        await b.idle()
        assert second.after_end == 0 and not first.ids


async def test_a_full_queue_refuses_at_once(model: Path) -> None:
    async with bench(model, max_num_seqs=1, max_waiting_requests=1) as b:
        b.stub.hold()
        told = [await b.frontend.submit([n + 1]) for n in range(3)]
        await finished(told[2])
        assert told[2].code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert told[2].failed is not None and "--max-waiting-requests 1" in told[2].failed.message
        b.stub.release()
        await finished(*told[:2])
        assert all(mine.finished for mine in told[:2])


# -- ends


@pytest.mark.parametrize("where", ["waiting", "running"])
async def test_a_deadline_ends_a_request(model: Path, where: str) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.005), max_num_seqs=1) as b:
        ahead = await b.frontend.submit([1], max_tokens=500) if where == "waiting" else None
        began_s = time.monotonic()
        told = await b.frontend.run([2], max_tokens=900, timeout_ms=150)
        assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.14 < time.monotonic() - began_s < 1.5
        assert bool(told.ids) == (where == "running")
        if ahead is not None:
            assert not ahead.done.is_set()
            await b.frontend.abort(1)
        await b.idle()


async def test_a_deadline_that_has_passed_already_ends_a_request_unstarted(model: Path) -> None:
    async with bench(model) as b:
        told = await b.frontend.run([2], timeout_ms=0)
        assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
        forever = await b.frontend.run([2], timeout_ms=2**63)
        assert forever.finished


async def test_the_end_of_a_stream_ends_its_requests_and_no_others(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.005)) as b:
        other = await b.frontend.submit([1], max_tokens=60)
        async with Frontend(b.server) as leaving:
            told = [await leaving.submit([n + 2] * 9, max_tokens=900) for n in range(5)]
            await told[0].first.wait()
        await until(lambda: b.server.engine.core.num_requests <= 1)
        await finished(other)
        assert other.finished
        await b.idle()


async def test_a_half_closed_stream_ends_its_requests_and_itself(model: Path) -> None:
    async with bench(model) as b, Frontend(b.server) as leaving:
        b.stub.hold()
        await leaving.submit([1], max_tokens=900)
        await b.stub.plan_arrived(1)
        await leaving.call.done_writing()
        assert await leaving.call.code() is grpc.StatusCode.OK
        b.stub.release()
        await b.idle()


# -- slow readers


async def test_outputs_for_a_slow_reader_merge_and_lose_nothing(model: Path) -> None:
    async with bench(model, num_kv_blocks=1000, max_num_seqs=64) as b, Frontend(b.server, window_bytes=4096) as slow:
        await slow.greeted()
        slow.pause()
        told = [await slow.submit([n + 1], max_tokens=800, seed=n, logprobs=n % 3) for n in range(15)]
        quick = await b.frontend.run([1, 2, 3], max_tokens=800)
        assert quick.finished
        await until(lambda: b.server.engine.core.num_requests == 0, timeout_s=60)
        messages = len(b.frontend.outputs)
        slow.resume()
        await finished(*told)
        for n, mine in enumerate(told):
            assert mine.ids == expected_ids([n + 1], n, 800, VOCAB)
            assert mine.logprobs == [own_logprob(token_id) for token_id in mine.ids]
            assert mine.tops == [alternatives(token_id, n % 3) for token_id in mine.ids]
        assert len(slow.outputs) < messages  # its messages hold several steps
        counts = [np.frombuffer(outputs.token_counts, dtype="<u4") for outputs in slow.outputs]
        assert max(int(column.max()) for column in counts if len(column)) > 1


async def test_a_frontend_that_never_reads_is_cut_and_others_go_on(model: Path) -> None:
    async with bench(model, max_pending_bytes=20_000) as b, Frontend(b.server, window_bytes=4096) as slow:
        await slow.greeted()
        slow.pause()
        for n in range(60):
            await slow.submit([n + 1], max_tokens=900, logprobs=0)
        await until(lambda: b.server.engine.num_frontends == 1, timeout_s=60)
        assert b.server.engine.core.num_requests == 0
        await slow.submit([7, 7, 7])  # it does not know yet; nothing may run for it
        assert (await b.frontend.run([1])).finished
        slow.resume()
        await until(lambda: slow.ended is not None)
        assert slow.ended.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "reads too slowly" in slow.ended.details()
        assert all(start.token_ids != ids_column([7, 7, 7]) for plan in b.stub.plans for start in plan.started)


async def test_a_frontend_that_dies_while_a_write_to_it_waits_ends_its_requests(model: Path) -> None:
    async with bench(model, num_kv_blocks=1000) as b:
        async with Frontend(b.server, window_bytes=4096) as slow:
            await slow.greeted()
            slow.pause()
            for n in range(60):
                await slow.submit([n + 1], max_tokens=900, logprobs=0)
            # What fits into the transport is far less than 60 x 900 ids; by now a write waits.
            await until(lambda: b.server.engine.core.applied_step > 700, timeout_s=60)
            b.stub.hold()
        await until(lambda: b.server.engine.num_frontends == 1, timeout_s=5)
        b.stub.release()
        await b.idle()


async def test_an_idle_engine_uses_no_cpu(model: Path) -> None:
    async with bench(model) as b:
        await b.frontend.run([1])
        await b.idle()
        began_s = time.process_time()
        await asyncio.sleep(2)
        # Two heartbeats each way, and nothing else: a busy loop would take 2 s.
        assert time.process_time() - began_s < 0.2


async def test_executor_learns_of_freed_slots_without_further_work(model: Path) -> None:
    async with bench(model) as b:
        await b.frontend.run([1], max_tokens=1)
        await until_idle(b.server)
        plan = b.stub.plans[-1]
        assert plan.freed_slots == ids_column([0]) and not plan.slots


async def test_a_trace_context_is_taken_and_listed_as_a_feature(model: Path) -> None:
    async with bench(model) as b:
        assert "trace-context" in b.frontend.hello.features
        parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        assert (await b.frontend.run([1], traceparent=parent, tracestate="a=b")).finished
