"""Requests with a grammar, from their Submit to their end: what the engine calls, and what is done to the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher

from services.common.errors import RequestError, invalid
from services.common.grammar import Grammar
from services.scheduler.clock import now_ns
from services.scheduler.core.request import Failure, FailureKind, RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan, Updates
from services.scheduler.executor_run import ExecutorRun
from services.scheduler.grammar_compiling import GrammarCompiling
from services.scheduler.grammar_state import Bans, GrammarFailedError, GrammarState
from services.scheduler.masking import Masking, Said

Deliver = Callable[[Updates], None]
Submitted = Callable[[Failure | RequestError | None], None]


@dataclass(frozen=True, eq=False)
class _Ready:
    """A choice that can go to the core: its state, past the `num_known` ids that it has, and what that says of them."""

    key: RequestKey
    state: GrammarState
    num_known: int
    said: Said | None


class GrammarRequests:
    """Lives on the event loop. `core` is the engine's, once it has one, `accepting` too, where it takes requests (else
    it raises RequestError); `deliver` sends what becomes of requests; `changed` is called when something may have to be
    planned."""

    def __init__(
        self,
        folder: Path,
        *,
        core: Callable[[], Scheduler],
        accepting: Callable[[], Scheduler],
        deliver: Deliver,
        changed: Callable[[], None],
    ) -> None:
        self.masking = Masking(self._settle, changed)
        self._core = core
        self._accepting = accepting
        self._deliver = deliver
        self._compiling = GrammarCompiling(folder)

    def start(self) -> None:
        """Begins to read the tokenizer, while the model loads."""
        self._compiling.start()

    async def is_served(self) -> bool:
        """Whether they can be."""
        return await self._compiling.is_served()

    def __contains__(self, key: RequestKey) -> bool:
        """Whether its grammar is being compiled."""
        return key in self._compiling

    @property
    def num_waiting(self) -> int:
        """Requests that the core does not know yet."""
        return self._compiling.num_waiting

    def submit(self, submission: Submission, grammar: Grammar, vocab_size: int, submitted: Submitted) -> None:
        """Gives a request to the core once its grammar is compiled, and says then what came of that."""

        def proceed(ready: list[_Ready] | RequestError) -> None:
            if isinstance(ready, RequestError):  # no grammar, or resumed ids that do not fit it
                submitted(ready)
                return
            try:
                failure = self._accepting().submit(submission, now_ns())
            except RequestError as error:  # an engine that takes nothing any more
                submitted(error)
                return
            if failure is None:
                for one in ready:
                    self.masking.admit(one.key, one.state, is_stepwise=grammar.forced_tokens, num_known=one.num_known)
                    if one.said is not None:
                        self.masking.tell(one.said)
            submitted(failure)

        self._compiling.submit(
            submission.choice_keys()[0],  # the first that an abort names
            grammar,
            lambda matcher: _ready(submission, grammar, matcher, vocab_size),
            proceed,
            is_long=any(output for _, output in submission.choices),
        )

    def forget(self, key: RequestKey) -> None:
        """It was aborted, whether the core knew it or not."""
        self._compiling.drop(key)
        self.masking.forget(key)

    def forget_frontend(self, number: int) -> None:
        """Of requests that the core does not know yet."""
        for key in self._compiling.keys_of(number):
            self._compiling.drop(key)

    def fail_all(self, message: str) -> Updates:
        """Ends what needs masks, of which there are none now."""
        core = self._core()
        updates = Updates(core.applied_step)
        for key in self.masking.admitted():
            updates.failed += core.fail(key, FailureKind.EXECUTOR_LOST, message).failed
        return updates

    def refuse_all(self, error: RequestError) -> None:
        """Of requests that the core does not know yet."""
        self._compiling.refuse_all(error)

    def planned(self, plan: StepPlan, run: ExecutorRun) -> None:
        """See Masking."""
        if plan.masked:
            self.masking.planned(plan, run)

    def close(self) -> None:
        """Ends all work on grammars."""
        self._compiling.close()
        self.masking.close()

    def _settle(self, said: Said) -> int:
        """Forced ids that the core took."""
        core, taken = self._core(), 0
        if said.forced is not None:
            updates = core.force(said.key, said.forced, now_ns())
            taken = len(updates.token_ids)
            self._deliver(updates)
        if said.ended:
            self._deliver(core.finish(said.key, now_ns()))
        if said.failure is not None:
            kind, message = said.failure
            self._deliver(core.fail(said.key, kind, message))
        return taken


def _ready(submission: Submission, grammar: Grammar, matcher: LLMatcher, vocab_size: int) -> list[_Ready]:
    """One a choice that is to run, past the ids it has. Raises RequestError where the grammar does not allow these.

    Long where there are many of them, and then in a thread: it touches nothing but its own copies of the matcher.
    """
    bans = Bans.of(submission.sampling, sorted(submission.stop_ids), submission.min_tokens, vocab_size)
    made = []
    for key, (choice, output) in zip(submission.choice_keys(), submission.choices, strict=True):
        state = GrammarState(matcher.deep_copy(), vocab_size, bans, forces=grammar.forced_tokens)
        try:
            state.take(output)
        except GrammarFailedError as error:
            raise invalid("resumed", f"choice {choice} has ids that its grammar does not allow: {error}") from None
        said = _what_follows(key, state) if output and grammar.forced_tokens else None
        made.append(_Ready(key, state, len(output), said))
    return made


def _what_follows(key: RequestKey, state: GrammarState) -> Said:
    """The last id of a choice that is resumed, without being drawn: as had that id just been drawn."""
    try:
        return Said(key, state.force(), state.ended)
    except GrammarFailedError as error:
        return Said(key, failure=(FailureKind.GRAMMAR_FAILED, f"the request's grammar cannot go on: {error}"))
