"""W3C trace context: read from a call's metadata, and handed to an engine that takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.telemetry.context import MAX_TRACESTATE_BYTES
from services.frontend.trace_context import TraceContext, trace_context_of
from tests.frontend.harness import scripted, serving
from tests.support.calls import by_ids, generate, greedy

# Both examples are the standard's own (https://www.w3.org/TR/trace-context/#examples-of-http-traceparent-headers).
SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NOT_SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


class Call:
    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata


@pytest.mark.parametrize("parent", [SAMPLED, NOT_SAMPLED])
def test_a_valid_context_is_taken_as_it_is(parent: str) -> None:
    found = trace_context_of(Call(("traceparent", parent), ("tracestate", STATE), ("other", "x")))
    assert found == TraceContext(parent, STATE)


def test_states_in_several_headers_are_one_list() -> None:
    call = Call(("traceparent", SAMPLED), ("tracestate", "a=1"), ("tracestate", "b=2"))
    assert trace_context_of(call).tracestate == "a=1,b=2"


def test_a_later_version_is_read_as_this_one() -> None:
    later = "cc" + SAMPLED.removeprefix("00") + "-what-the-future-will-be-like"
    assert trace_context_of(Call(("traceparent", later))).traceparent == SAMPLED


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        SAMPLED.upper(),
        "ff" + SAMPLED.removeprefix("00"),
        SAMPLED + "-more",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        b"\xff",
    ],
)
def test_an_invalid_context_is_none_and_its_state_with_it(parent: str | bytes) -> None:
    assert trace_context_of(Call(("traceparent", parent), ("tracestate", STATE))) == TraceContext()


def test_two_parents_are_none() -> None:
    assert trace_context_of(Call(("traceparent", SAMPLED), ("traceparent", NOT_SAMPLED))) == TraceContext()


def test_a_state_that_is_too_long_is_left_out() -> None:
    call = Call(("traceparent", SAMPLED), ("tracestate", "a=" + "x" * MAX_TRACESTATE_BYTES))
    assert trace_context_of(call) == TraceContext(SAMPLED, "")


async def test_the_engine_is_told_the_trace_of_a_call_where_it_takes_one(text_model: Path) -> None:
    metadata = (("traceparent", SAMPLED), ("tracestate", STATE))
    for features, told in ((["trace-context"], (SAMPLED, STATE)), ([], ("", ""))):
        engine = scripted([50])
        engine.features = features
        async with serving(text_model, engine) as served:
            await generate(served.channel, by_ids([10], greedy(max_tokens=1)), metadata=metadata)
            await generate(served.channel, by_ids([10], greedy(max_tokens=1)))
        first, second = engine.submits
        assert (first.traceparent, first.tracestate) == told
        assert (second.traceparent, second.tracestate) == ("", "")
