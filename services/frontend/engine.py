"""What the frontend says to an engine and hears from it, as own types; protobuf stays in engine_wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.errors import RequestError
from services.frontend.request import Logprob, Sampling


@dataclass(frozen=True)
class Submission:
    """A request as an engine takes it. `timeout_ms` is what is left of the client's deadline, None without one."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    logprobs: int | None
    arrived_unix_ns: int
    timeout_ms: int | None


@dataclass(frozen=True)
class EngineFinish:
    """The engine's last word on a request: `reason` "stop" or "length"; `stop_id` is the id that stopped it."""

    reason: str
    stop_id: int | None


@dataclass(frozen=True)
class Outputs:
    """What is new of one request; `logprobs` is as long as `token_ids`, or empty where none were asked for."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    cached_tokens: int | None = None
    finish: EngineFinish | None = None

    def then(self, later: Outputs) -> Outputs:
        """Both, in order, as one."""
        return Outputs(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.cached_tokens if later.cached_tokens is not None else self.cached_tokens,
            later.finish or self.finish,
        )


@dataclass(frozen=True)
class StepReport:
    """One StepOutputs: what is new by request id, and the requests that failed."""

    outputs: dict[int, Outputs] = field(default_factory=dict)
    failures: dict[int, RequestError] = field(default_factory=dict)
