"""Requests with a grammar, from their Submit to their end: what the engine calls, and what is done to the core."""

from __future__ import annotations

from collections.abc import Callable
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

        def proceed(compiled: LLMatcher | RequestError) -> None:
            if isinstance(compiled, RequestError):
                submitted(compiled)
                return
            try:
                states = _states(submission, grammar, compiled, vocab_size)
                failure = self._accepting().submit(submission, now_ns())
            except RequestError as error:  # resumed ids that do not fit, or an engine that takes nothing any more
                submitted(error)
                return
            if failure is None:
                for key, (_, output), state in zip(submission.choice_keys(), submission.choices, states, strict=True):
                    self.masking.admit(key, state, is_stepwise=grammar.forced_tokens, num_known=len(output))
                    if output and grammar.forced_tokens:
                        self._go_on(key, state)
            submitted(failure)

        self._compiling.submit(submission.choice_keys()[0], grammar, proceed)  # the first that an abort names

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

    def planned(self, plan: StepPlan, run: ExecutorRun) -> None:
        """See Masking."""
        if plan.masked:
            self.masking.planned(plan, run)

    def close(self) -> None:
        """Ends all work on grammars."""
        self._compiling.close()
        self.masking.close()

    def _go_on(self, key: RequestKey, state: GrammarState) -> None:
        """Of a choice that is resumed: what follows its last id without being drawn, as had it just been drawn."""
        try:
            said = Said(key, state.force(), state.ended)
        except GrammarFailedError as error:
            said = Said(key, failure=(FailureKind.GRAMMAR_FAILED, f"the request's grammar cannot go on: {error}"))
        self.masking.tell(said)

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


def _states(submission: Submission, grammar: Grammar, matcher: LLMatcher, vocab_size: int) -> list[GrammarState]:
    """One a choice that is to run, past the ids it has. Raises RequestError where the grammar does not allow these."""
    bans = Bans.of(submission.sampling, sorted(submission.stop_ids), submission.min_tokens, vocab_size)
    states = []
    for choice, output in submission.choices:
        state = GrammarState(matcher.deep_copy(), vocab_size, bans, forces=grammar.forced_tokens)
        try:
            state.take(output)
        except GrammarFailedError as error:
            raise invalid("resumed", f"choice {choice} has ids that its grammar does not allow: {error}") from None
        states.append(state)
    return states
