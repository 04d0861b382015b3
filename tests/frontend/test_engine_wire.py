"""The engine contract's messages, column by column."""

from __future__ import annotations

import math
from dataclasses import replace

import grpc
import numpy as np
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2

from services.frontend import engine_wire
from services.frontend.engine import BlockDigests, EngineFinish, Outputs, Submission
from services.frontend.engine_wire import EngineContractError
from services.frontend.request import Logprob, Sampling


def u4(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def u8(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def f4(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_a_submission_travels_whole_and_resolved() -> None:
    submission = Submission(
        prompt_ids=(1, 2, 70_000),
        sampling=Sampling(temperature=0.5, logit_bias=((3, -math.inf),)),
        seed=2**64 - 1,
        max_tokens=5,
        min_tokens=1,
        stop_ids=(2, 9),
        logprobs=0,
        arrived_unix_ns=123,
        timeout_ms=None,
    )
    submit = engine_wire.submit(7, submission).submit
    assert (submit.request_id, submit.num_choices, submit.prompt_ids) == (7, 1, u4(1, 2, 70_000))
    assert submit.stop_ids == u4(2, 9) and submit.seed == 2**64 - 1
    assert submit.HasField("logprobs") and not submit.HasField("timeout_ms")
    assert {field.name for field, _ in submit.sampling.ListFields()} == {
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    }
    assert submit.sampling.logit_bias[3] == -math.inf
    assert (submit.block_digests, submit.root_digest, submit.priority, submit.tenant) == (b"", b"", 0, "")
    shared = replace(submission, num_choices=3, priority=-5, tenant="t", digests=BlockDigests(b"r" * 32, b"b" * 64))
    submit = engine_wire.submit(7, shared).submit
    assert (submit.num_choices, submit.priority, submit.tenant) == (3, -5, "t")
    assert (submit.root_digest, submit.block_digests) == (b"r" * 32, b"b" * 64)
    assert engine_wire.abort(range(7, 10)).abort.request_ids == u8(7, 8, 9)
    assert engine_wire.abort([7]).abort.request_ids == u8(7)


def test_outputs_are_split_by_request() -> None:
    message = engine_pb2.StepOutputs(
        step=1,
        request_ids=u8(5, 2**40, 6),
        token_counts=u4(2, 1, 0),
        token_ids=u4(10, 11, 12),
        logprobs=generation_pb2.LogprobColumns(places=u4(2), logprobs=f4(-math.inf), ranks=u4(3)),
        started=[
            engine_pb2.Started(
                request_id=5, cached_tokens=16, queued_unix_ns=10**18, scheduled_unix_ns=10**18 + 25 * 10**7
            )
        ],
        finished=[
            engine_pb2.Finished(request_id=2**40, reason=generation_pb2.FINISH_REASON_STOP, stop_id=12),
            engine_pb2.Finished(request_id=8, reason=generation_pb2.FINISH_REASON_LENGTH),
        ],
    )
    assert engine_wire.read_outputs(message).outputs == {
        5: Outputs((10, 11), cached_tokens=16, queue_s=0.25),
        2**40: Outputs((12,), (Logprob(-9999.0, 3),), finish=EngineFinish("stop", 12)),
        6: Outputs(),
        8: Outputs(finish=EngineFinish("length", None)),
    }


def test_a_step_of_one_id_each_is_read_by_request_and_a_request_named_twice_keeps_both() -> None:
    length = generation_pb2.FINISH_REASON_LENGTH
    message = engine_pb2.StepOutputs(
        request_ids=u8(5, 2**40),
        token_ids=u4(10, 11),
        started=[engine_pb2.Started(request_id=5, cached_tokens=16)],
        finished=[engine_pb2.Finished(request_id=2**40, reason=length)],
    )
    assert engine_wire.read_outputs(message).outputs == {
        5: Outputs((10,), cached_tokens=16),
        2**40: Outputs((11,), finish=EngineFinish("length", None)),
    }
    twice = engine_pb2.StepOutputs(request_ids=u8(5, 6, 5), token_ids=u4(10, 11, 12))
    assert engine_wire.read_outputs(twice).outputs == {5: Outputs((10, 12)), 6: Outputs((11,))}


def test_empty_columns_mean_one_id_each_and_every_place() -> None:
    message = engine_pb2.StepOutputs(
        request_ids=u8(1, 2),
        token_ids=u4(10, 11),
        logprobs=generation_pb2.LogprobColumns(logprobs=f4(-0.5, -0.25), ranks=u4(1, 2)),
    )
    assert engine_wire.read_outputs(message).outputs == {
        1: Outputs((10,), (Logprob(-0.5, 1),)),
        2: Outputs((11,), (Logprob(-0.25, 2),)),
    }


@pytest.mark.parametrize(
    "message",
    [
        engine_pb2.StepOutputs(request_ids=u8(1), token_ids=u4(1, 2)),
        engine_pb2.StepOutputs(request_ids=u8(1), token_counts=u4(1, 1), token_ids=u4(1, 2)),
        engine_pb2.StepOutputs(request_ids=b"1234567"),
        engine_pb2.StepOutputs(finished=[engine_pb2.Finished(request_id=1)]),
        engine_pb2.StepOutputs(
            request_ids=u8(1),
            token_ids=u4(1),
            logprobs=generation_pb2.LogprobColumns(places=u4(1), logprobs=f4(0), ranks=u4(1)),
        ),
    ],
)
def test_columns_that_do_not_fit_each_other_are_a_breach(message: engine_pb2.StepOutputs) -> None:
    with pytest.raises(EngineContractError):
        engine_wire.read_outputs(message)


@pytest.mark.parametrize(
    ("failed", "code", "retry_after_s"),
    [
        (engine_pb2.Failed(code=3, reason="R", message="m"), grpc.StatusCode.INVALID_ARGUMENT, None),
        (engine_pb2.Failed(code=4), grpc.StatusCode.DEADLINE_EXCEEDED, None),
        (engine_pb2.Failed(code=8, retry_after_ms=250), grpc.StatusCode.RESOURCE_EXHAUSTED, 0.25),
        (engine_pb2.Failed(code=14), grpc.StatusCode.UNAVAILABLE, 1.0),
        (engine_pb2.Failed(code=0), grpc.StatusCode.INTERNAL, None),
        (engine_pb2.Failed(code=99), grpc.StatusCode.INTERNAL, None),
    ],
)
def test_failures_become_their_status(
    failed: engine_pb2.Failed, code: grpc.StatusCode, retry_after_s: float | None
) -> None:
    error = engine_wire.read_outputs(engine_pb2.StepOutputs(failed=[failed])).failures[0]
    assert (error.code, error.retry_after_s) == (code, retry_after_s)
    assert error.message and error.reason


def test_a_hello_of_another_version_is_a_breach() -> None:
    good = engine_pb2.EngineHello(version=1, vocab_size=10, context_tokens=20, fingerprint="f")
    assert engine_wire.read_hello(good).fingerprint == "f"
    with pytest.raises(EngineContractError, match="version 2"):
        engine_wire.read_hello(engine_pb2.EngineHello(version=2, vocab_size=10, context_tokens=20))
    with pytest.raises(EngineContractError, match="vocab_size 0"):
        engine_wire.read_hello(engine_pb2.EngineHello(version=1, context_tokens=20))
