"""What goes down the Attach stream: large Submits in pieces, small messages between them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from triptych.engine.v1 import engine_pb2

from services.frontend import engine_wire
from services.frontend.outgoing import Outgoing
from tests.frontend.harness import scripted, serving
from tests.support.calls import by_ids, generate, greedy


def submit(request_id: int, num_ids: int) -> engine_pb2.AttachRequest:
    return engine_pb2.AttachRequest(submit=engine_pb2.Submit(request_id=request_id, prompt_ids=bytes(4 * num_ids)))


async def taken(outgoing: Outgoing) -> list[engine_pb2.AttachRequest]:
    """All that waits."""
    found = []
    while outgoing._small or outgoing._large:
        found.append(await outgoing.take())
    return found


def kinds(messages: list[engine_pb2.AttachRequest]) -> list[str]:
    return [str(message.WhichOneof("message")) for message in messages]


async def test_a_submit_over_the_limit_goes_in_pieces_that_make_the_whole() -> None:
    outgoing = Outgoing()
    large = submit(5, 1000)
    for fragment_bytes, pieces in ((0, 0), (large.submit.ByteSize(), 0), (large.submit.ByteSize() - 1, 2), (100, 41)):
        outgoing.fragment_bytes = fragment_bytes
        outgoing.put(large)
        messages = await taken(outgoing)
        if not pieces:
            assert messages == [large]
            continue
        assert kinds(messages) == ["fragment"] * pieces
        fragments = [message.fragment for message in messages]
        assert {fragment.request_id for fragment in fragments} == {5}
        assert [fragment.total_bytes for fragment in fragments] == [large.submit.ByteSize()] + [0] * (pieces - 1)
        assert max(len(fragment.data) for fragment in fragments) <= fragment_bytes
        whole = engine_pb2.Submit.FromString(b"".join(fragment.data for fragment in fragments))
        assert whole == large.submit


async def test_small_messages_and_pieces_take_turns_and_large_ones_go_one_after_the_other() -> None:
    outgoing = Outgoing()
    outgoing.fragment_bytes = 1000
    outgoing.put(submit(1, 600))
    outgoing.put(submit(2, 600))
    for request_id in (3, 4):
        outgoing.put(submit(request_id, 1))
    messages = await taken(outgoing)
    assert kinds(messages) == [
        "submit",
        "fragment",
        "submit",
        "fragment",
        "fragment",
        "fragment",
        "fragment",
        "fragment",
    ]
    assert [m.fragment.request_id for m in messages if m.HasField("fragment")] == [1, 1, 1, 2, 2, 2]


async def test_what_is_dropped_goes_no_further_whether_it_had_begun_or_not() -> None:
    outgoing = Outgoing()
    outgoing.fragment_bytes = 1000
    for request_id in (1, 2, 3):
        outgoing.put(submit(request_id, 600))
    assert (await outgoing.take()).fragment.total_bytes > 2400
    outgoing.drop([1, 2])
    outgoing.put(engine_wire.abort([1, 2]))
    messages = await taken(outgoing)
    assert kinds(messages) == ["abort", "fragment", "fragment", "fragment"]
    assert {m.fragment.request_id for m in messages[1:]} == {3}


async def test_a_message_that_comes_later_wakes_the_writer() -> None:
    outgoing = Outgoing()
    waiting = asyncio.ensure_future(outgoing.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outgoing.put(engine_wire.abort([7]))
    assert (await waiting).WhichOneof("message") == "abort"


@pytest.mark.parametrize("length", [50, 5000])
async def test_a_long_prompt_reaches_the_engine_in_pieces_of_the_size_that_its_hello_says(
    text_model: Path, length: int
) -> None:
    engine = scripted([50], context_tokens=8192, fragment_bytes=4096)
    async with serving(text_model, engine) as served:
        prompt = [7 + i % 400 for i in range(length)]
        assert (await generate(served.channel, by_ids(prompt, greedy(max_tokens=2)))).ids == [50, 50]
        assert engine.prompts == [tuple(prompt)]
        sizes = [len(fragment.data) for fragment in engine.fragments]
        assert max(sizes, default=0) <= 4096 and bool(sizes) == (4 * length > 4096)
        assert [f.total_bytes > 0 for f in engine.fragments] == [True] + [False] * (len(sizes) - 1) if sizes else True
