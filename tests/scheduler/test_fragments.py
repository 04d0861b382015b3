"""A Submit in pieces: put together beside others, dropped by an Abort, refused by its size at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest.stub_batch import expected_ids
from services.common.errors import RequestError
from services.scheduler.fragments import FRAGMENT_BYTES, MAX_HALF_SENT_BYTES, HalfSent
from tests.support.attached import Bench, Told, bench, finished, ids_column, until

LIMIT = 10_000


def whole(request_id: int, prompt: Sequence[int], **fields: Any) -> engine_pb2.Submit:
    return engine_pb2.Submit(
        **{"num_choices": 1, "max_tokens": 3, "seed": request_id, **fields},
        request_id=request_id,
        prompt_ids=ids_column(prompt),
    )


def pieces(submit: engine_pb2.Submit, size: int) -> list[engine_pb2.Fragment]:
    data = submit.SerializeToString()
    cut = [data[at : at + size] for at in range(0, len(data), size)]
    return [
        engine_pb2.Fragment(request_id=submit.request_id, total_bytes=0 if i else len(data), data=piece)
        for i, piece in enumerate(cut)
    ]


def piece(request_id: int, data: bytes, total_bytes: int = 0) -> engine_pb2.Fragment:
    return engine_pb2.Fragment(request_id=request_id, total_bytes=total_bytes, data=data)


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_pieces_of_any_size_become_the_whole(size: int) -> None:
    half = HalfSent()
    submit = whole(1, range(50))
    *first, last = pieces(submit, size)
    assert all(half.add(part, lambda: LIMIT) is None for part in first)
    assert half.add(last, lambda: LIMIT) == submit
    assert len(half) == 0


def test_two_requests_whose_pieces_alternate_both_arrive() -> None:
    half = HalfSent()
    one, other = whole(1, range(30)), whole(2, range(30, 60))
    told = [
        half.add(part, lambda: LIMIT) for pair in zip(pieces(one, 9), pieces(other, 9), strict=True) for part in pair
    ]
    assert [submit for submit in told if submit is not None] == [one, other]
    assert told[-2:] == [one, other]


def test_pieces_of_what_was_dropped_are_ignored_and_its_room_is_free_again() -> None:
    half = HalfSent()
    for request_id in range(200):
        first, second, *_ = pieces(whole(request_id, range(50)), 9)
        half.add(first, lambda: LIMIT)
        half.drop([request_id, 999])
        assert half.add(second, lambda: LIMIT) is None and len(half) == 0
    half.add(piece(1, b"a", MAX_HALF_SENT_BYTES), lambda: MAX_HALF_SENT_BYTES)
    assert 1 in half


BROKEN: dict[str, tuple[list[engine_pb2.Fragment], str]] = {
    "too large": ([piece(1, b"a", LIMIT + 1)], f"total_bytes: is {LIMIT + 1}, no request that fits .* {LIMIT}"),
    "more than announced": ([piece(1, b"abc", 4), piece(1, b"de")], "5 bytes have come, total_bytes is 4"),
    "empty": ([piece(1, b"", 4)], "has 0 bytes"),
    "a long piece": ([piece(1, b"a" * (FRAGMENT_BYTES + 1), 1 << 20)], "has 262145 bytes, a piece has 1 to 262144"),
    "begun twice": ([piece(1, b"a", 4), piece(1, b"a", 4)], "half sent already"),
    "no Submit": ([piece(1, b"\xff" * 4, 4)], "is no Submit"),
    "of another": (pieces(whole(2, [1]), 1 << 10)[:1], "is 1, the Submit's own is 2"),
}
BROKEN["of another"][0][0].request_id = 1


@pytest.mark.parametrize("what", BROKEN)
def test_pieces_that_cannot_become_a_submit_are_refused(what: str) -> None:
    half = HalfSent()
    *before, last = BROKEN[what][0]
    limit = 1 << 21 if what == "a long piece" else LIMIT
    for part in before:
        half.add(part, lambda: limit)
    with pytest.raises(RequestError, match=BROKEN[what][1]) as caught:
        half.add(last, lambda: limit)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_half_sent_requests_together_are_bounded_but_one_of_the_largest_size_is_always_taken() -> None:
    half = HalfSent()
    huge = MAX_HALF_SENT_BYTES + 1
    half.add(piece(1, b"a", huge), lambda: huge)
    with pytest.raises(RequestError, match="half-sent requests are under way, 2 more") as caught:
        half.add(piece(2, b"a", 2), lambda: huge)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    half.drop([1])
    assert half.add(piece(2, b"a", 2), lambda: huge) is None


# -- through a real scheduler


async def send(b: Bench, *parts: engine_pb2.Fragment) -> None:
    for part in parts:
        b.frontend.told.setdefault(part.request_id, Told())
        await b.frontend.send(fragment=part)


async def test_a_request_in_pieces_runs_as_one_sent_whole_beside_other_messages(model: Path) -> None:
    async with bench(model) as b:
        assert (await b.frontend.greeted()).fragment_bytes == FRAGMENT_BYTES
        one, other = pieces(whole(901, range(40)), 30), pieces(whole(902, range(50)), 30)
        for parts in zip(one, other, strict=False):
            await send(b, *parts)
            assert (await b.frontend.run([1], max_tokens=1)).finished
        await send(b, *other[len(one) :])
        await finished(b.frontend.told[901], b.frontend.told[902])
        assert b.frontend.told[901].ids == expected_ids(range(40), 901, 3, 512)
        assert b.frontend.told[902].ids == expected_ids(range(50), 902, 3, 512)


async def test_an_abort_drops_what_was_half_sent(model: Path) -> None:
    async with bench(model) as b:
        first, *rest = pieces(whole(901, range(40)), 30)
        await send(b, first)
        await b.frontend.abort(901)
        await send(b, *rest)
        await b.frontend.synced()
        assert not b.frontend.told[901].done.is_set() and b.server.engine.core.num_requests == 0
        await send(b, *pieces(whole(902, range(40)), 30))
        await finished(b.frontend.told[902])


async def test_what_is_too_large_is_refused_with_its_first_piece_and_once(model: Path) -> None:
    """A context of 1,024 ids in blocks of 16: 4 KB of ids, 2 KB of digests and 1 MB for all else."""
    async with bench(model) as b:
        limit = 4 * 1024 + 32 * 64 + (1 << 20)
        await send(b, piece(901, b"a", limit + 1), piece(901, b"b"), piece(901, b"c"))
        told = b.frontend.told[901]
        await finished(told)
        await b.frontend.synced()
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT and told.after_end == 0
        assert told.failed is not None and told.failed.reason == "TOO_LONG"
        assert f"is {limit + 1}" in told.failed.message and str(limit) in told.failed.message
        assert (await b.frontend.run([1])).finished


async def test_a_refused_piece_ends_what_runs_under_its_id_and_a_submit_ends_what_is_half_sent(model: Path) -> None:
    async with bench(model) as b:
        b.stub.hold()
        running = await b.frontend.submit([1], request_id=901, max_tokens=50)
        await until(lambda: b.server.engine.core.num_running == 1)
        await send(b, piece(901, b"", 5))
        b.stub.release()
        await finished(running)
        assert running.failed is not None
        await send(b, piece(902, b"a", 5))
        twice = await b.frontend.submit([1], request_id=902)
        await finished(twice)
        assert twice.failed is not None and "half sent" in twice.failed.message
        await send(b, piece(902, b"b"))
        await b.frontend.synced()
        assert twice.after_end == 0


async def test_a_field_of_a_piece_that_is_not_known_is_refused(model: Path) -> None:
    async with bench(model) as b:
        unknown = piece(901, b"a", 5).SerializeToString() + b"\xa2\x06\x01x"  # field 100
        await send(b, engine_pb2.Fragment.FromString(unknown))
        await finished(b.frontend.told[901])
        assert b.frontend.told[901].code is grpc.StatusCode.UNIMPLEMENTED


async def test_pieces_are_refused_once_while_the_scheduler_drains(model: Path) -> None:
    async with bench(model) as b:
        parts = pieces(whole(901, range(40)), 30)
        b.server.engine._draining = True
        await send(b, *parts)
        await finished(b.frontend.told[901])
        await b.frontend.synced()
        assert b.frontend.told[901].code is grpc.StatusCode.UNAVAILABLE and b.frontend.told[901].after_end == 0
        b.server.engine._draining = False
