"""The model's forward pass over one flat batch, and the KV tensors it reads and writes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from services.executor import direct
from services.executor.attention.contract import AttentionBackend, AttentionStep, KvCache, Needs, StepShape
from services.executor.batch import StepInputs
from services.executor.loader import Checkpoint
from services.executor.plan import Int64s


class ModelRunner:
    """Runs a checkpoint's model. Used by the step thread alone."""

    def __init__(self, checkpoint: Checkpoint, backend: AttentionBackend, needs: Needs) -> None:
        self._model = checkpoint.model
        self._layers = checkpoint.shape.layers
        self._backend = backend
        self._needs = needs
        self._cache: KvCache | None = None
        self._direct = direct.of(checkpoint.model)

    @property
    def model_type(self) -> str:
        """The family, by config.json's name."""
        return str(self._model.config.model_type)

    def allocate(self, num_blocks: int) -> None:
        """Makes KV tensors of `num_blocks` blocks."""
        self._cache = self._backend.allocate(self._needs, self._layers, num_blocks)

    def copy_blocks(self, copies: Int64s) -> None:
        """Copies keys and values of all layers; `copies` is [n, 2] (source, destination), all sources read first."""
        if copies.size:
            self._allocated().copy_blocks(*torch.from_numpy(copies.T.copy()))

    def forward(self, inputs: StepInputs, tables: npt.NDArray[np.int32]) -> torch.Tensor:
        """Computes every row's tokens, writes their KV, and returns logits [sampling rows, vocab].

        They are valid until the next step.
        """
        step, last_tokens = self._begin(inputs, tables)
        if self._direct is None or not self._direct.takes(step):
            return self._through_model(inputs, last_tokens, step)
        if self._direct.is_trusted:
            return self._direct.logits(inputs, last_tokens, step)
        logits = self._through_model(inputs, last_tokens, step)
        if not self._direct.is_same(logits, inputs, last_tokens, step):
            self._direct = None
        return logits

    def _begin(self, inputs: StepInputs, tables: npt.NDArray[np.int32]) -> tuple[AttentionStep, Int64s]:
        """A step's rows as attention sees them, and which of its tokens are sampled from."""
        shape = StepShape(
            tables=torch.from_numpy(tables),
            slots=torch.from_numpy(inputs.slots),
            query_starts=torch.from_numpy(inputs.query_starts),
            contexts=torch.from_numpy(inputs.contexts),
        )
        return self._allocated().begin(shape), inputs.query_starts[inputs.sampling_rows + 1] - 1

    def _through_model(self, inputs: StepInputs, last_tokens: Int64s, step: AttentionStep) -> torch.Tensor:
        """By the model's own forward."""
        output = self._model(
            input_ids=torch.from_numpy(inputs.token_ids)[None],
            position_ids=torch.from_numpy(inputs.positions)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(last_tokens),
            attention_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def forward_with_hidden(
        self, inputs: StepInputs, tables: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and the hidden states [tokens, hidden] that `head` makes logits of."""
        step, last_tokens = self._begin(inputs, tables)
        with self._hidden() as kept:
            logits = self._through_model(inputs, last_tokens, step)
        return logits, kept[0]

    @contextmanager
    def _hidden(self) -> Iterator[list[torch.Tensor]]:
        """What the model's body returns meanwhile, [tokens, hidden] a call."""
        kept: list[torch.Tensor] = []
        hook = self._model.base_model.register_forward_hook(lambda *call: kept.append(call[-1].last_hidden_state[0]))
        try:
            yield kept
        finally:
            hook.remove()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of hidden states [rows, hidden], by the family's own last layer and soft cap.

        The model's own forward is run with a body that has its answer ready, since families differ in what follows it.
        """
        ready = copy.copy(self._model)
        ready._modules = self._model._modules | {self._model.base_model_prefix: _Ready(hidden[None])}
        logits: torch.Tensor = ready.forward(use_cache=False).logits[0]
        return logits

    def _allocated(self) -> KvCache:
        if self._cache is None:
            raise RuntimeError("a step before allocate")
        return self._cache


class _Ready(torch.nn.Module):
    """A body that has run already."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._output = MoeModelOutputWithPast(last_hidden_state=hidden)  # the widest: it lacks no field that is read

    def forward(self, *args: object, **options: object) -> MoeModelOutputWithPast:
        return self._output
