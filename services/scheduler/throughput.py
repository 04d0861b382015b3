"""How fast tokens were made lately."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


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
