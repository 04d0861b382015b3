"""Rank 0: an executor whose every step is done by its peers too, each with its own part of the weights."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from services.common.errors import StartError
from services.executor import loader, memory
from services.executor.batch import ScoredSpan
from services.executor.executor import Executor, Facts
from services.executor.masks import EpochOverError, StepMasks
from services.executor.plan import BadPlanError, Outcome, Plan, RanksLostError, Settings
from services.executor.ranks.division import Division, Shard
from services.executor.ranks.follower import load_connected
from services.executor.ranks.group import Group
from services.executor.ranks.messages import Kind
from services.executor.ranks.peers import Peers
from services.executor.sampler import Masks, Sampled, Sampler
from services.executor.sampling_columns import SampleRows
from services.executor.scorer import Head, Scored, score

T = TypeVar("T")

log = logging.getLogger(__name__)


class LeadingExecutor(Executor):
    """What one Executor does, done by `peers` too. Methods raise RanksLostError once a rank is lost: the group is over.

    `threads` and `kv_memory_bytes` are each rank's. Facts tell rank 0's bytes of a block, and as many bytes for KV as
    hold the blocks that every rank has room for.
    """

    def __init__(self, path: Path, *, peers: Peers, threads: int, kv_memory_bytes: int | None = None) -> None:
        super().__init__(
            path,
            threads=threads,
            load=self._load_shard,
            sampler=lambda vocab_size: _Telling(vocab_size, peers),
            scorer=self._score,
        )
        self._lead(peers)
        self._asked_kv_bytes = kv_memory_bytes

    def _lead(self, peers: Peers) -> None:
        self.tp_size = peers.size
        self._peers = peers
        self._group: Group | None = None
        self._available_bytes = 0
        self._block_bytes: Sequence[int] = ()  # by rank
        self._kv_bytes_by_rank: Sequence[int] = ()  # by rank

    @property
    def lost(self) -> Future[str]:
        """Done once a rank is lost: why, for people."""
        return self._peers.lost

    def load(
        self,
        settings: Settings,
        dtype: torch.dtype,
        weights_hash: str,
        report: loader.Report,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> Facts:
        """As Executor's, by all ranks at once. What one of them refuses is refused, and none holds anything then."""
        return self._together(lambda: self._load_all(settings, dtype, weights_hash, report, kv_dtype or dtype))

    def must_allocate(self, num_blocks: int) -> bool:
        """As Executor's, whose figures are rank 0's; an error has every rank's."""
        try:
            return super().must_allocate(num_blocks)
        except StartError as error:
            if not self._block_bytes:
                raise
            block, kv = (", ".join(map(str, by_rank)) for by_rank in (self._block_bytes, self._kv_bytes_by_rank))
            raise StartError(
                f"{error} of rank 0; by {self.tp_size} ranks a block takes {block} bytes, {sum(self._block_bytes)} in"
                f" all, and {kv} are there for KV"
            ) from error

    def allocate(self, num_blocks: int) -> None:
        """As Executor's."""
        if self.must_allocate(num_blocks):
            self._together(lambda: self._allocate_all(num_blocks))

    def set_log_level(self, level: str, logger: str, duration_s: float | None) -> None:
        """As Executor's."""
        super().set_log_level(level, logger, duration_s)
        self._together(lambda: self._peers.tell_json(Kind.LOG_LEVEL, level=level, logger=logger, duration_s=duration_s))

    def execute(self, plan: Plan, masks: StepMasks | None = None) -> Outcome:
        """As Executor's; any other error than BadPlanError and the epoch's end ends the group."""
        return self._together(lambda: self._execute_all(plan, masks))

    def reset(self) -> None:
        """As Executor's."""
        if not self.lost.done():
            self._together(self._reset_all)

    def close(self) -> None:
        """Ends the peers. From any thread, once no step runs."""
        self._peers.close()

    def _together(self, work: Callable[[], T]) -> T:
        """Where one rank fails on its own, the others wait for it in vain: there is no way to go on."""
        if self.lost.done():
            raise RanksLostError(self.lost.result())
        try:
            return work()
        except (BadPlanError, EpochOverError, RanksLostError, _RefusedError):
            raise
        except BaseException as error:
            log.error("rank 0 has failed", exc_info=error)
            # Collectives raise this one, and mostly for what another rank has done.
            wait = isinstance(error, RuntimeError)
            raise self._peers.lose(f"rank 0: {type(error).__name__}: {error}", wait=wait) from error

    def _load_all(
        self,
        settings: Settings,
        dtype: torch.dtype,
        weights_hash: str,
        report: loader.Report,
        kv_dtype: torch.dtype,
    ) -> Facts:
        self._available_bytes = self._share_of_memory()
        if self._group is None:
            self._peers.wait_ready()
        self._peers.tell_json(
            Kind.LOAD,
            settings=asdict(settings),
            dtype=str(dtype).removeprefix("torch."),
            kv_dtype=str(kv_dtype).removeprefix("torch."),
            available_bytes=self._available_bytes,
            **self._device_fields(),
        )
        if self._group is None:
            self._group = self._peers.connect()
        progress = _Progress(report)
        self._peers.on_progress(progress.of_peer)
        refused: list[str] = []
        try:
            facts = self._bring(settings, dtype, weights_hash, progress.of_rank_0, kv_dtype)
        except StartError as error:
            refused.append(str(error))
        answers = self._peers.answers()
        self._peers.on_progress(None)
        refused += [f"rank {rank}: {body.decode()}" for rank, kind, body in answers if kind == Kind.REFUSED]
        loaded = {rank: json.loads(body) for rank, kind, body in answers if kind == Kind.LOADED}
        if not refused:
            refused += _other_weights(facts.weights_hash, loaded)
        if not refused:
            try:
                return self._grant(facts, list(loaded.values()))
            except StartError as error:
                refused.append(str(error))
        self.unload()
        self._peers.tell(Kind.UNLOAD)
        self._peers.answers()
        raise _RefusedError("; ".join(refused))

    def _share_of_memory(self) -> int:
        """Bytes that each rank on this machine may take."""
        return memory.available_bytes() // self._peers.here

    def _device_fields(self) -> dict[str, Any]:
        """What else a LOAD says where ranks have devices."""
        return {}

    def _load_shard(
        self, path: Path, dtype: torch.dtype, report: loader.Report, expected_hash: str
    ) -> loader.Checkpoint:
        shard = Shard(0, self.tp_size, self._available_bytes)
        checkpoint = load_connected(path, dtype, report, expected_hash, shard, self._group)
        if checkpoint.division is not None:
            tell(checkpoint.division)
        return checkpoint

    def _grant(self, facts: Facts, loaded: Sequence[Mapping[str, Any]]) -> Facts:
        """Now that every rank has its weights: the rest of the memory is divided evenly among those that share it, and
        counted in blocks."""
        here = self._peers.here
        share = memory.kv_budget_bytes(self._asked_kv_bytes, memory.available_bytes() // here, here)
        return self._grant_least(facts, loaded, [share, *(told.get("kv_bytes", share) for told in loaded)])

    def _grant_least(self, facts: Facts, loaded: Sequence[Mapping[str, Any]], kv_bytes: Sequence[int]) -> Facts:
        """`kv_bytes` by rank."""
        self._block_bytes = [facts.block_bytes, *(told["block_bytes"] for told in loaded)]
        self._kv_bytes_by_rank = kv_bytes
        blocks = min(kv // block for kv, block in zip(self._kv_bytes_by_rank, self._block_bytes, strict=True))
        log.info(
            "loaded %s, weights %s, bytes for KV by rank: %s",
            self._path,
            facts.weights_hash[:12],
            ", ".join(map(str, self._kv_bytes_by_rank)),
        )
        # What rank 0 has room for more than another rank is nobody's.
        return self.grant_kv(min(kv_bytes[0], (blocks + 1) * facts.block_bytes - 1))

    def _allocate_all(self, num_blocks: int) -> None:
        self._peers.tell_json(Kind.ALLOCATE, num_blocks=num_blocks, kv_bytes=self._kv_bytes_by_rank[0])
        super().allocate(num_blocks)
        self._peers.answers()

    def _execute_all(self, plan: Plan, masks: StepMasks | None) -> Outcome:
        self._peers.tell(Kind.PLAN, plan.message)
        try:
            return super().execute(plan, masks)
        except (BadPlanError, EpochOverError):
            self._peers.tell(Kind.ABANDONED)
            raise

    def _reset_all(self) -> None:
        self._peers.tell(Kind.RESET)
        super().reset()

    def _score(self, spans: Sequence[ScoredSpan], hidden: torch.Tensor, head: Head, vocab_size: int) -> Scored:
        scored = score(spans, hidden, head, vocab_size)
        self._peers.tell_column(Kind.FAILED_SLOTS, np.array(scored.failed_slots, np.int64))
        return scored


def _other_weights(weights_hash: str, loaded: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Of ranks with files of their own, which of them have others than rank 0."""
    return [
        f"rank {rank}: its weights hash to {told['weights_hash']}, those of rank 0 to {weights_hash}; give all ranks"
        " the same checkpoint"
        for rank, told in loaded.items()
        if told.get("weights_hash", weights_hash) != weights_hash
    ]


class _RefusedError(StartError):
    """All ranks are of one mind, and go on."""


class _Telling(Sampler):
    """The sampler of rank 0, which tells the others what it draws: they append it to the same slots."""

    def __init__(self, vocab_size: int, peers: Peers) -> None:
        super().__init__(vocab_size)
        self._peers = peers

    def sample(self, logits: torch.Tensor, rows: SampleRows, masks: Masks | None = None) -> Sampled:
        sampled = super().sample(logits, rows, masks)
        self._peers.tell_column(Kind.DRAWN, np.where(sampled.failed, -1, sampled.token_ids))
        return sampled


class _Progress:
    """Adds up what the ranks report; the stage is rank 0's."""

    def __init__(self, report: loader.Report) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._of_rank: dict[int, tuple[int, int]] = {}
        self._stage = ""

    def of_rank_0(self, progress: loader.Progress) -> None:
        with self._lock:
            if progress.stage != self._stage:
                self._of_rank.clear()  # of another stage, which counts other bytes
            self._stage = progress.stage
            self._of_rank[0] = (progress.done_bytes, progress.total_bytes)
            self._tell()

    def of_peer(self, rank: int, figures: dict[str, Any]) -> None:
        with self._lock:
            if figures["stage"] == self._stage:
                self._of_rank[rank] = (figures["done_bytes"], figures["total_bytes"])
                self._tell()

    def _tell(self) -> None:
        done, total = (sum(column) for column in zip(*self._of_rank.values(), strict=True))
        self._report(loader.Progress(self._stage, done, total))


def tell(division: Division) -> None:
    """Logs what is divided."""
    size = division.shard.size
    log.info(
        "divided over %d ranks; rank 0 has %d query heads and %d kv heads%s",
        size,
        division.heads,
        division.kv_heads,
        "".join(f"; whole on every rank: {one}" for one in division.whole),
    )
