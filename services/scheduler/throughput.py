"""How fast tokens were made lately, and how fast requests made room for others."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
_ENDS = 256
_FIRST_RETRY_S = 1.0
_RETRY_S = (0.1, 60.0)


class Throughput:
    """Prompt and output tokens a second over the last 10 s of work; time without work does not count."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int]] = deque()
        self._busy_s = 0.0
        self._prompt_tokens = 0
        self._output_tokens = 0

    def add(self, step_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """One step of `step_s` seconds."""
        self._steps.append((step_s, prompt_tokens, output_tokens))
        self._busy_s += step_s
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        while self._busy_s - self._steps[0][0] >= WINDOW_S:
            old_s, old_prompt, old_output = self._steps.popleft()
            self._busy_s -= old_s
            self._prompt_tokens -= old_prompt
            self._output_tokens -= old_output

    @property
    def prompt_tokens_per_s(self) -> float:
        """0 before the first step."""
        return self._prompt_tokens / self._busy_s if self._busy_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """0 before the first step."""
        return self._output_tokens / self._busy_s if self._busy_s > 0 else 0.0


class DrainRate:
    """Requests that ended, a second, over the last 256: what a full queue drains by."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=_ENDS)

    def add(self, now_s: float, requests: int) -> None:
        """So many have just ended."""
        if requests:
            self._ends.append((now_s, requests))

    def retry_after_ms(self, now_s: float, waiting: int) -> int:
        """When half of `waiting` requests will have left, so that those sent away do not all find it full again."""
        retry_s = _FIRST_RETRY_S
        if len(self._ends) > 1 and now_s > self._ends[0][0]:
            ended = sum(requests for _, requests in self._ends) - self._ends[0][1]
            retry_s = max(1, waiting / 2) * (now_s - self._ends[0][0]) / ended
        low_s, high_s = _RETRY_S
        return round(1000 * min(max(retry_s, low_s), high_s))
