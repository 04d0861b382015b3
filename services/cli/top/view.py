"""A fleet as lines of text: a row for each engine, and one engine in full. Every line fits its width."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.text import Text

from services.cli.top import shown
from services.cli.top.figures import PARTS, Histogram, Span, Stats
from services.cli.top.fleet import QUANTILES, WINDOW_S, Engine, Fleet, together
from services.common.logs.formats import escaped

MIN_WIDTH, MIN_HEIGHT = 80, 24

_STATE_STYLES = {"serving": "green", "loading": "yellow", "recovering": "yellow", "draining": "yellow", "away": "red"}
_PART_STYLES = {"plan": "cyan", "execute": "green", "sample": "magenta", "apply": "yellow"}
_PART_MARKS = dict(zip(PARTS, "pxsa", strict=True))

COLUMNS = (
    *(("STATE", 10), ("RUN", 5), ("WAIT", 5), ("KV", 4), ("HIT", 4)),
    *(("IN/S", 5), ("OUT/S", 5), ("TTFT", 6), ("ITL", 6)),
)
"""Beside the address: name and width. TTFT and ITL are medians."""

_LABEL = 10
_DETAIL_LINES = 13


class View:
    """Of one fleet."""

    def __init__(self, fleet: Fleet, *, ascii_only: bool = False) -> None:
        self._fleet = fleet
        self._ascii = ascii_only

    def screen(self, width: int, height: int, chosen: int) -> list[Text]:
        """At most `height` lines; the engine at `chosen` in full."""
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            told = f"{width}x{height} is too small: {MIN_WIDTH}x{MIN_HEIGHT} is needed"
            return [Text(told[:width])]
        engines = self._fleet.engines
        room = height - _DETAIL_LINES - 3 - (len(engines) > 1)
        first = max(0, min(chosen - room // 2, len(engines) - room))
        lines = [self._title(width, keys=True), self._names(width)]
        for place in range(first, min(first + room, len(engines))):
            lines.append(self._row(engines[place], width, is_chosen=place == chosen and len(engines) > 1))
        hidden = len(engines) - (len(lines) - 2)
        if len(engines) > 1:
            lines.append(self._sum(width, hidden))
        lines.append(Text())
        return lines + list(self._detail(engines[chosen], width, lambda engine: engine.window))

    def whole(self, width: int) -> list[Text]:
        """As many lines as it takes: every engine in full, latencies since its scheduler's start."""
        width = max(width, MIN_WIDTH)
        engines = self._fleet.engines
        lines = [self._title(width, keys=False), self._names(width)]
        lines += [self._row(engine, width, latencies=lambda engine: engine.life) for engine in engines]
        if len(engines) > 1:
            lines.append(self._sum(width, 0, latencies=lambda engine: engine.life))
        for engine in engines:
            lines += [Text(), *self._detail(engine, width, lambda engine: engine.life)]
        return lines

    # -- the fleet

    def _title(self, width: int, *, keys: bool) -> Text:
        answering, all_ = len(self._fleet.answering), len(self._fleet.engines)
        text = f"triptych top   {answering} of {all_} engines answer" if all_ > 1 else "triptych top"
        hint = f"{time.strftime('%H:%M:%S')}   q quits{', j and k choose' if all_ > 1 else ''}" if keys else ""
        return Text(text.ljust(width - len(hint)) + hint, style="bold")

    def _names(self, width: int) -> Text:
        cells = [name.ljust(size) if name == "STATE" else name.rjust(size) for name, size in COLUMNS]
        return Text(" ".join(["ENGINE".ljust(_address_width(width)), *cells]), style="dim")

    def _row(
        self,
        engine: Engine,
        width: int,
        *,
        is_chosen: bool = False,
        latencies: Callable[[Engine], Span | None] = lambda engine: engine.window,
    ) -> Text:
        name = shown.fitted(escaped(engine.address), _address_width(width)).ljust(_address_width(width))
        line = Text().append(name, style="reverse" if is_chosen else "")
        now = engine.now
        if now is None:
            told = f"away {shown.span(time.monotonic() - (engine.away_since_s or time.monotonic()))}"
            return line.append(f" {told}  {engine.trouble}"[: width - len(name)], style=_STATE_STYLES["away"])
        line.append(f" {now.state:<10}", style=_STATE_STYLES.get(now.state, ""))
        return line.append(_cells([now], [engine.last_look], [latencies(engine)]))

    def _sum(
        self,
        width: int,
        hidden: int,
        latencies: Callable[[Engine], Span | None] = lambda engine: engine.window,
    ) -> Text:
        engines = [engine for engine in self._fleet.engines if engine.now is not None]
        name = f"all {len(self._fleet.engines)}" + (f", {hidden} not shown" if hidden else "")
        line = Text(f"{name:<{_address_width(width)}} {'':<10}", style="bold")
        looks = [engine.last_look for engine in engines]
        return line.append(_cells(self._fleet.answering, looks, [latencies(engine) for engine in engines]))

    # -- one engine

    def _detail(self, engine: Engine, width: int, latencies: Callable[[Engine], Span | None]) -> Iterator[Text]:
        now, span = engine.now, latencies(engine)
        if now is None:
            yield Text(f"{shown.fitted(escaped(engine.address), width - 8)}: away", style="bold red")
            yield Text(f"it does not answer: {engine.trouble}; looking again"[:width])
            return
        yield Text(shown.listed(_facts(engine, now, width), width), style="bold")
        yield _line("requests", shown.listed(_counts(now.requests), width - _LABEL))
        yield self._kv(now, width)
        yield _line("prefix", _prefix(now))
        yield from self._steps(now, span, width)
        yield self._rate("in/s", engine, lambda look: look.prompt_tokens_per_s, width)
        yield self._rate("out/s", engine, lambda look: look.output_tokens_per_s, width)
        yield self._latency("TTFT", engine, span, lambda look: look.ttft, width)
        yield self._latency("ITL", engine, span, lambda look: look.itl, width)
        yield _line("finished", shown.listed(_counts(now.finished), width - _LABEL) or "none")
        yield _line("failed", shown.listed(_counts(now.failed), width - _LABEL) or "none")
        taken = "since the start" if span is None or span.first.uptime_s == 0 else f"of the last {WINDOW_S:g} s"
        yield Text(f"{'':<{_LABEL}}latencies and shares of steps are {taken}", style="dim")

    def _kv(self, now: Stats, width: int) -> Text:
        told = f" {shown.percent(now.kv_share):>4}  {shown.number(now.total_blocks - now.free_blocks)} of "
        told += f"{shown.number(now.total_blocks)} blocks, {shown.number(now.waiting_tokens)} tokens wait"
        room = width - _LABEL - len(told)
        return _line("KV", shown.bar(now.kv_share, min(room, 40), ascii_only=self._ascii) + told)

    def _steps(self, now: Stats, span: Span | None, width: int) -> Iterator[Text]:
        shares = {} if span is None else span.step_shares
        graphs = shown.listed(_counts(now.graph_steps), 24)
        told = [f"{part} {shown.percent(shares.get(part))}" for part in PARTS]
        told += [f"{shown.seconds(None if span is None else span.step_s)} each"]
        told += [f"{shown.number(None if span is None else span.steps_per_s)}/s"]
        yield _line("step", shown.listed([*told, *([graphs] if graphs else [])], width - _LABEL))
        line = _line("", "")
        for part, cells in _cells_of_shares(shares, width - _LABEL).items():
            line.append((_PART_MARKS[part] if self._ascii else "█") * cells, style=_PART_STYLES[part])
        yield line

    def _rate(self, name: str, engine: Engine, rate: Callable[[Span], float], width: int) -> Text:
        rates = [None if look is None else rate(look) for look in engine.looks]
        told = f"{shown.number(rates[-1] if rates else None):<{shown.NUMBER_WIDTH}} "
        return _line(name, told + self._spark(rates, width - _LABEL - len(told)))

    def _latency(
        self, name: str, engine: Engine, span: Span | None, of: Callable[[Span], Histogram], width: int
    ) -> Text:
        histogram = Histogram() if span is None else of(span)
        told = "  ".join(
            f"p{100 * share:g} {_quantile(histogram, share):<{shown.SECONDS_WIDTH + 1}}" for share in QUANTILES
        )
        medians = [None if look is None else of(look).quantile_s(0.5) for look in engine.looks]
        return _line(name, told + " " + self._spark(medians, width - _LABEL - len(told) - 1))

    def _spark(self, values: Sequence[float | None], width: int) -> str:
        return shown.sparkline(values, width, ascii_only=self._ascii)


def _address_width(width: int) -> int:
    return width - sum(size + 1 for _, size in COLUMNS)


def _line(label: str, text: str) -> Text:
    return Text().append(f"{label:<{_LABEL}}", style="dim").append(text)


def _cells(answers: Sequence[Stats], looks: Sequence[Span | None], spans: Sequence[Span | None]) -> str:
    """Those after the state, summed over engines."""
    total, free = sum(now.total_blocks for now in answers), sum(now.free_blocks for now in answers)
    asked = sum(now.prefix_query_tokens for now in answers)
    known = [look for look in looks if look is not None]
    ttft = together([span.ttft for span in spans if span is not None])
    itl = together([span.itl for span in spans if span is not None])
    values = (
        shown.number(sum(now.running for now in answers)),
        shown.number(sum(now.waiting for now in answers)),
        shown.percent(1 - free / total if total else None),
        shown.percent(sum(now.prefix_hit_tokens for now in answers) / asked if asked else None),
        shown.number(sum(look.prompt_tokens_per_s for look in known) if known else None),
        shown.number(sum(look.output_tokens_per_s for look in known) if known else None),
        _quantile(ttft, 0.5),
        _quantile(itl, 0.5),
    )
    return "".join(f" {value:>{size}}" for value, (_, size) in zip(values, COLUMNS[1:], strict=True))


def _quantile(histogram: Histogram, share: float) -> str:
    return shown.seconds(histogram.quantile_s(share), is_beyond=histogram.is_beyond(share))


def _facts(engine: Engine, now: Stats, width: int) -> list[str]:
    """State, uptime and epoch need 48 places at most; the address has the rest."""
    epoch = f"epoch {now.epoch}"
    begun_s = time.time() - now.epoch / 1000  # schedulers number epochs by the clock's milliseconds
    if 0 <= begun_s < now.uptime_s + 60:
        epoch += f" (for {shown.span(begun_s)})"
    return [shown.fitted(escaped(engine.address), width - 48), now.state, f"up {shown.span(now.uptime_s)}", epoch]


def _prefix(now: Stats) -> str:
    asked = now.prefix_query_tokens
    hits = shown.percent(now.prefix_hit_tokens / asked if asked else None)
    return (
        f"{hits} of {shown.number(asked)} prompt tokens found, {shown.number(now.preemptions)} preemptions, "
        f"{shown.number(now.dropped_tokens)} ids dropped"
    )


def _counts(counts: Mapping[str, int]) -> list[str]:
    """Largest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{escaped(name)[:32]} {shown.number(count)}" for name, count in ordered]


def _cells_of_shares(shares: Mapping[str, float], width: int) -> dict[str, int]:
    """Of a line; together no more than its width."""
    ends, total = {}, 0.0
    for part in PARTS:
        before = round(total * width)
        total += shares.get(part, 0.0)
        ends[part] = min(round(total * width), width) - before
    return ends
