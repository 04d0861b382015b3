"""Between the engine's stream and a call: what is put in comes out when it is due, once, before what ended it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from services.common.errors import RequestError
from services.frontend import tokenizer
from services.frontend.answer import Answer
from services.frontend.engine import EngineFinish, Outputs
from services.frontend.request import EngineFacts, Hold, Job, Options, Sampling, Stopped
from tests.frontend.harness import VOCAB_SIZE


@pytest.fixture(scope="module")
def text(text_model: Path) -> tokenizer.TextTokenizer:
    return tokenizer.load(tokenizer.load_definition(text_model), text_model)


def answer(text: tokenizer.TextTokenizer, n: int = 1, hold: Hold | None = None, stop: tuple[str, ...] = ()) -> Answer:
    options = Options(Sampling(), seed=1, n=n, stop=stop, hold=hold or Hold())
    return Answer(Job((10,), options, 100, frozenset({2}), EngineFacts("e", "m", "f", VOCAB_SIZE, 1024)), text)


def ids(taken: list) -> list[tuple[int, tuple[int, ...]]]:  # type: ignore[type-arg]
    return [(index, delta.token_ids) for index, delta in taken]


async def test_outputs_of_a_slow_reader_are_joined_and_come_before_its_error(text: tokenizer.TextTokenizer) -> None:
    made = answer(text, n=2)
    assert not made.put(0, Outputs((50, 51), cached_tokens=3))
    made.put(1, Outputs((60,), cached_tokens=9))
    made.put(0, Outputs((52,)))
    made.fail(RequestError(grpc.StatusCode.INTERNAL, "FIRST", "first"))
    made.fail(RequestError(grpc.StatusCode.INTERNAL, "SECOND", "second"))
    assert ids(await made.take()) == [(0, (50, 51, 52)), (1, (60,))]
    assert made.cached_tokens == 3 and made.completion_tokens == 4
    for _ in range(2):
        with pytest.raises(RequestError, match="first"):
            await made.take()


async def test_more_than_may_wait_for_a_client_ends_the_request_and_frees_the_engine(
    text: tokenizer.TextTokenizer,
) -> None:
    options = Options(Sampling(), seed=1, n=2)
    job = Job((10,), options, 100, frozenset({2}), EngineFacts("e", "m", "f", VOCAB_SIZE, 1024))
    made = Answer(job, text, max_unread=4)
    made.put(0, Outputs((50, 51)))
    made.put(1, Outputs((60, 61)))
    assert not made.put(0, Outputs((52,)))  # one more than may wait
    assert made.put(0, Outputs((53,))) and made.put(1, Outputs((62,))), "the engine is told, choice by choice"
    assert ids(await made.take()) == [(0, (50, 51, 52)), (1, (60, 61))]
    with pytest.raises(RequestError, match=r"more than 4 ids.*max_unread_tokens"):
        await made.take()


async def test_what_a_client_wants_held_back_is_not_counted_against_it(text: tokenizer.TextTokenizer) -> None:
    options = Options(Sampling(), seed=1, hold=Hold(tokens=50))
    job = Job((10,), options, 100, frozenset({2}), EngineFacts("e", "m", "f", VOCAB_SIZE, 1024))
    made = Answer(job, text, max_unread=4)
    reading = asyncio.create_task(made.take())
    await asyncio.sleep(0)
    for token_id in range(10, 60):
        made.put(0, Outputs((token_id,)))
    assert ids(await reading) == [(0, tuple(range(10, 60)))]


async def test_a_choice_ends_by_the_engine_or_before_it(text: tokenizer.TextTokenizer) -> None:
    made = answer(text, n=2, stop=(text.decode([51], skip_special_tokens=True),))
    assert not made.put(0, Outputs((50, 2), finish=EngineFinish("stop", 2)))
    assert made.put(1, Outputs((50, 51, 52))), "the engine has to be told"
    assert not made.put(1, Outputs((53,))), "it was under way"
    assert not made.done
    taken = await made.take()
    assert ids(taken) == [(0, (50, 2)), (1, (50, 51))]
    assert taken[0][1].stopped == Stopped("stop", eos_token_id=2)
    assert made.done and made.completion_tokens == 4


@pytest.mark.parametrize("hold", [Hold(), Hold(tokens=50)])
async def test_what_is_wrong_with_an_output_is_raised_where_it_is_taken(
    text: tokenizer.TextTokenizer, hold: Hold
) -> None:
    made = answer(text, n=2, hold=hold)
    made.put(0, Outputs((50,)))
    assert not made.put(1, Outputs((VOCAB_SIZE,)))
    assert not made.put(0, Outputs((51,)))
    assert ids(await made.take()) == [(0, (50,))]
    with pytest.raises(RequestError, match=f"sampled id {VOCAB_SIZE}"):
        await made.take()


async def test_a_reader_that_waits_gets_the_first_delta_alone_and_then_what_came_before_it_ran(
    text: tokenizer.TextTokenizer,
) -> None:
    made = answer(text)
    reading = asyncio.create_task(made.take())
    await asyncio.sleep(0)
    for token_id in (50, 51):
        assert not made.put(0, Outputs((token_id,)))
    assert not made.put(0, Outputs((52,), finish=EngineFinish("length", None)))
    made.fail(RequestError(grpc.StatusCode.INTERNAL, "LOST", "lost"))
    assert ids(await reading) == [(0, (50,))] and not made.done
    ((_, rest),) = await made.take()
    assert rest.token_ids == (51, 52) and rest.stopped == Stopped("length")
    assert made.done
    with pytest.raises(RequestError, match="lost"):
        await made.take()


async def test_choices_of_one_step_share_a_message_though_the_reader_waits(text: tokenizer.TextTokenizer) -> None:
    made = answer(text, n=2)
    reading = asyncio.create_task(made.take())
    await asyncio.sleep(0)
    made.put(0, Outputs((50,)))
    made.put(1, Outputs((60,)))
    assert ids(await reading) == [(0, (50,)), (1, (60,))]


async def test_a_reader_is_woken_only_for_what_is_due(text: tokenizer.TextTokenizer) -> None:
    made = answer(text, hold=Hold(tokens=3))
    reading = asyncio.create_task(made.take())
    for token_id in (50, 51):
        made.put(0, Outputs((token_id,)))
        await asyncio.sleep(0.01)
        assert not reading.done()
    made.put(0, Outputs((52,)))
    assert ids(await reading) == [(0, (50, 51, 52))]


async def test_what_is_held_comes_at_its_time_and_no_timer_is_left(text: tokenizer.TextTokenizer) -> None:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    call_at = loop.call_at

    def kept(*arguments, **more):  # type: ignore[no-untyped-def]
        timers.append(call_at(*arguments, **more))
        return timers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_at", kept)
        made = answer(text, hold=Hold(interval_s=0.05))
        made.put(0, Outputs((50,)))
        first_s = loop.time()
        assert ids(await made.take()) == [(0, (50,))]
        reading = asyncio.create_task(made.take())  # sleeps before there is anything to be timed
        await asyncio.sleep(0)
        made.put(0, Outputs((51,)))
        made.put(0, Outputs((52,)))
        assert len(timers) == 1, "one for all that is held"
        assert ids(await reading) == [(0, (51, 52))] and loop.time() - first_s >= 0.05
        made.put(0, Outputs((53,)))
        left = asyncio.create_task(made.take())
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        made.close()
    assert len(timers) == 2 and timers[1].cancelled()
