"""One choice: ids come in from the engine, text goes out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import grpc

from services.common.errors import RequestError
from services.frontend.detokenizer import Detokenizer
from services.frontend.engine import EngineFinish, Outputs
from services.frontend.output_reader import CallIds, OutputReader
from services.frontend.request import Called, Delta, Job, Logprob, Stopped
from services.frontend.stops import StopMatcher
from services.frontend.tape import Parts
from services.frontend.tokenizer import TextTokenizer


class NotFittingError(Exception):
    """What had arrived of a choice is not what its request gives; `field` is in the contract's Received."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class Choice:
    """Turns outputs into deltas until the choice has stopped; ids after a stop string's match are dropped.

    `push` raises RequestError(INTERNAL) for output that cannot be right or that the tokenizer cannot read.
    """

    def __init__(self, job: Job, tokenizer: TextTokenizer, index: int = 0) -> None:
        self._job = job
        self._vocab_size = job.engine.vocab_size
        self._gets_logprobs = job.options.engine_logprobs is not None
        self._wants_logprobs = job.options.logprobs is not None
        self._alternatives = min(job.options.logprobs or 0, self._vocab_size)
        self._may_match = bool(job.options.stop)
        self._reader = OutputReader(job.formats) if job.formats is not None else None
        self._call_ids = CallIds(job.prompt_ids, job.options.seed, index)
        self._marks = tokenizer.special_among(job.formats.marks) if job.formats is not None else frozenset()
        """Special ids that a reader must see, though text leaves them out."""
        self._detokenizer = Detokenizer(tokenizer, job.prompt_ids, skip_special_tokens=job.options.skip_special_tokens)
        self._stops = StopMatcher(job.options.stop, include=job.options.include_stop_string)
        self._cumulative_logprob = 0.0
        self.num_tokens = 0
        self.cached_tokens = 0
        self.stopped: Stopped | None = None

    def push(self, outputs: Outputs) -> Delta:
        """What is new for the client; the last delta has `stopped`."""
        self._check(outputs)
        if outputs.cached_tokens is not None:
            self.cached_tokens = outputs.cached_tokens
        try:
            text, kept = self._read(outputs.token_ids)
            if self.stopped is None and outputs.finish is not None:
                text += self._finish(outputs.finish)
        except Exception as error:
            raise _broken("DETOKENIZE", f"the tokenizer cannot decode what the model wrote: {error}") from error
        delta = Delta(text, outputs.token_ids[:kept], (), self.stopped)
        if self._gets_logprobs:
            delta = self._with_logprobs(delta, outputs.logprobs[:kept])
        return delta if self._reader is None else self._with_parts(delta, self._reader)

    def nothing(self) -> Delta:
        """The answer to max_tokens 0: a finish, and no ids."""
        self.stopped = Stopped("length")
        return Delta(stopped=self.stopped, cumulative_logprob=0.0 if self._gets_logprobs else None)

    def _with_logprobs(self, delta: Delta, logprobs: tuple[Logprob, ...]) -> Delta:
        self._cumulative_logprob += sum(entry.logprob for entry in logprobs)
        return delta._replace(
            logprobs=logprobs if self._wants_logprobs else (),
            cumulative_logprob=None if self.stopped is None else self._cumulative_logprob,
        )

    def _with_parts(self, delta: Delta, reader: OutputReader) -> Delta:
        """The delta, its raw text taken apart; at the end with what the reader held back."""
        found = [reader.push(delta.text)]
        if self.stopped is not None:
            found.append(reader.finish())
        return self._told(delta, found, reader)

    def _told(self, delta: Delta, found: list[Parts], reader: OutputReader) -> Delta:
        if self.stopped is not None and self.stopped.reason == "stop" and reader.whole_calls:
            self.stopped = replace(self.stopped, reason="tool_calls")
        return delta._replace(
            text="".join(parts.text for parts in found),
            reasoning="".join(parts.reasoning for parts in found),
            calls=tuple(called for parts in found for called in self._called(parts)),
            stopped=self.stopped,
        )

    def _called(self, parts: Parts) -> Iterator[Called]:
        for call in parts.calls:
            if call.name:
                yield Called(call.index, self._call_ids.of(call), call.name, call.arguments)
            elif call.arguments:
                yield Called(call.index, arguments=call.arguments)

    def end_before(self, num_tokens: int) -> None:
        """It had finished, with so many ids, on a stream before this one."""
        self.num_tokens = num_tokens
        self.stopped = Stopped("finished before")

    def replay(self, token_ids: tuple[int, ...], cumulative_logprob: float, text_bytes: int) -> Delta:
        """Takes in ids that a stream before this one has told, with so many bytes of what they say.

        Returns what they say beyond these, and the finish where they bring it. Raises NotFittingError where the choice
        would not have gone on so far.
        """
        text, kept = self._read(token_ids)
        self._cumulative_logprob = cumulative_logprob
        stops = [place for place in range(self._job.options.min_tokens, kept) if token_ids[place] in self._job.stop_ids]
        if kept < len(token_ids) or (stops and stops[0] < kept - 1):
            raise NotFittingError("token_ids", f"goes on past a stop at {stops[0] if stops else kept - 1}")
        if self.stopped is None and stops:
            text += self._finish(EngineFinish("stop", token_ids[-1]))
        elif self.stopped is None and kept == self._job.max_tokens:
            text += self._finish(EngineFinish("length", None))
        is_told = self.stopped is not None and self._wants_logprobs
        delta = Delta(stopped=self.stopped, cumulative_logprob=cumulative_logprob if is_told else None)
        if self._reader is None:
            return delta._replace(text=_untold(text, text_bytes))
        return self._told(delta, _untold_parts(self._read_again(text, self._reader), text_bytes), self._reader)

    def _read_again(self, text: str, reader: OutputReader) -> Iterator[Parts]:
        """What each character makes known: wherever a stream was cut, it was between two of these."""
        yield from map(reader.push, text)
        if self.stopped is not None:
            yield reader.finish()

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """(text that may be sent, how many of the ids are kept)."""
        if not self._may_match and not self._marks:
            self.num_tokens += len(token_ids)
            return "".join(map(self._detokenizer.push, token_ids)), len(token_ids)
        pieces = []
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            shown = self._detokenizer.show if token_id in self._marks else self._detokenizer.push
            pieces.append(self._scan(shown(token_id)))
            if self.stopped is not None:
                return "".join(pieces), place + 1
        return "".join(pieces), len(token_ids)

    def _scan(self, text: str) -> str:
        scanned = self._stops.push(text, may_stop=self.num_tokens >= self._job.options.min_tokens)
        if scanned.stop is not None:
            self.stopped = Stopped("stop", stop_string=scanned.stop)
        return scanned.text

    def _finish(self, finish: EngineFinish) -> str:
        text = self._scan(self._detokenizer.flush())
        if self.stopped is None:
            text += self._stops.flush()
            self.stopped = self._stopped_by(finish)
        return text

    def _stopped_by(self, finish: EngineFinish) -> Stopped:
        if finish.stop_id is None:
            return Stopped(finish.reason)
        if finish.stop_id in self._job.eos_ids and not self._job.options.ignore_eos:
            return Stopped(finish.reason, eos_token_id=finish.stop_id)
        return Stopped(finish.reason, stop_token_id=finish.stop_id)

    def _check(self, outputs: Outputs) -> None:
        for token_id in outputs.token_ids:
            if token_id >= self._vocab_size:
                raise _broken(
                    "BAD_TOKEN_ID", f"the engine sampled id {token_id}, the vocabulary has {self._vocab_size}"
                )
        if self._gets_logprobs:
            self._check_logprobs(outputs.logprobs, len(outputs.token_ids))

    def _check_logprobs(self, logprobs: tuple[Logprob, ...], num_ids: int) -> None:
        if len(logprobs) != num_ids:
            raise _broken("BAD_LOGPROBS", f"the engine sent {len(logprobs)} logprobs for {num_ids} ids")
        for entry in logprobs:
            if math.isnan(entry.logprob) or any(math.isnan(logprob) for _, logprob in entry.top):
                raise _broken("BAD_LOGPROBS", "the engine sent a logprob that is not a number")
            if len(entry.top) != self._alternatives:
                raise _broken(
                    "BAD_LOGPROBS",
                    f"the engine sent {len(entry.top)} alternatives to an id, {self._alternatives} are wanted",
                )
            for token_id, _ in entry.top:
                if token_id >= self._vocab_size:
                    raise _broken(
                        "BAD_LOGPROBS",
                        f"the engine sent id {token_id} as an alternative, the vocabulary has {self._vocab_size}",
                    )


def _untold(text: str, text_bytes: int) -> str:
    data = text.encode()
    if text_bytes > len(data):
        raise NotFittingError("text_bytes", f"is {text_bytes}, the ids have {len(data)} bytes of text")
    try:
        return data[text_bytes:].decode()
    except UnicodeDecodeError:
        raise NotFittingError("text_bytes", f"is {text_bytes}, in the middle of a character") from None


def _untold_parts(found: Iterator[Parts], text_bytes: int) -> list[Parts]:
    told, untold = 0, []
    for parts in found:
        if told == text_bytes:
            untold.append(parts)
            continue
        told += parts.num_bytes
        if told > text_bytes:
            raise NotFittingError("text_bytes", f"is {text_bytes}, in the middle of what was sent at once")
    if told < text_bytes:
        raise NotFittingError("text_bytes", f"is {text_bytes}, the ids have {told} bytes of text, reasoning and calls")
    return untold


def _broken(reason: str, message: str) -> RequestError:
    return RequestError(grpc.StatusCode.INTERNAL, reason, message)
