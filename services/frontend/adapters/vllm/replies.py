"""What of an answer goes to the adapter's client: chunks of new ids where it streams, and one Complete a choice.

A Complete has all ids of its choice, streamed or not; logprobs stand in the chunks of a stream, else in the Complete.
Logprobs of the prompt stand in the first message of each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from smg_grpc_proto import vllm_engine_pb2 as pb

from services.frontend.engine import Scores
from services.frontend.request import Delta, Job, Logprob, Stopped

ABORTED = Stopped("abort")


class Replies:
    """The messages of one call."""

    def __init__(self, job: Job, *, stream: bool) -> None:
        self._prompt_ids = job.prompt_ids
        self._stream = stream
        self._choices = [_Choice(index) for index in range(job.options.n)]
        self._wants_top = bool(job.options.logprobs)
        self._wants_prompt_top = bool(job.options.prompt_logprobs)
        self._prompt_scores: pb.InputLogProbs | None = None
        self.cached_tokens = 0

    def score(self, scores: Scores) -> None:
        """Takes logprobs of prompt ids, in order, before any delta."""
        if self._prompt_scores is None:
            self._prompt_scores = pb.InputLogProbs(token_ids=self._prompt_ids[:1])
            self._prompt_scores.token_logprobs.add()  # nothing foretells the first id
            if self._wants_prompt_top:
                self._prompt_scores.top_logprobs.add()
        told = self._prompt_scores
        told.token_ids.extend(self._prompt_ids[scores.start : scores.stop])
        told.token_logprobs.extend([pb.InputTokenLogProb(value=value) for value in scores.logprobs.tolist()])
        if self._wants_prompt_top:
            tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
            told.top_logprobs.extend([pb.TopLogProbs(token_ids=ids, values=values) for ids, values in tops])

    def take(self, deltas: Iterable[tuple[int, Delta]]) -> Iterator[pb.GenerateResponse]:
        """What the client is to have now of what is new."""
        for index, delta in deltas:
            choice = self._choices[index]
            choice.take(delta, keep_logprobs=not self._stream)
            if not self._stream:
                continue
            if delta.token_ids:
                yield self._chunk(choice, delta)
            if delta.stopped is not None:
                yield self._complete(choice, delta.stopped)

    def end(self) -> Iterator[pb.GenerateResponse]:
        """What is left once every choice has stopped, or was aborted."""
        for choice in self._choices:
            if not choice.is_told:
                yield self._complete(choice, choice.stopped or ABORTED)

    def _chunk(self, choice: _Choice, delta: Delta) -> pb.GenerateResponse:
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(delta.token_ids),  # of this chunk: the contract's clients add them up
            cached_tokens=self.cached_tokens,
            index=choice.index,
        )
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(self._output_logprobs(delta.token_ids, delta.logprobs))
        if (scores := self._first_scores(choice)) is not None:
            chunk.input_logprobs.CopyFrom(scores)
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, choice: _Choice, stopped: Stopped) -> pb.GenerateResponse:
        complete = pb.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=stopped.reason,
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(choice.token_ids),
            cached_tokens=self.cached_tokens,
            index=choice.index,
        )
        if choice.logprobs:
            complete.output_logprobs.CopyFrom(self._output_logprobs(choice.token_ids, choice.logprobs))
        if (scores := self._first_scores(choice)) is not None:
            complete.input_logprobs.CopyFrom(scores)
        if stopped.stop_token_id is not None:  # EOS matches nothing that was asked for
            complete.matched_token_id = stopped.stop_token_id
        elif stopped.stop_string is not None:
            complete.matched_stop_str = stopped.stop_string
        choice.is_told = True
        return pb.GenerateResponse(complete=complete)

    def _first_scores(self, choice: _Choice) -> pb.InputLogProbs | None:
        scores = None if choice.has_scores else self._prompt_scores
        choice.has_scores = True
        return scores

    def _output_logprobs(self, token_ids: Iterable[int], logprobs: Iterable[Logprob]) -> pb.OutputLogProbs:
        told = pb.OutputLogProbs(token_ids=token_ids, token_logprobs=[entry.logprob for entry in logprobs])
        if self._wants_top:
            for entry in logprobs:
                told.top_logprobs.add(
                    token_ids=[token_id for token_id, _ in entry.top], values=[value for _, value in entry.top]
                )
        return told


class _Choice:
    """What is kept of a choice for its Complete."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.stopped: Stopped | None = None
        self.has_scores = False
        self.is_told = False

    def take(self, delta: Delta, *, keep_logprobs: bool) -> None:
        self.token_ids.extend(delta.token_ids)
        if keep_logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.stopped is not None:
            self.stopped = delta.stopped
