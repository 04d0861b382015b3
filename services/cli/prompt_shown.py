"""What `triptych generate` prints of a prompt: its text, and how likely the model finds each of its ids."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from services.cli.logprobs_shown import show_logprobs

if TYPE_CHECKING:
    from triptych_client import PositionLogprobs, Stream


def show_prompt(stream: Stream, *, scores: bool, text: bool) -> None:
    """To standard output: a line an id, then the text; to standard error: the sum over the ids."""
    if scores:
        show_logprobs(stream.prompt_logprobs, sys.stdout)
        print(_sum(stream.prompt_logprobs), file=sys.stderr, flush=True)
    if text and stream.prompt is not None:
        print(stream.prompt.text, end="", flush=True)


def _sum(entries: tuple[PositionLogprobs, ...]) -> str:
    logprobs = [entry.token.logprob for entry in entries if entry.token is not None]
    if not logprobs:
        return "[no prompt id has another before it]"
    mean = sum(logprobs) / len(logprobs)
    return (
        f"[{len(logprobs)} prompt ids scored, logprob {sum(logprobs):.4f}, perplexity {math.exp(min(-mean, 700)):.4g}]"
    )
