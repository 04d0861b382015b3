"""All engines of a frontend: a request goes to the best of them, and on to another when that is lost.

Requests begin at engines of one fingerprint, that of the engine first attached, and go on where it is the same: there
the ids are, too. Where no engine has it any more, another's is served.

A request that an engine cannot go on with is stranded; it boards the next engine that serves, the same one when it is
back among them, with the ids it has. It strands where its engine's stream breaks, where the engine drains or gives up,
and, where another engine serves, as soon as its own recovers from something or falls silent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc

from services.common.contract import CLOCK_OFFSET, GRAMMAR, RESUME
from services.common.errors import RequestError, unavailable
from services.common.peer import Peer
from services.frontend import engine_client
from services.frontend.engine import Submission
from services.frontend.engine_choice import Expectation
from services.frontend.engine_client import EngineClient
from services.frontend.engine_request import Sink
from services.frontend.journey import Journey
from services.frontend.request import EngineFacts

LOOK_INTERVAL_S = 0.5
"""Silence makes no event: it is looked for."""

DRAIN_FAILOVER_S = 5.0

RETURN_S = 1.0
"""After which an engine that has refused a request may be asked for it again."""

_RECOVERING = unavailable("ENGINE_RECOVERING", "the engine makes no tokens now, and no other was there in time")

_SILENT = unavailable("ENGINE_SILENT", "the engine is not heard of any more, and no other was there in time")

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    """An engine, what is expected of it, and the requests it has."""

    client: EngineClient
    expectation: Expectation = field(default_factory=Expectation)
    journeys: set[Journey] = field(default_factory=set)
    is_odd: bool = False
    """Of another fingerprint than the fleet's."""
    heard_s: float = 0.0
    silent_looks: int = 0
    """Looks in a row since it was heard of. They are counted, not timed: a process that was stopped has all to read."""

    @property
    def is_silent(self) -> bool:
        """It may be frozen, or cut off."""
        return self.client.is_attached and self.silent_looks * LOOK_INTERVAL_S > engine_client.HEARTBEAT_LIMIT_S

    def is_silent_for(self, limit_s: float) -> bool:
        """As `is_silent`, for so long more."""
        return self.is_silent and self.silent_looks * LOOK_INTERVAL_S > engine_client.HEARTBEAT_LIMIT_S + limit_s

    def look(self) -> None:
        """Whether it was heard of since the last look."""
        heard_s = self.client.heard_s
        self.silent_looks = self.silent_looks + 1 if heard_s == self.heard_s else 0
        self.heard_s = heard_s

    def cost(self, journey: Journey, leg: Submission) -> tuple[float, int, int]:
        """See Expectation."""
        return self.expectation.cost(leg, *self._digests(journey))

    def sent(self, journey: Journey, leg: Submission) -> None:
        """See Expectation."""
        self.expectation.sent(leg, *self._digests(journey))

    def _digests(self, journey: Journey) -> tuple[Sequence[bytes], int]:
        """Of the prompt's blocks, with their size; none where this engine's have another."""
        block_tokens = self.client.facts.block_tokens if self.client.facts is not None else 0
        return (journey.digests if block_tokens == journey.block_tokens else ()), block_tokens


class Fleet:
    """`failover_s`: how long a stranded request waits for an engine."""

    def __init__(
        self, peers: Sequence[Peer | str], tokenizer_hash: str, *, failover_s: float, tells_clock_offset: bool = False
    ) -> None:
        self.changed = asyncio.Event()
        """Set when what `can_generate` or `require` say may have changed; who waits clears it."""
        self._members = [
            _Member(EngineClient(peer, tokenizer_hash, tells_clock_offset=tells_clock_offset)) for peer in peers
        ]
        for member in self._members:
            member.client.on_change = self._look
            member.client.on_load = member.expectation.told
        self._failover_s = failover_s
        self._fingerprint = ""
        self._stranded: dict[Journey, RequestError] = {}
        """By what."""
        self._looking: asyncio.TimerHandle | None = None
        self._is_looking = False

    async def start(self) -> None:
        """Begins to attach to all; never waits for one."""
        for member in self._members:
            await member.client.start()

    async def close(self) -> None:
        """Leaves all engines, which abort what still runs."""
        if self._looking is not None:
            self._looking.cancel()
        self.fail_all(unavailable("DRAINING", "this frontend was shut down before the answer was done"))
        await asyncio.gather(*(member.client.close() for member in self._members))

    @property
    def facts(self) -> EngineFacts | None:
        """Those of the fleet, what any of its engines takes; without one that serves, the first's that is known."""
        return self._serving_facts() or next(
            (facts for member in self._members if (facts := member.client.facts) is not None), None
        )

    def can_generate(self) -> bool:
        """An engine is attached, serving, and heard of lately."""
        return any(self._serves(member) for member in self._members)

    def silent_s(self) -> float:
        """Seconds since the engine was heard of that was heard of last, of those that serve."""
        serving = [member.client for member in self._members if self._serves(member)]
        return min(client.silent_s() for client in serving or [member.client for member in self._members])

    def require(self) -> EngineFacts:
        """What the engines take that serve. Raises UNAVAILABLE with the reason where none takes requests."""
        own = self._best_effort().client.require()
        return self._serving_facts() or own

    def submit(self, submission: Submission, sink: Sink) -> Journey:
        """Hands over a request; `sink` is given what comes of it. Raises UNAVAILABLE where `require` does."""
        facts = self.require()
        journey = Journey(
            submission, sink, self._strand, fingerprint=facts.fingerprint, block_tokens=facts.block_tokens
        )
        leg = journey.next_leg()
        self._board(journey, self._best(journey, leg) or self._best_effort(), leg)
        self._look_again()
        return journey

    @property
    def is_idle(self) -> bool:
        """No request is under way or stranded."""
        clients_idle = all(member.client.is_idle for member in self._members)
        return clients_idle and not self._stranded and not any(member.journeys for member in self._members)

    def fail_all(self, error: RequestError) -> None:
        """Ends every request with `error`, here and in the engines."""
        journeys = [*self._stranded, *(journey for member in self._members for journey in member.journeys)]
        for journey in journeys:
            journey.end(error)
            journey.close()

    def drain(self) -> None:
        """No request comes any more; one that strands now waits for an engine no longer than `DRAIN_FAILOVER_S`."""
        self._failover_s = min(self._failover_s, DRAIN_FAILOVER_S)

    # -- which engine

    def _serves(self, member: _Member) -> bool:
        facts = member.client.facts
        return member.client.can_generate() and facts is not None and facts.fingerprint == self._fingerprint

    def _serving_facts(self) -> EngineFacts | None:
        serving = [facts for member in self._members if self._serves(member) and (facts := member.client.facts)]
        return _together(serving) if serving else None

    def _best_effort(self) -> _Member:
        """One that serves; else one that at least takes requests, to refuse them itself, or says why not."""
        serving = [member for member in self._members if self._serves(member)]
        return next(iter(serving), None) or next(
            (member for member in self._members if member.client.is_attached), self._members[0]
        )

    def _best(self, journey: Journey, leg: Submission, avoid: str = "") -> _Member | None:
        """The engine expected to begin with it first; None where none that serves can take it, or has just refused."""
        now_s = time.monotonic()
        refused = {target for target, at_s in journey.refused_s.items() if now_s - at_s < RETURN_S}
        candidates = [
            member
            for member in self._members
            if member.client.target not in refused | {avoid} and _can_take(member, journey, leg)
        ]
        if len(candidates) < 2:
            return next(iter(candidates), None)
        return min(candidates, key=lambda member: member.cost(journey, leg))

    def _board(self, journey: Journey, member: _Member, leg: Submission) -> None:
        facts = member.client.require()
        if leg.digests is not None and facts.block_tokens != journey.block_tokens:
            leg = replace(leg, digests=None)  # they are of blocks of another size
        member.journeys.add(journey)
        if len(self._members) > 1:
            member.sent(journey, leg)
        if leg.is_traced and CLOCK_OFFSET in facts.features:
            leg = replace(leg, clock_offset_ns=member.client.clock_offset.ns)
        request = member.client.submit(leg, journey)
        journey.board(member.client, request, lambda: member.journeys.discard(journey))

    # -- requests that move

    def _strand(self, journey: Journey, error: RequestError) -> None:
        if not journey.was_taken and self._best(journey, journey.next_leg()) is None:
            journey.turn_away(error)  # it was refused at every door
            return
        self._stranded[journey] = error
        self._look()
        self._look_again()

    def _look(self) -> None:
        """Something may have changed: takes requests from engines that do not serve to those that do."""
        self.changed.set()
        if self._is_looking:
            return  # a request that boards may be refused at once
        self._is_looking = True
        try:
            self._agree()
            self._evacuate()
            self._give_up_silent()
            for journey, error in list(self._stranded.items()):
                self._go_on(journey, error)
        finally:
            self._is_looking = False

    def _agree(self) -> None:
        """The fleet's fingerprint is that of an engine that is there."""
        attached = [member.client.facts for member in self._members if member.client.is_attached]
        fingerprints = [facts.fingerprint for facts in attached if facts is not None]
        if fingerprints and self._fingerprint not in fingerprints:
            if self._fingerprint:
                log.warning(
                    "no engine has the fingerprint %.12s any more; %.12s is served", self._fingerprint, fingerprints[0]
                )
            self._fingerprint = fingerprints[0]
        for member in self._members:
            facts = member.client.facts
            differs = member.client.is_attached and facts is not None and facts.fingerprint != self._fingerprint
            if differs and not member.is_odd:
                log.warning("the engine at %s has another fingerprint: nothing begins there", member.client.target)
            member.is_odd = differs
            if not member.client.is_attached:
                member.expectation.forget()

    def _evacuate(self) -> None:
        if not self.can_generate():
            return
        for member in self._members:
            if member.client.is_recovering or member.is_silent:
                leaving = [journey for journey in member.journeys if self._may_leave(journey, member)]
                for journey in leaving:
                    journey.leave(was_taken=True)
                    journey.was_evacuated = True
                    self._stranded[journey] = _RECOVERING
                if leaving:
                    count, target = len(leaving), member.client.target
                    log.warning("the engine at %s makes no tokens; %d requests go to others", target, count)

    def _may_leave(self, journey: Journey, member: _Member) -> bool:
        """Whether another engine can take it, and it has not come here for that reason when this one only recovers: it
        may be what executors die of, and a scheduler finds that out that has it more than once."""
        if journey.was_evacuated and not member.is_silent:
            return False
        return self._best(journey, journey.next_leg(), avoid=member.client.target) is not None

    def _give_up_silent(self) -> None:
        """Ends what no other engine could take from one that has been silent for as long as a lost one is waited for.
        Its stream stands, so nothing else would end it."""
        for member in self._members:
            if member.journeys and member.is_silent_for(self._failover_s):
                log.warning(
                    "the engine at %s stays silent; %d requests end", member.client.target, len(member.journeys)
                )
                for journey in list(member.journeys):
                    journey.end(_SILENT)
                    journey.close()

    def _go_on(self, journey: Journey, error: RequestError) -> None:
        if journey.is_closed:
            del self._stranded[journey]
            return
        journey.finish_full()
        left_s, now_s = journey.left_s, time.monotonic()
        adrift_s = now_s - (journey.adrift_s or now_s)
        if journey.is_over:
            del self._stranded[journey]
        elif left_s is not None and left_s <= 0:
            del self._stranded[journey]
            journey.end(RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", "the deadline passed"))
        elif adrift_s >= self._failover_s and journey.refused_s:
            del self._stranded[journey]
            journey.end(error)
        elif (member := self._best(journey, leg := journey.next_leg())) is not None:
            del self._stranded[journey]
            self._board(journey, member, leg)
        elif adrift_s >= self._failover_s:
            del self._stranded[journey]
            journey.end(error)

    def _look_again(self) -> None:
        if self._looking is None:
            for member in self._members:
                member.silent_looks = 0
            self._arm()

    def _arm(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look_in_time)

    def _look_in_time(self) -> None:
        self._looking = None
        if self._stranded or any(member.journeys for member in self._members):
            for member in self._members:
                member.look()
            self._look()
            self._arm()


def _together(facts: Sequence[EngineFacts]) -> EngineFacts:
    """The first's, with what any of them takes; which of them can take a request as a whole is looked at then."""
    first, *more = facts
    if not more:
        return first
    return replace(
        first,
        context_tokens=max(one.context_tokens for one in facts),
        max_choices=max(one.max_choices for one in facts),
        max_logprobs=max(one.max_logprobs for one in facts),
        features=first.features.union(*(one.features for one in more)),
    )


def _can_take(member: _Member, journey: Journey, leg: Submission) -> bool:
    """Whether it serves now, its ids would be those that the caller was told of, and it has what the request needs."""
    facts = member.client.facts
    if facts is None or not member.client.can_generate() or facts.fingerprint != journey.fingerprint:
        return False
    asked_logprobs = max(leg.logprobs or 0, leg.prompt_logprobs or 0)
    return (
        (RESUME in facts.features or not journey.has_ids)
        and (GRAMMAR in facts.features or leg.grammar is None)
        and len(leg.prompt_ids) + leg.max_tokens <= facts.context_tokens
        and leg.num_choices <= facts.max_choices
        and asked_logprobs <= facts.max_logprobs
    )
