"""Logprobs of a prompt's ids on their way from the engine to the client: every position once and in order."""

from __future__ import annotations

import grpc
import numpy as np

from services.common.errors import RequestError
from services.frontend.engine import Outputs, Scores
from services.frontend.request import Job


class PromptScores:
    """How far a prompt has been scored. Raises RequestError(INTERNAL) for what cannot be right."""

    def __init__(self, job: Job) -> None:
        self._wanted = job.options.prompt_logprobs is not None
        self._vocab_size = job.engine.vocab_size
        self._alternatives = min(job.options.prompt_logprobs or 0, self._vocab_size)
        self._num_positions = len(job.prompt_ids)
        self._next = 1  # nothing foretells the first id
        self._waiting: list[Scores] = []

    @property
    def any_waiting(self) -> bool:
        """There is something to take."""
        return bool(self._waiting)

    def take(self) -> list[Scores]:
        """What has come since the last time, for the client to have before any choice."""
        taken, self._waiting = self._waiting, []
        return taken

    def push(self, outputs: Outputs) -> bool:
        """Takes what is new; whether there is any."""
        if not self._wanted:
            return False
        for scores in outputs.scores:
            if scores.start != self._next or scores.stop > self._num_positions:
                raise _broken(
                    f"the engine sent logprobs of prompt positions [{scores.start}, {scores.stop}), where "
                    f"[{self._next}, {self._num_positions}) are left"
                )
            if np.isnan(scores.logprobs).any() or np.isnan(scores.top_logprobs).any():
                raise _broken("the engine sent a prompt logprob that is not a number")
            if (count := scores.top_ids.shape[1]) != self._alternatives:
                raise _broken(f"the engine sent {count} alternatives to a prompt id, {self._alternatives} are wanted")
            if scores.top_ids.size and (top := int(scores.top_ids.max())) >= self._vocab_size:
                raise _broken(f"the engine sent id {top} as an alternative, the vocabulary has {self._vocab_size}")
            self._next = scores.stop
            self._waiting.append(scores)
        if (outputs.token_ids or outputs.finish is not None) and self._next < self._num_positions:
            raise _broken(f"the engine went on before prompt position {self._next} of {self._num_positions} was scored")
        return bool(outputs.scores)


def _broken(message: str) -> RequestError:
    return RequestError(grpc.StatusCode.INTERNAL, "BAD_LOGPROBS", message)
