"""All choices of one request: outputs come in from the engine, deltas that are due go out."""

from __future__ import annotations

from services.frontend.coalescing import Coalescer
from services.frontend.engine import Outputs
from services.frontend.generation import Choice
from services.frontend.request import Delta, Job
from services.frontend.tokenizer import TextTokenizer


class Answer:
    """The choices of a job, until each has stopped. Times are seconds of one clock, the caller's."""

    def __init__(self, job: Job, tokenizer: TextTokenizer) -> None:
        self._choices = [Choice(job, tokenizer) for _ in range(job.options.n)]
        self._coalescer = Coalescer(job.options.hold, job.options.n)
        self._num_running = job.options.n

    @property
    def done(self) -> bool:
        """Every choice has stopped."""
        return self._num_running == 0

    @property
    def completion_tokens(self) -> int:
        """Ids kept, of all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt ids found in the engine's cache by the first choice: the others share the prompt's blocks with it."""
        return self._choices[0].cached_tokens

    @property
    def stopped(self) -> tuple[str, ...]:
        """Why each choice ended, "" for one that has not."""
        return tuple("" if choice.stopped is None else choice.stopped.reason for choice in self._choices)

    def push(self, index: int, outputs: Outputs) -> bool:
        """Takes what is new of a choice; True where that has ended it before the engine has. Raises RequestError."""
        choice = self._choices[index]
        if choice.stopped is not None:
            return False  # sent before the engine knew
        delta = choice.push(outputs)
        self._coalescer.add(index, delta)
        if delta.stopped is None:
            return False
        self._num_running -= 1
        return outputs.finish is None

    def nothing(self) -> list[tuple[int, Delta]]:
        """The answer to max_tokens 0: a finish a choice, and no ids."""
        self._num_running = 0
        return [(index, choice.nothing()) for index, choice in enumerate(self._choices)]

    def due(self, now_s: float) -> list[tuple[int, Delta]]:
        """What the client is to have now, each choice at most once."""
        return self._coalescer.due(now_s)

    def rest(self, now_s: float) -> list[tuple[int, Delta]]:
        """The same with all that is held back, for a request that ends early."""
        return self._coalescer.rest(now_s)

    def next_s(self) -> float | None:
        """When `due` has something though nothing is pushed; None: never."""
        return self._coalescer.next_s()
