"""Rank 0 of ranks that have a device each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from services.common.errors import StartError
from services.executor import loader
from services.executor.batch import StepInputs
from services.executor.device import Device, DeviceLostError
from services.executor.device_executor import Step
from services.executor.device_logprobs import PendingScores
from services.executor.device_sampler import Drawn
from services.executor.executor import Facts, Launched
from services.executor.masks import EpochOverError, StepMasks
from services.executor.plan import BadPlanError, Outcome, Plan, RanksLostError
from services.executor.ranks.device_following import connected
from services.executor.ranks.device_rank import RankDeviceExecutor
from services.executor.ranks.division import Shard
from services.executor.ranks.group import DeviceGroup
from services.executor.ranks.leader import LeadingExecutor, tell
from services.executor.ranks.messages import Kind
from services.executor.ranks.peers import Peers
from services.executor.sampler import Masks
from services.executor.sampling_columns import SampleRows


class LeadingDeviceExecutor(LeadingExecutor, RankDeviceExecutor):
    """As LeadingExecutor, with a device a rank; `options` are DeviceExecutor's. Every rank measures its own memory."""

    lost_error = RanksLostError

    def __init__(self, path: Path, *, peers: Peers, device: Device, threads: int, **options: Any) -> None:
        RankDeviceExecutor.__init__(
            self,
            path,
            device=device,
            threads=threads,
            shard_of=lambda available_bytes: Shard(0, peers.size, available_bytes),
            **options,
        )
        self._lead(peers)

    def launch(self, plan: Plan, masks: StepMasks | None = None) -> Launched:
        """As DeviceExecutor's; what goes wrong once the others have been told ends the group."""
        return self._together(lambda: self._launch_all(plan, masks))

    def execute(self, plan: Plan, masks: StepMasks | None = None) -> Outcome:
        """As Executor's."""
        return self.launch(plan, masks).outcome()

    def _launch_all(self, plan: Plan, masks: StepMasks | None) -> Launched:
        self._settle()
        self._peers.tell(Kind.PLAN, plan.message)
        try:
            step = self._launch(plan, masks)
        except (BadPlanError, EpochOverError):
            self._peers.tell(Kind.ABANDONED)
            raise
        self._pending.append(step)
        return step

    def _take_in(self, step: Step) -> None:
        super()._take_in(step)
        self._peers.tell(Kind.SETTLED)

    def _check_lost(self, error: RuntimeError) -> None:
        try:
            super()._check_lost(error)
        except DeviceLostError as lost:
            raise self._peers.lose(f"rank 0: {lost}", wait=False) from error

    @property
    def _ranks(self) -> DeviceGroup:
        return connected(self._group)

    def _share_of_memory(self) -> int:
        self._device.activate()  # before the ranks connect, on this thread
        return self._device.available_bytes()

    def _device_fields(self) -> dict[str, Any]:
        return {"graph_sizes": None if self._graph_sizes is None else list(self._graph_sizes)}

    def _load_on_device(self, dtype: torch.dtype, report: loader.Report, weights_hash: str) -> loader.Checkpoint:
        checkpoint = super()._load_on_device(dtype, report, weights_hash)
        if checkpoint.division is not None:
            tell(checkpoint.division)
        return checkpoint

    def _grant(self, facts: Facts, loaded: Sequence[Mapping[str, Any]]) -> Facts:
        """Now that every rank has its weights, all measure at once what a step takes."""
        self._peers.tell(Kind.MEASURE)
        refused: list[str] = []
        kv_bytes = [0]
        try:
            kv_bytes[0] = self.measure()
        except StartError as error:
            refused.append(str(error))
        for rank, kind, body in self._peers.answers():
            if kind == Kind.REFUSED:
                refused.append(f"rank {rank}: {body.decode()}")
            else:
                kv_bytes.append(json.loads(body)["kv_bytes"])
        if refused:
            raise StartError("; ".join(refused))
        return self._grant_least(facts, loaded, kv_bytes)

    def _score_prompts(self, inputs: StepInputs, hidden: torch.Tensor, vocab_size: int) -> PendingScores:
        scores = super()._score_prompts(inputs, hidden, vocab_size)
        self._peers.tell(Kind.FAILED_SLOTS)
        self._ranks.share(self._made[0].failed)
        return scores

    def _draw(self, logits: torch.Tensor, rows: SampleRows, masks: Masks | None, newest_ids: torch.Tensor) -> Drawn:
        drawn = super()._draw(logits, rows, masks, newest_ids)
        if not self._warming:
            self._peers.tell(Kind.DRAWN)
        self._share_drawn(drawn.token_ids, drawn.failed)
        return drawn

    @property
    def lost(self) -> Future[str]:
        """Done once a rank is lost, rank 0's device too: why, for people."""
        return self._peers.lost
