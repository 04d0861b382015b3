"""What `triptych generate` prints of a prompt: its text, and how likely the model finds each of its ids."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych_client import PositionLogprobs, Stream


def show_prompt(stream: Stream, *, scores: bool, text: bool) -> None:
    """To standard output: a line an id, then the text; to standard error: the sum over the ids."""
    if scores:
        print(f"{'position':>8}  {'id':>7}  {'logprob':>10}  {'rank':>7}  bytes")
        for position, entry in enumerate(stream.prompt_logprobs):
            print(_line(position, entry))
        print(_sum(stream.prompt_logprobs), file=sys.stderr, flush=True)
    if text and stream.prompt is not None:
        print(stream.prompt.text, end="", flush=True)


def _line(position: int, entry: PositionLogprobs) -> str:
    token = entry.token
    if token is None:
        return f"{position:>8}  {'-':>7}  {'-':>10}  {'-':>7}  (nothing comes before the first id)"
    raw = token.raw.decode("utf-8", "backslashreplace")
    return f"{position:>8}  {token.token_id:>7}  {token.logprob:>10.4f}  {token.rank:>7}  {raw!r}"


def _sum(entries: tuple[PositionLogprobs, ...]) -> str:
    logprobs = [entry.token.logprob for entry in entries if entry.token is not None]
    if not logprobs:
        return "[no prompt id has another before it]"
    mean = sum(logprobs) / len(logprobs)
    return (
        f"[{len(logprobs)} prompt ids scored, logprob {sum(logprobs):.4f}, perplexity {math.exp(min(-mean, 700)):.4g}]"
    )
