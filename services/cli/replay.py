"""`triptych replay FILE`: runs the scheduler's core over a recording."""

from __future__ import annotations

from collections.abc import Sequence

from services.cli.parts import part


def run(arguments: Sequence[str]) -> int:
    """Exit code 1 where a plan does not come out as recorded."""
    module = part("services.scheduler.replay", extra="scheduler", what="the replay of a recording")
    result: int = module.main(arguments)
    return result
