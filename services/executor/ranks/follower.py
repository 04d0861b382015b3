"""A rank other than 0: does what rank 0 tells it, with its own part of the weights and the KV tensors."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from triptych.executor.v1 import executor_pb2 as pb

from services.common import logs
from services.common.errors import StartError
from services.executor import devices, loader, memory, wire
from services.executor.batch import ScoredSpan
from services.executor.device import Device
from services.executor.executor import Executor
from services.executor.logprobs import Logprobs
from services.executor.plan import BadPlanError, Settings
from services.executor.ranks import layers
from services.executor.ranks.device_following import FollowingDeviceExecutor
from services.executor.ranks.division import Shard
from services.executor.ranks.group import Group, group_of_children
from services.executor.ranks.messages import AbandonedError, Channel, EndedError, Kind, to_column
from services.executor.sampler import Masks, Sampled, Sampler
from services.executor.sampling_columns import SampleRows
from services.executor.scorer import Head, Scored, pieces

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Which rank a process is, of which group, and how it is to run."""

    path: str
    rank: int
    size: int
    threads: int
    timeout_s: float
    rendezvous_fd: int
    """Of ranks that rank 0 has started; -1 for one with a connection of its own."""
    log_format: str = "text"
    device: str = "cpu"
    """As --device says it; the fields below go with one that is not the CPU."""
    kernels: str = ""
    compile_mode: str = "auto"
    kv_memory_bytes: int | None = None


@dataclass(frozen=True)
class Apart:
    """What a rank has of its own that was started elsewhere: files, memory, and how it connects with the others."""

    connect: Callable[[], Group]
    kv_memory_bytes: int | None


class LeftError(Exception):
    """Rank 0 is gone, or has given the group up: why, for people."""


class Follower:
    """Serves one `Channel` to rank 0 until that ends."""

    def __init__(
        self, place: Place, channel: Channel, apart: Apart | None = None, device: Device | None = None
    ) -> None:
        """`device` where it is made already; None: it is as `place` says."""
        self._place = place
        self._channel = channel
        self._apart = apart
        self._group: Group | None = None
        self._available_bytes = 0
        self._device = device
        self._executor: Executor | None = None

    def run(self) -> None:
        """Returns when rank 0 ends in order. Raises LeftError when it ends otherwise, and what this rank cannot go on
        from, after it has told rank 0."""
        try:
            if self._device is None:
                self._device = devices.choose(
                    self._place.device, Path(built) if (built := self._place.kernels) else None
                )
            self._executor = self._fresh()
            self._channel.send(Kind.READY)
            while True:
                self._do(*self._channel.receive())
        except EndedError as error:
            if str(error):
                raise LeftError(str(error)) from error
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise LeftError("rank 0 has ended, or cannot be reached any more") from error
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._channel.send(Kind.BROKEN, f"{type(error).__name__}: {error}".encode())
            raise

    def _fresh(self) -> Executor:
        place = self._place
        if self._device is not None:
            return FollowingDeviceExecutor(
                Path(place.path),
                channel=self._channel,
                group=lambda: self._group,
                device=self._device,
                threads=place.threads,
                kv_memory_bytes=place.kv_memory_bytes if self._apart is None else self._apart.kv_memory_bytes,
                shard_of=self._shard,
                compile_mode=place.compile_mode,
            )
        return Executor(
            Path(place.path),
            threads=place.threads,
            kv_memory_bytes=None if self._apart is None else self._apart.kv_memory_bytes,
            load=self._load_shard,
            sampler=lambda vocab_size: _Told(vocab_size, self._channel),
            scorer=self._score,
        )

    def _do(self, kind: Kind, body: bytes) -> None:
        executor = self._executor
        if executor is None:
            raise RuntimeError("told something before it is ready")
        if kind == Kind.LOAD:
            self._load(executor, **json.loads(body))
        elif kind == Kind.UNLOAD:
            executor.unload()
            self._executor = self._fresh()
            self._channel.send(Kind.DONE)
        elif kind == Kind.ALLOCATE:
            blocks = json.loads(body)
            if self._apart is None and self._device is None:
                executor.grant_kv(blocks["kv_bytes"])
            executor.allocate(blocks["num_blocks"])
            self._channel.send(Kind.DONE)
        elif kind == Kind.PLAN:
            # Rank 0 holds the same batch, so what is bad here is bad there: it abandons the step.
            with contextlib.suppress(BadPlanError, AbandonedError):
                plan = wire.plan(pb.StepPlan.FromString(body))
                executor.launch(plan)
        elif kind == Kind.ABANDONED:
            pass  # it was bad here too
        elif kind == Kind.RESET:
            executor.reset()
        elif kind == Kind.SETTLED and isinstance(executor, FollowingDeviceExecutor):
            executor.settle_oldest()
        elif kind == Kind.MEASURE and isinstance(executor, FollowingDeviceExecutor):
            self._measure(executor)
        elif kind == Kind.LOG_LEVEL:
            with contextlib.suppress(ValueError):  # a logger that only rank 0 has
                logs.levels().set(**json.loads(body))
        elif kind == Kind.END:
            raise EndedError(body.decode(errors="replace"))
        else:
            raise RuntimeError(f"{kind.name} came between steps: the ranks are out of step")

    def _measure(self, executor: FollowingDeviceExecutor) -> None:
        try:
            kv_bytes = executor.measure()
        except StartError as error:
            self._channel.send(Kind.REFUSED, str(error).encode())
        else:
            self._channel.send_json(Kind.MEASURED, kv_bytes=kv_bytes)

    def _load(
        self,
        executor: Executor,
        settings: dict[str, int],
        dtype: str,
        kv_dtype: str,
        available_bytes: int,
        graph_sizes: list[int] | None = None,
    ) -> None:
        if self._group is None:
            self._group = self._connect()
        if isinstance(executor, FollowingDeviceExecutor):
            executor.capture_as(graph_sizes)
        self._available_bytes = available_bytes if self._apart is None else memory.available_bytes()

        def report(progress: loader.Progress) -> None:
            self._channel.send_json(Kind.PROGRESS, **asdict(progress))

        try:
            facts = executor.load(
                Settings(**settings), getattr(torch, dtype), "", report, kv_dtype=getattr(torch, kv_dtype)
            )
        except StartError as error:
            self._channel.send(Kind.REFUSED, str(error).encode())
        else:
            own = {"kv_bytes": facts.kv_bytes, "weights_hash": facts.weights_hash} if self._apart else {}
            self._channel.send_json(Kind.LOADED, block_bytes=facts.block_bytes, **own)

    def _connect(self) -> Group:
        if self._device is not None:
            self._device.activate()
        if self._apart is not None:
            return self._apart.connect()
        place = self._place
        return group_of_children(place.rendezvous_fd, place.rank, place.size, place.timeout_s, self._device)

    def _shard(self, available_bytes: int) -> Shard:
        return Shard(self._place.rank, self._place.size, available_bytes, own_files=self._apart is not None)

    def _load_shard(
        self, path: Path, dtype: torch.dtype, report: loader.Report, expected_hash: str
    ) -> loader.Checkpoint:
        shard = self._shard(self._available_bytes)
        return load_connected(path, dtype, report, expected_hash, shard, self._group)

    def _score(self, spans: Sequence[ScoredSpan], hidden: torch.Tensor, head: Head, vocab_size: int) -> Scored:
        """Computes this rank's part of the logits, and hears what rank 0 made of them."""
        for tokens in pieces(spans, vocab_size):
            head(hidden[torch.from_numpy(tokens)])
        failed = to_column(self._channel.expect(Kind.FAILED_SLOTS))
        return Scored(failed_slots=tuple(failed.tolist()))


def load_connected(
    path: Path, dtype: torch.dtype, report: loader.Report, expected_hash: str, shard: Shard, group: Group | None
) -> loader.Checkpoint:
    """A rank's part of a checkpoint, its layers connected with those of the other ranks."""
    checkpoint = loader.load(path, dtype, report, expected_hash, shard)
    if checkpoint.division is None or group is None:
        raise RuntimeError("a rank loads a part, in a group")
    layers.connect(checkpoint.model, checkpoint.division, group)
    return checkpoint


class _Told(Sampler):
    """What rank 0's drew is this rank's draw too."""

    def __init__(self, vocab_size: int, channel: Channel) -> None:
        super().__init__(vocab_size)
        self._channel = channel

    def sample(self, logits: torch.Tensor, rows: SampleRows, masks: Masks | None = None) -> Sampled:
        drawn = to_column(self._channel.expect(Kind.DRAWN))
        if len(drawn) != len(rows):
            raise RuntimeError(f"rank 0 drew for {len(drawn)} rows, here are {len(rows)}: the ranks are out of step")
        failed = drawn < 0  # why is rank 0's to tell
        return Sampled(drawn, failed, np.zeros(0, np.int64), Logprobs.none(), np.zeros_like(failed))
