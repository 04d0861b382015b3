"""All choices of one request: the engine's stream puts outputs in, the call takes deltas out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc

from services.common.errors import RequestError
from services.frontend.best_of import BestOf
from services.frontend.coalescing import Coalescer, fits_a_message, weight
from services.frontend.engine import Outputs, Scores
from services.frontend.generation import Choice
from services.frontend.patience import SLOW_READER
from services.frontend.request import Delta, Hold, Job
from services.frontend.resume import Begun
from services.frontend.scores import PromptScores
from services.frontend.tokenizer import TextTokenizer

MAX_UNREAD = 64 * 1024
"""Ids, alternatives to them included, that may wait for the client."""


class Answer:
    """The choices of a job, until each has stopped. `close` it in any case.

    Text is made as outputs come, and the call is woken only for what is due. What comes while the client is slow is
    taken as one, by choice; more than `max_unread` ids end the request.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: TextTokenizer,
        max_unread: int = MAX_UNREAD,
        begun: Mapping[int, Begun] | None = None,
    ) -> None:
        self._num_returned = job.options.n
        self._max_unread = max_unread
        self._left_behind = False
        self._unread = 0
        """Ids that came since the call last waited for some: the client had not taken what was before them."""
        self._scores_alone = job.max_tokens == 0
        self._scores = PromptScores(job)
        begun = begun or {}
        self._num_arrived = sum(one.choice.num_tokens for one in begun.values())
        run = job.options.num_choices
        self._choices = [
            begun[index].choice if index in begun else Choice(job, tokenizer, index) for index in range(run)
        ]
        self._coalescer = _coalescer(job)
        self._at_once = job.options.hold == Hold() and run == 1 and job.options.best_of is None
        """A call that waits is handed the delta itself; for one that does not the coalescer keeps it."""
        self._num_running = sum(choice.stopped is None for choice in self._choices)
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self.first_ids_s: float | None = None
        """When the first ids came, by the loop's clock."""
        self.queue_s: float | None = None
        """What the choice that came first had waited in the engine."""
        self._reader: asyncio.Future[list[tuple[int, Delta]]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        for index, (_, delta) in begun.items():
            if delta != Delta():
                self._coalescer.add(index, delta, self._loop.time())

    @property
    def running(self) -> tuple[int, ...]:
        """The choices that have not stopped."""
        return tuple(index for index, choice in enumerate(self._choices) if choice.stopped is None)

    @property
    def done(self) -> bool:
        """Every choice has stopped, and all of it was taken."""
        return self._num_running == 0 and self._coalescer.empty and not self._scores.any_waiting

    @property
    def completion_tokens(self) -> int:
        """Ids kept, of all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def new_tokens(self) -> int:
        """The same, without those that had arrived on a stream before this one."""
        return self.completion_tokens - self._num_arrived

    @property
    def repeated_tokens(self) -> int:
        """Before anything has come: ids of the choices that go on, which the engine computes again."""
        return sum(choice.num_tokens for choice in self._choices if choice.stopped is None)

    @property
    def cached_tokens(self) -> int:
        """Prompt ids found in the engine's cache by the first choice: the others share the prompt's blocks with it."""
        return self._choices[0].cached_tokens

    @property
    def stopped(self) -> tuple[str, ...]:
        """Why each choice ended, "" for one that has not."""
        return tuple("" if choice.stopped is None else choice.stopped.reason for choice in self._choices)

    def put(self, index: int, outputs: Outputs) -> bool:
        """Takes what is new of a choice; True where that has ended it before the engine has. Raises nothing.

        What is wrong with it is raised where the answer is taken: it ends this request and no other.
        """
        choice = self._choices[index]
        if self._error is not None:
            return self._left_behind and outputs.finish is None
        if choice.stopped is not None:
            return False  # sent before the engine knew
        if self.first_ids_s is None and outputs.token_ids:
            self.first_ids_s, self.queue_s = self._loop.time(), outputs.queue_s
        try:
            if self._scores.push(outputs):
                self._wake()
            if self._scores_alone or (outputs.scores and not outputs.token_ids and outputs.finish is None):
                self._end_scored(outputs)
                return False
            delta = choice.push(outputs)
        except Exception as error:
            self.fail(error)
            return False
        if self._at_once and self._reader is not None and not self._reader.done() and fits_a_message(delta):
            self._reader.set_result([(index, delta)])
        elif self._coalescer.add(index, delta, self._loop.time()):
            self._wake()
        else:
            self._arm()
        if self._reader is None and self._falls_behind(delta):
            self._left_behind = True  # who would close the request waits for the client
            self.fail(_unread(self._max_unread))
        if delta.stopped is None:
            return False
        self._num_running -= 1
        return outputs.finish is None

    def _falls_behind(self, delta: Delta) -> bool:
        """Whether too much waits for the client; what is held back at its own wish does not count."""
        self._unread += weight(delta)
        return min(self._unread, self._coalescer.num_ids) > self._max_unread

    def _end_scored(self, outputs: Outputs) -> None:
        """Of the prompt alone; where that is all there is to do, the engine's finish is every choice's."""
        if self._scores_alone and outputs.finish is not None:
            for index, delta in self.nothing():
                self._coalescer.add(index, delta, self._loop.time())
            self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the request; the first error stays. What came before is still delivered."""
        self._error = self._error or error
        self._wake()

    def nothing(self) -> list[tuple[int, Delta]]:
        """The answer to max_tokens 0: a finish for each choice that is returned, and no ids."""
        self._num_running = 0
        returned = self._choices[: self._num_returned]
        return [(index, choice.nothing()) for index, choice in enumerate(returned) if choice.stopped is None]

    async def take(self) -> list[tuple[int, Delta]]:
        """What the client is to have now, each choice at most once, as soon as there is any.

        None of them where there is something in `take_scores`, which goes before them. Raises what has ended the
        request, once all that came before is taken.
        """
        while True:
            if not self._coalescer.empty and (due := self._coalescer.due(self._loop.time())):
                return due
            if self._scores.any_waiting:
                return []
            if self._error is not None:
                if rest := self._coalescer.rest(self._loop.time()):
                    return rest
                raise self._error
            if handed := await self._news():
                return handed

    def take_scores(self) -> list[Scores]:
        """Logprobs of the prompt that the client does not have yet."""
        return self._scores.take()

    def close(self) -> None:
        """Leaves no timer behind."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _news(self) -> list[tuple[int, Delta]]:
        """Waits until there may be something to take, or is handed it."""
        self._arm()
        self._unread = 0
        self._reader = self._loop.create_future()
        try:
            return await self._reader
        finally:
            self._reader = None

    def _arm(self) -> None:
        """Sets the timer to when something that is held is due though nothing more comes."""
        due_s = self._coalescer.next_s()
        if due_s is None or (self._timer is not None and self._timer.when() <= due_s):
            return
        self.close()
        self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result([])


def _coalescer(job: Job) -> Coalescer | BestOf:
    if job.options.best_of is None or job.max_tokens == 0:
        return Coalescer(job.options.hold, job.options.n)
    return BestOf(job.options.best_of, job.options.n)


def _unread(limit: int) -> RequestError:
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        SLOW_READER,
        f"more than {limit} ids, alternatives included, waited for the client (max_unread_tokens); read faster, or "
        "ask for less at once",
    )
