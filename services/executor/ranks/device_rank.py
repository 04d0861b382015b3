"""One rank of an executor whose ranks have a device each: what all of them do alike.

Every rank queues the same steps and holds the same batch. Sums and gathered logits are queued between the kernels, and
so are the ids that rank 0 draws, on their way to the others: no host waits for another's device. What a host learns
late (which ids were drawn, which rows failed) may change the shape of a later step, so the ranks take it in at the same
step: when rank 0 does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.executor import device_fusing, loader, memory
from services.executor.device import Device
from services.executor.device_executor import DeviceExecutor
from services.executor.device_runner import DeviceRunner
from services.executor.executor import Facts
from services.executor.plan import Settings
from services.executor.ranks import layers
from services.executor.ranks.division import Shard
from services.executor.ranks.group import DeviceGroup
from services.executor.runner import ModelRunner


class RankDeviceExecutor(DeviceExecutor):
    """A DeviceExecutor that computes its part; `shard_of` says which, by the free bytes of its device."""

    def __init__(
        self, path: Path, *, device: Device, threads: int, shard_of: Callable[[int], Shard], **options: Any
    ) -> None:
        super().__init__(path, device=device, threads=threads, **options)
        self._shard_of = shard_of
        self._warming = False

    def measure(self) -> int:
        """Runs steps of full size, as all ranks must at once; returns the bytes that this one has for KV. Raises
        StartError."""
        runner, settings = self._made[0], self._settings
        if settings is None:
            raise RuntimeError("a measurement before load")
        with torch.inference_mode():
            self.elementwise.prepare(runner.run_without_cache, settings.max_step_tokens, together=True)
        peak_bytes = self._peak_bytes(runner, settings)
        if self._kv_memory_bytes is None:
            kv_bytes = self._share_of_rest(peak_bytes)
        else:
            kv_bytes = memory.kv_budget_bytes(self._kv_memory_bytes, self._device.available_bytes())
        self.grant_kv(kv_bytes)
        return kv_bytes

    @property
    def _ranks(self) -> DeviceGroup:
        """Connected before the weights are there."""
        raise NotImplementedError

    def _load_on_device(self, dtype: torch.dtype, report: loader.Report, weights_hash: str) -> loader.Checkpoint:
        shard = self._shard_of(self._device.available_bytes())
        checkpoint = loader.load(self._path, dtype, report, weights_hash, shard, self._device)
        if checkpoint.division is None:
            raise RuntimeError("a rank loads a part")
        device_fusing.install(checkpoint.model, self.elementwise)
        layers.connect(checkpoint.model, checkpoint.division, self._ranks)
        return checkpoint

    def _kv_bytes(self, runner: DeviceRunner, settings: Settings) -> int:
        """Measured later, once every rank has its weights: one that refuses to load would be waited for."""
        return 0

    def _make(self, runner: ModelRunner, settings: Settings, facts: Facts, num_blocks: int) -> None:
        self._warming = True  # all ranks do, and nobody tells them step by step
        try:
            super()._make(runner, settings, facts, num_blocks)
        finally:
            self._warming = False

    def _share_drawn(self, token_ids: torch.Tensor, failed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [rows], on every rank what they are on rank 0."""
        both = torch.stack([token_ids, failed.to(token_ids.dtype)])
        self._ranks.share(both)
        return both[0], both[1].to(failed.dtype)
