"""A decode step without transformers' forward, which takes longer around the layers than a small model's head does.

For models whose body is an embedding, rotation, one stack of layers and a norm, below a plain head. Whether that is all
a family does is not told by its modules: the first decode step is computed both ways, and where one bit of its logits
differs, the model's own forward stays.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from services.executor.attention.contract import AttentionStep
from services.executor.batch import StepInputs
from services.executor.fused import FusedNorm
from services.executor.packing import PackedEmbedding, PackedLinear
from services.executor.plan import Int64s
from services.executor.scratch import Scratch
from services.executor.stack import FusedStack


class DirectDecode:
    """The parts of one model. Used by the step thread alone."""

    def __init__(
        self,
        embedding: PackedEmbedding,
        rotation: torch.nn.Module,
        stack: FusedStack,
        norm: FusedNorm,
        head: PackedLinear,
    ) -> None:
        self._embedding = embedding
        self._rotation = rotation
        self._stack = stack
        self._norm = norm
        self._head = head
        self._scratch = Scratch()
        self.is_trusted = False
        """Whether it has been compared, and is the same."""

    def takes(self, step: AttentionStep) -> bool:
        """Whether it computes such a step."""
        return self._stack.takes(step)

    def logits(self, inputs: StepInputs, last_tokens: Int64s, step: AttentionStep) -> torch.Tensor:
        """Logits [last tokens, vocab]; overwritten by the next step."""
        tokens, width = len(inputs.token_ids), self._norm.width
        x = self._scratch.take("x", tokens, width)
        self._embedding.gather(inputs.token_ids, x.array)
        if self._embedding.scale is not None:
            x.tensor.mul_(self._embedding.scale.float())
        angles = self._rotation(x.tensor[None], torch.from_numpy(inputs.positions)[None])
        self._stack(x.tensor[None], position_embeddings=angles, attention_step=step)
        normed = self._scratch.take("normed", len(last_tokens), width)
        self._norm.compute(x.array[last_tokens], normed.array)
        logits = self._scratch.take("logits", len(last_tokens), self._head.weights.outputs)
        self._head.compute(normed.array, logits.array)
        return logits.tensor

    def is_same(self, expected: torch.Tensor, inputs: StepInputs, last_tokens: Int64s, step: AttentionStep) -> bool:
        """Whether it makes the same of a step that the model's own forward made `expected` of; it is trusted then."""
        self.is_trusted = torch.equal(expected, self.logits(inputs, last_tokens, step))
        return self.is_trusted


def of(model: PreTrainedModel) -> DirectDecode | None:
    """None for a model of other parts; those of a rank must meet those of others. None for one whose forward has hooks,
    too: they are to be called."""
    if model._forward_hooks or model._forward_pre_hooks:
        return None
    body = model.base_model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers, norm, rotation = (getattr(body, name, None) for name in ("layers", "norm", "rotary_emb"))
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) != 1 or not isinstance(rotation, torch.nn.Module):
        return None
    if not isinstance(layers[0], FusedStack) or not isinstance(norm, FusedNorm):
        return None
    if not (type(embedding) is PackedEmbedding and type(head) is PackedLinear):
        return None
    return DirectDecode(embedding, rotation, layers[0], norm, head)
