"""What a step says, split by frontend, merged for a slow one, and the outbox it waits in."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from triptych.engine.v1 import engine_pb2

from services.common.errors import RequestError
from services.scheduler.core.request import Failure, FailureKind, RequestKey
from services.scheduler.core.step import Updates
from services.scheduler.outbox import MAX_PENDING_ANSWERS, Outbox
from services.scheduler.outputs import Outputs, encode, merge, split
from services.scheduler.plan_codec import Logprob


def numbers(data: bytes, dtype: str = "<u4") -> list[Any]:
    return np.frombuffer(data, dtype=dtype).tolist()


def test_a_step_is_split_by_frontend_with_the_logprobs_of_those_who_asked() -> None:
    updates = Updates(
        step=9,
        keys=[RequestKey(1, 5), RequestKey(2, 5), RequestKey(1, 6)],
        counts=[1, 1, 1],
        token_ids=[10, 20, 30],
        places=[0, 2, 3],  # place 1 was of a request that has ended
        failed=[Failure(RequestKey(2, 7), FailureKind.DEADLINE, "late")],
    )
    logprobs = {1: Logprob(-9, 9), 2: Logprob(-0.5, 2, b"abcd", b"efgh"), 3: Logprob(-0.25, 1)}
    shares = split(updates, logprobs)
    assert sorted(shares) == [1, 2]
    assert (shares[1].request_ids, shares[1].token_ids) == ([5, 6], [10, 30])
    assert (shares[1].places, shares[1].logprobs) == ([1], [logprobs[3]])
    assert (shares[2].token_ids, shares[2].places, shares[2].logprobs) == ([20], [0], [logprobs[2]])
    assert [failed.request_id for failed in shares[2].failed] == [7]


def test_columns_are_left_out_where_the_contract_lets_them() -> None:
    one_each = Outputs(3, [7, 2**40], [1, 1], [4, 5], [0, 1], [Logprob(-1.0, 1), Logprob(-2.0, 3)])
    message = encode(one_each).outputs
    assert numbers(message.request_ids, "<u8") == [7, 2**40]
    assert message.token_counts == b"" and numbers(message.token_ids) == [4, 5]
    assert message.logprobs.places == b"" and numbers(message.logprobs.logprobs, "<f4") == [-1.0, -2.0]
    assert not message.logprobs.top_counts and not message.logprobs.top_ids
    several = Outputs(3, [7, 8], [2, 1], [4, 5, 6], [1], [Logprob(-1.0, 1)])
    message = encode(several).outputs
    assert numbers(message.token_counts) == [2, 1]
    assert numbers(message.logprobs.places) == [1]
    assert not encode(Outputs(3)).outputs.HasField("logprobs")
    two = Logprob(-1.0, 1, np.uint32([8, 9]).tobytes(), np.float32([-0.5, -0.75]).tobytes())
    uneven = Outputs(3, [7, 8], [2, 1], [4, 5, 6], [0, 2], [two, Logprob(-3.0, 2)])
    message = encode(uneven).outputs
    assert numbers(message.logprobs.places) == [0, 2] and numbers(message.logprobs.top_counts) == [2, 0]
    assert numbers(message.logprobs.top_ids) == [8, 9] and numbers(message.logprobs.top_logprobs, "<f4") == [
        -0.5,
        -0.75,
    ]
    assert uneven.size_bytes - Outputs(3, [7, 8], [2, 1], [4, 5, 6]).size_bytes == 2 * 12 + 4 + 16


steps = st.lists(st.dictionaries(st.integers(1, 5), st.lists(st.integers(0, 99), min_size=1, max_size=3)), max_size=6)


@given(steps=steps.filter(bool), seed=st.integers(0, 9))
def test_merged_outputs_say_of_each_choice_what_the_steps_said(steps: list[dict[int, list[int]]], seed: int) -> None:
    rng = random.Random(seed)
    shares = []
    expected: dict[int, list[tuple[int, float | None]]] = {}
    for number, step in enumerate(steps):
        share = Outputs(number)
        for request_id, ids in step.items():
            share.request_ids.append(request_id)
            share.counts.append(len(ids))
            for token_id in ids:
                logprob = -float(rng.randint(0, 50)) if request_id % 2 else None
                if logprob is not None:
                    share.places.append(len(share.token_ids))
                    share.logprobs.append(Logprob(logprob, token_id + 1))
                share.token_ids.append(token_id)
                expected.setdefault(request_id, []).append((token_id, logprob))
        share.finished.append(engine_pb2.Finished(request_id=number))
        shares.append(share)
    merged = merge(shares)
    assert merged.step == len(steps) - 1
    assert [end.request_id for end in merged.finished] == list(range(len(steps)))
    marks = dict(zip(merged.places, merged.logprobs, strict=True))
    found: dict[int, list[tuple[int, float | None]]] = {}
    at = 0
    for request_id, count in zip(merged.request_ids, merged.counts, strict=True):
        assert request_id not in found
        found[request_id] = []
        for place in range(at, at + count):
            own = marks.get(place)
            assert own is None or own.rank == merged.token_ids[place] + 1
            found[request_id].append((merged.token_ids[place], None if own is None else own.logprob))
        at += count
    assert found == expected
    assert merged.places == sorted(merged.places)


async def test_an_outbox_gives_what_waits_as_one_message() -> None:
    outbox = Outbox()
    for step in range(3):
        outbox.put_outputs(Outputs(step, [1], [1], [step + 50]))
    message = await outbox.take()
    assert message is not None and numbers(message.outputs.token_ids) == [50, 51, 52]
    assert message.outputs.step == 2
    waiting = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put_outputs(Outputs(3, [1], [1], [53]))
    message = await waiting
    assert message is not None and numbers(message.outputs.token_ids) == [53]


async def test_an_outbox_over_its_limit_closes_itself_and_drops_what_waits() -> None:
    outbox = Outbox(max_pending_bytes=100)
    outbox.put_outputs(Outputs(1, [1], [1], [5]))
    assert not outbox.is_closed
    outbox.put_outputs(Outputs(2, list(range(20)), [1] * 20, [5] * 20))
    assert outbox.is_closed
    with pytest.raises(RequestError, match="reads too slowly: 336 bytes of outputs wait for it, the limit is 100"):
        await outbox.take()  # 21 ids and choices of 16 bytes


async def test_what_was_taken_does_not_count_towards_the_limit() -> None:
    outbox = Outbox(max_pending_bytes=100)
    for step in range(50):
        outbox.put_outputs(Outputs(step, [1], [1], [5]))
        assert await outbox.take() is not None
    assert not outbox.is_closed


async def test_heartbeats_go_first_and_the_newest_replaces_the_one_that_waits() -> None:
    outbox = Outbox()
    outbox.put_outputs(Outputs(1, [1], [1], [5]))
    for sent in (1, 2):
        outbox.put_heartbeat(engine_pb2.Heartbeat(sent_unix_ns=sent))
    outbox.put_heartbeat(engine_pb2.Heartbeat(sent_unix_ns=3, ping_unix_ns=33))
    outbox.put_hello(engine_pb2.EngineHello(version=1))
    taken = [await outbox.take() for _ in range(4)]
    kinds = [message.WhichOneof("message") for message in taken if message]
    assert kinds == ["hello", "heartbeat", "heartbeat", "outputs"]
    assert [message.heartbeat.sent_unix_ns for message in taken[1:3] if message] == [3, 2]


async def test_a_frontend_that_pings_and_never_reads_is_cut() -> None:
    outbox = Outbox()
    for ping in range(MAX_PENDING_ANSWERS + 1):
        assert not outbox.is_closed
        outbox.put_heartbeat(engine_pb2.Heartbeat(ping_unix_ns=ping))
    with pytest.raises(RequestError, match="65 answers to its pings"):
        await outbox.take()


async def test_a_closed_outbox_takes_and_gives_nothing() -> None:
    outbox = Outbox()
    outbox.close()
    outbox.close(RequestError(None, "X", "the first close counts"))  # type: ignore[arg-type]
    outbox.put_outputs(Outputs(1, [1], [1], [5]))
    outbox.put_heartbeat(engine_pb2.Heartbeat())
    outbox.put_hello(engine_pb2.EngineHello())
    assert await outbox.take() is None
