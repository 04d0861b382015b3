"""What holds of every trace: the edges of a request's spans, and how they partition its SERVER span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loadtest.otlp_sink import SpanSeen

FRONTEND, SCHEDULER, EXECUTOR = "triptych-frontend", "triptych-scheduler", "triptych-executor"
PARTS = ("tokenize", "queue", "prefill", "decode", "delivery")
OWNERS = dict(zip(PARTS, (FRONTEND, SCHEDULER, SCHEDULER, SCHEDULER, FRONTEND), strict=True))

GAP_SHARE, GAP_NS = 0.02, 2_000_000
"""Of the SERVER span, the larger of the two may be in no part."""

CLOCK_NS = 1_000_000
"""What a time of another process may be off on one machine."""


def server(spans: Sequence[SpanSeen]) -> SpanSeen:
    """The one SERVER span."""
    (found,) = [span for span in spans if span.kind == "SERVER"]
    return found


def parts(spans: Sequence[SpanSeen]) -> dict[str, SpanSeen]:
    """Those that partition it, by name, each at most once."""
    found = [span for span in spans if span.name in PARTS]
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in sorted(found, key=lambda span: span.start_ns)}


def steps(spans: Sequence[SpanSeen], service: str) -> list[SpanSeen]:
    """Those of one service."""
    return [span for span in spans if span.name == "step" and span.service == service]


def attributes(spans: Sequence[SpanSeen], name: str, key: str) -> list[Any]:
    """The values of an attribute in all spans of a name."""
    return [span.attributes[key] for span in spans if span.name == name]


def has_ended(*names: str) -> Callable[[Sequence[SpanSeen]], bool]:
    """Whether the SERVER span has come, and these parts."""
    return lambda spans: {*names} <= {span.name for span in spans} and any(span.kind == "SERVER" for span in spans)


def check_partition(spans: Sequence[SpanSeen]) -> None:
    """Each part is of its owner, a child of the SERVER span and inside it, and together they leave hardly a gap."""
    whole, found = server(spans), parts(spans)
    for name, part in found.items():
        assert (part.service, part.kind) == (OWNERS[name], "INTERNAL")
        assert (part.trace_id, part.parent_id) == (whole.trace_id, whole.span_id)
        assert part.duration_ns >= 0
        assert whole.start_ns - CLOCK_NS <= part.start_ns and part.end_ns <= whole.end_ns + CLOCK_NS
    covered, at_ns = 0, whole.start_ns
    for part in found.values():
        start_ns, end_ns = max(part.start_ns, at_ns), min(part.end_ns, whole.end_ns)
        covered, at_ns = covered + max(0, end_ns - start_ns), max(at_ns, end_ns)
    gap_ns = whole.duration_ns - covered
    assert gap_ns <= max(GAP_SHARE * whole.duration_ns, GAP_NS), (gap_ns, whole.duration_ns, found)
