"""A rank other than 0 on a device of its own: queues what rank 0 queues, and takes its ids over on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.executor.batch import StepInputs
from services.executor.device import index
from services.executor.device_logprobs import PendingScores
from services.executor.device_sampler import Drawn
from services.executor.executor import Launched
from services.executor.masks import StepMasks
from services.executor.plan import Plan
from services.executor.ranks.device_rank import RankDeviceExecutor
from services.executor.ranks.group import DeviceGroup, Group
from services.executor.ranks.messages import Channel, Kind
from services.executor.sampler import Masks
from services.executor.sampling_columns import SampleRows
from services.executor.scorer import pieces

_NONE = np.zeros(0, np.int64)


class FollowingDeviceExecutor(RankDeviceExecutor):
    """Waits on `channel`, before it queues what comes from rank 0, for the sign that rank 0 does so too."""

    def __init__(self, path: Path, *, channel: Channel, group: Callable[[], Group | None], **options: Any) -> None:
        super().__init__(path, **options)
        self._channel = channel
        self._group = group

    def capture_as(self, graph_sizes: Sequence[int] | None) -> None:
        """Rank 0's --cuda-graph-sizes: all ranks capture the same steps."""
        self._graph_sizes = graph_sizes

    def launch(self, plan: Plan, masks: StepMasks | None = None) -> Launched:
        """As DeviceExecutor's; steps are settled by settle_oldest alone. Raises AbandonedError where rank 0 does not
        end the step."""
        step = self._launch(plan)
        self._pending.append(step)
        return step

    def settle_oldest(self) -> None:
        """Takes in the oldest step that is not, waiting for it: rank 0's has ended, so this one's is about to."""
        self._take_in(self._pending.popleft())

    @property
    def _ranks(self) -> DeviceGroup:
        return connected(self._group())

    def _score_prompts(self, inputs: StepInputs, hidden: torch.Tensor, vocab_size: int) -> PendingScores:
        """Computes this rank's part of the logits, and hears which rows have failed."""
        runner = self._made[0]
        for tokens in pieces(inputs.scored, vocab_size):
            runner.head(hidden.index_select(0, index(tokens, self._device)))
        self._await(Kind.FAILED_SLOTS)
        self._ranks.share(runner.failed)
        return PendingScores()

    def _draw(self, logits: torch.Tensor, rows: SampleRows, masks: Masks | None, newest_ids: torch.Tensor) -> Drawn:
        self._await(Kind.DRAWN)
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        failed = torch.zeros(len(rows), dtype=torch.int32, device=logits.device)
        return Drawn(*self._share_drawn(token_ids, failed), _NONE, _NONE, None)

    def _await(self, kind: Kind) -> None:
        if not self._warming:
            self._channel.expect(kind)


def connected(group: Group | None) -> DeviceGroup:
    """Raises RuntimeError where it is not."""
    if not isinstance(group, DeviceGroup):
        raise RuntimeError("a rank on a device is connected by a group of devices")
    return group
