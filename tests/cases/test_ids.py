"""Row S1: ids that a caller names, at both ends of every gap: below zero, past the tokenizer, past the model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from google.protobuf import json_format
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2, inference_pb2

from services.common import checkpoint
from services.common.errors import RequestError
from services.executor import loader
from services.executor.executor import Executor
from services.executor.plan import BadPlanError, Plan, Settings, Started
from services.executor.sampling_params import SamplingParams
from services.frontend import served_model
from services.scheduler import door
from tests.frontend.harness import VOCAB_SIZE, Served, fields_at_fault, scripted, serving, text_checkpoint
from tests.support.calls import EVERY_CALL, STREAM_AND_UNARY, ask, by_ids, by_text, generate, greedy, place
from tests.support.checkpoints import tiny_llama

PADDED = VOCAB_SIZE + 64
"""Rows of the head: 64 more than the tokenizer has ids, as heads are padded for the hardware's sake."""
OUTSIDE = (VOCAB_SIZE, PADDED - 1, PADDED, 2**31, 2**32 - 1)
Sampling = generation_pb2.Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("ids") / "tiny-text")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    async with serving(model, scripted([50], vocab_size=PADDED)) as served:
        yield served


@STREAM_AND_UNARY
@pytest.mark.parametrize("token_id", OUTSIDE)
async def test_S1_an_id_outside_the_tokenizer_is_refused_at_the_door_in_every_field(
    served: Served, token_id: int, rpc: str
) -> None:
    asked = [
        (by_ids([10, token_id], greedy()), "token_ids.ids[1]"),
        (by_ids([10], greedy(stop_token_ids=[7, token_id])), "options.stop_token_ids[1]"),
        (
            by_ids([10], inference_pb2.Options(sampling=Sampling(logit_bias={3: 1, token_id: 1}))),
            f"options.sampling.logit_bias[{token_id}]",
        ),
        *(
            (
                by_ids([10], inference_pb2.Options(sampling=Sampling(**{name: [3, token_id]}))),
                f"options.sampling.{name}[1]",
            )
            for name in ("allowed_token_ids", "banned_token_ids")
        ),
    ]
    neighbour = generate(served.channel, by_ids([10], greedy(max_tokens=5)))
    for request, field in asked:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, request, rpc=rpc)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_at_fault(caught.value) == [place(rpc, field)]
        assert str(VOCAB_SIZE) in (caught.value.details() or "")
    assert (await neighbour).ids == [50] * 5
    assert len(served.engine.submits) == 1
    last = VOCAB_SIZE - 1
    options = greedy(max_tokens=1, stop_token_ids=[last])
    options.sampling.logit_bias[last] = -1
    options.sampling.allowed_token_ids.extend([last, 3])
    options.sampling.banned_token_ids.append(3)
    assert (await generate(served.channel, by_ids([last], options), rpc=rpc)).ids == [50]
    assert (await served.stub.GetModel(inference_pb2.GetModelRequest())).model.vocab_size == VOCAB_SIZE


@STREAM_AND_UNARY
async def test_S1_text_that_a_tokenizer_larger_than_its_model_makes_ids_of_is_refused(model: Path, rpc: str) -> None:
    async with serving(model, scripted([50], vocab_size=400)) as served:
        text = served.decode([450])
        assert served.ids(text) == [450]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, by_text(f"1{text}", greedy()), rpc=rpc)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "400" in (caught.value.details() or "")
        assert fields_at_fault(caught.value) == [place(rpc, "text[1]")] and served.engine.submits == []


@EVERY_CALL
@pytest.mark.parametrize(
    ("sampling", "field", "says"),
    [
        (Sampling(allowed_token_ids=[5, 5]), "allowed_token_ids[1]", "once more"),
        (Sampling(banned_token_ids=[7, 5, 7]), "banned_token_ids[2]", "once more"),
        (Sampling(allowed_token_ids=[5], banned_token_ids=[5]), "allowed_token_ids", "leaves no id to draw"),
        (Sampling(allowed_token_ids=[5], logit_bias={5: -math.inf}), "allowed_token_ids", "leaves no id to draw"),
        (Sampling(allowed_token_ids=[9]), "allowed_token_ids", "leaves stop ids alone"),
    ],
)
async def test_S1_lists_that_repeat_an_id_or_leave_none_are_refused_at_the_door(
    served: Served, sampling: Sampling, field: str, says: str, rpc: str
) -> None:
    options = inference_pb2.Options(sampling=sampling, min_tokens=1, stop_token_ids=[9])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(served.channel, rpc, options)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and says in (caught.value.details() or "")
    assert fields_at_fault(caught.value) == [place(rpc, f"options.sampling.{field}")] and served.engine.submits == []


@pytest.mark.parametrize(
    "text",
    [
        '{"token_ids": {"ids": [-1]}}',
        '{"options": {"stop_token_ids": [-1]}}',
        '{"options": {"sampling": {"logit_bias": {"-1": 1}}}}',
        '{"token_ids": {"ids": [4294967296]}}',
    ],
)
def test_S1_a_negative_id_cannot_be_said(text: str) -> None:
    with pytest.raises(json_format.ParseError):
        json_format.Parse(text, inference_pb2.GenerateRequest())


def column(*ids: int) -> bytes:
    return np.array(ids, "<u4").tobytes()


@pytest.mark.parametrize("token_id", OUTSIDE)
def test_S1_the_scheduler_refuses_that_request_alone_so_that_no_epoch_is_lost(token_id: int) -> None:
    fields = {"num_choices": 1, "max_tokens": 1, "prompt_ids": column(1)}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt_ids": column(1, token_id)}, "prompt_ids"),
        ({"sampling": Sampling(logit_bias={1: 1, token_id: 1})}, f"sampling.logit_bias[{token_id}]"),
        ({"sampling": Sampling(allowed_token_ids=[1, token_id])}, "sampling.allowed_token_ids[1]"),
        ({"sampling": Sampling(banned_token_ids=[token_id])}, "sampling.banned_token_ids[0]"),
    ]
    if token_id >= PADDED:  # a checkpoint's own EOS may lie in the padding
        wrong.append(({"stop_ids": column(1, token_id)}, "stop_ids"))
    for change, field in wrong:
        with pytest.raises(RequestError) as caught:
            submit = engine_pb2.Submit(**(fields | change))
            door.read_submit(
                submit,
                1,
                0,
                vocab_size=PADDED,
                text_vocab_size=VOCAB_SIZE,
                block_tokens=16,
                max_choices=1,
                max_logprobs=20,
            )
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT and caught.value.violations[0].field == field


class Watched:
    """An executor on a padded checkpoint that keeps the bits of every row of logits it computes."""

    def __init__(self, path: Path) -> None:
        self.logits: list[bytes] = []
        self.executor = Executor(path, threads=1, kv_memory_bytes=1 << 20, load=self._load)
        settings = Settings(context_tokens=64, block_tokens=16, max_slots=4, max_step_tokens=64)
        assert self.executor.load(settings, torch.float32, "", lambda _: None).vocab_size == PADDED
        self.executor.allocate(9)
        self.logits.clear()  # the warm-up's

    def _load(
        self, path: Path, dtype: torch.dtype, report: loader.Report, expected_hash: str = ""
    ) -> loader.Checkpoint:
        found = loader.load(path, dtype, report, expected_hash)
        found.model.register_forward_hook(lambda _module, _args, output: self._keep(output.logits))
        return found

    def _keep(self, logits: torch.Tensor) -> None:
        self.logits.append(logits[0, 0].numpy().tobytes())

    def step(self, number: int, started: Sequence[Started] = (), slots: Sequence[int] = (0,), count: int = 1) -> None:
        none = np.zeros(0, np.int64)
        rows = np.array(slots, np.int64)
        counts = np.full(len(rows), count, np.int64)
        self.executor.execute(Plan(number, none, tuple(started), none.reshape(0, 2), rows, counts, None, None))


def started(slot: int, ids: Sequence[int], **sampling: Any) -> Started:
    params = SamplingParams(temperature=0.0, **sampling)
    return Started(slot, np.array(ids, np.uint32), len(ids), 0, np.array([slot + 1]), params)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_llama(tmp_path_factory.mktemp("padded") / "m", vocab_size=PADDED)
    assert checkpoint.tokenizer_size(path) == served_model.load(str(path), None).tokenizer.vocab_size == VOCAB_SIZE
    return path


def test_S1_the_executor_checks_again_and_a_neighbours_logits_stay_the_same_to_the_bit(padded: Path) -> None:
    alone, beside = Watched(padded), Watched(padded)
    wrong: list[Started] = []
    for token_id in OUTSIDE:
        wrong += [started(1, [5, token_id, 6]), started(1, [5], logit_bias=((3, 1.0), (token_id, 1.0)))]
        wrong += [started(1, [5], allowed_ids=(3, token_id)), started(1, [5], banned_ids=(token_id,))]
        if token_id >= PADDED:
            wrong.append(started(1, [5], stop_ids=(token_id,)))
    for number in range(1, 5):
        fresh, count = ([started(0, [5, 6, 7])], 3) if number == 1 else ([], 1)
        alone.step(number, fresh, count=count)
        for request in wrong:
            with pytest.raises(BadPlanError) as caught:
                beside.step(number, [*fresh, request], slots=(0, 1), count=1)
            assert caught.value.slots == (1,)
        beside.step(number, fresh, count=count)
    assert len(alone.logits) == 4 and len(set(alone.logits)) == 4
    assert beside.logits == alone.logits


def test_S1_an_id_of_the_padding_that_was_sampled_may_come_back_after_a_preemption(padded: Path) -> None:
    watched = Watched(padded)
    resumed = started(0, [5, 6, PADDED - 1])
    watched.step(1, [Started(0, resumed.token_ids, 2, 0, resumed.block_ids, resumed.sampling)], count=3)
    assert len(watched.logits) == 1


def test_S1_a_row_biased_at_the_last_id_leaves_its_neighbours_logits_alone(padded: Path) -> None:
    bits = []
    for bias in ((), ((VOCAB_SIZE - 1, 100.0), (0, -float("inf")))):
        watched = Watched(padded)
        watched.step(1, [started(0, [5, 6]), started(1, [8, 9], logit_bias=bias)], slots=(0, 1), count=2)
        watched.step(2, slots=(0, 1))
        bits.append(watched.logits)
    assert bits[0] == bits[1] and len(bits[0]) == 2
