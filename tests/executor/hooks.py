"""Executors whose forward pass does something before it computes: how faults get in without a switch in the product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.executor import loader
from services.executor.executor import Executor


class Hooked:
    """Makes executors that call `before` (once it is set) ahead of each forward pass, on the step thread."""

    def __init__(self) -> None:
        self.before: Callable[[], object] | None = None
        self.before_call: Callable[[object, tuple[Any, ...], dict[str, Any]], object] | None = None
        """The same, given the module and its arguments."""

    def __call__(self, path: Path, **options: Any) -> Executor:
        return Executor(path, load=self._load, **options)

    def _load(
        self, path: Path, dtype: torch.dtype, report: loader.Report, expected_hash: str = ""
    ) -> loader.Checkpoint:
        checkpoint = loader.load(path, dtype, report, expected_hash)
        checkpoint.model.register_forward_pre_hook(self._call, with_kwargs=True)
        return checkpoint

    def _call(self, module: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.before is not None:
            self.before()
        if self.before_call is not None:
            self.before_call(module, arguments, keywords)

    def fail_once(self, error: BaseException) -> None:
        """The next forward pass raises `error`."""

        def fail() -> None:
            self.before = None
            raise error

        self.before = fail
