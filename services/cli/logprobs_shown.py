"""How `triptych` prints how likely the model finds ids: a line an id, and the likeliest others below it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from triptych_client import PositionLogprobs, TokenLogprob


def show_logprobs(entries: Sequence[PositionLogprobs], file: TextIO | None = None) -> None:
    """A table with a head; to standard error by default, since the answer itself is on standard output."""
    file = sys.stderr if file is None else file
    print(f"{'position':>8}  {'id':>7}  {'logprob':>10}  {'rank':>7}  bytes", file=file)
    for position, entry in enumerate(entries):
        for line in _lines(position, entry):
            print(line, file=file, flush=True)


def _lines(position: int, entry: PositionLogprobs) -> Iterator[str]:
    if entry.token is None:
        yield f"{position:>8}  {'-':>7}  {'-':>10}  {'-':>7}  (nothing comes before the first id)"
    else:
        yield _line(str(position), entry.token)
    for alternative in entry.top:
        yield _line("", alternative)


def _line(position: str, token: TokenLogprob) -> str:
    raw = token.raw.decode("utf-8", "backslashreplace")
    return f"{position:>8}  {token.token_id:>7}  {token.logprob:>10.4f}  {token.rank:>7}  {raw!r}"
