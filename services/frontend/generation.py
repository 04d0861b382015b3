"""One choice: ids come in from the engine, text goes out."""

from __future__ import annotations

import math

import grpc

from services.common.errors import RequestError
from services.frontend.detokenizer import Detokenizer
from services.frontend.engine import EngineFinish, Outputs
from services.frontend.request import Delta, Job, Logprob, Stopped
from services.frontend.stops import StopMatcher
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

    def __init__(self, job: Job, tokenizer: TextTokenizer) -> None:
        self._job = job
        self._vocab_size = job.engine.vocab_size
        self._wants_logprobs = job.options.logprobs is not None
        self._alternatives = min(job.options.logprobs or 0, self._vocab_size)
        self._may_match = bool(job.options.stop)
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
        if not self._wants_logprobs:
            return Delta(text, outputs.token_ids[:kept], (), self.stopped)
        logprobs = outputs.logprobs[:kept]
        self._cumulative_logprob += sum(entry.logprob for entry in logprobs)
        cumulative = None if self.stopped is None else self._cumulative_logprob
        return Delta(text, outputs.token_ids[:kept], logprobs, self.stopped, cumulative)

    def nothing(self) -> Delta:
        """The answer to max_tokens 0: a finish, and no ids."""
        self.stopped = Stopped("length")
        return Delta(stopped=self.stopped, cumulative_logprob=0.0 if self._wants_logprobs else None)

    def end_before(self, num_tokens: int) -> None:
        """It had finished, with so many ids, on a stream before this one."""
        self.num_tokens = num_tokens
        self.stopped = Stopped("finished before")

    def replay(self, token_ids: tuple[int, ...], cumulative_logprob: float) -> Delta:
        """Takes in ids that a stream before this one has told: their text, and the finish where they bring it.

        Raises NotFittingError where the choice would not have gone on so far.
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
        return Delta(text, stopped=self.stopped, cumulative_logprob=cumulative_logprob if is_told else None)

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """(text that may be sent, how many of the ids are kept)."""
        if not self._may_match:
            self.num_tokens += len(token_ids)
            return "".join(map(self._detokenizer.push, token_ids)), len(token_ids)
        pieces = []
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            pieces.append(self._scan(self._detokenizer.push(token_id)))
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
        if self._wants_logprobs:
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


def _broken(reason: str, message: str) -> RequestError:
    return RequestError(grpc.StatusCode.INTERNAL, reason, message)
