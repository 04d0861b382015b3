"""Which tensors of a model are held packed for the CPU's kernels, and the modules that compute with them.

Every torch.nn.Linear, and the input embedding, whose rows are gathered from the same packed weights, so that tied
embeddings are held once. All other tensors (norms, biases, experts fused into one tensor) stay dense.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kernels.cpu import compact, linear
from kernels.cpu.paged_attention import get_num_threads

ARITHMETIC = torch.float32
"""What packed weights are computed in; a model served in another dtype stays dense."""


def packable(model: PreTrainedModel, dtype: torch.dtype) -> frozenset[str]:
    """Names of the weights that are packed when `model` is served in `dtype`."""
    if dtype != ARITHMETIC:
        return frozenset()
    embedding = model.get_input_embeddings()
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear or (module is embedding and gathers(embedding))
    )


def held_bytes(shape: torch.Size, dtype: torch.dtype, *, packed: bool, bfloat16: bool) -> int:
    """Bytes that a tensor takes which the files hold as bfloat16 or not, in a model served in `dtype`.

    Where it becomes compact, these may be less than it takes then: by its outliers, or by a third where it cannot.
    """
    if packed and bfloat16 and compact.fits(shape[1]):
        return compact.compact_bytes(shape[0], shape[1])
    if packed:
        return linear.packed_bytes(shape[0], shape[1], torch.bfloat16.itemsize if bfloat16 else dtype.itemsize)
    return shape.numel() * dtype.itemsize


def pack(weight: torch.Tensor) -> linear.Packed:
    """A copy of a weight [outputs, inputs]: of bfloat16 to the bit, compact if it can be, of any other as float32."""
    if weight.dtype == torch.bfloat16:
        return compact.pack(weight.view(torch.uint16).numpy())
    return linear.pack(weight.to(ARITHMETIC).numpy())


def install(model: PreTrainedModel, packed: Mapping[str, linear.Packed]) -> None:
    """Replaces the modules whose weights, by name, are `packed`; call it once all other tensors are in place."""
    for name, weights in packed.items():
        module_name = name.removesuffix(".weight")
        module = model.get_submodule(module_name)
        if isinstance(module, torch.nn.Embedding):
            model.set_submodule(module_name, PackedEmbedding(weights, getattr(module, "embed_scale", None)))
        else:
            model.set_submodule(module_name, PackedLinear(weights, module.bias))


class PackedLinear(torch.nn.Module):
    """torch.nn.Linear over packed weights, in float32. A row's result does not depend on the other rows, to the bit."""

    def __init__(self, weights: linear.Packed, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.weights = weights
        self.panels = torch.nn.Buffer(torch.from_numpy(weights.panels))
        self.bias = bias
        self._bias = None if bias is None else bias.detach().numpy()
        self._threads = get_num_threads()  # asking takes as long as a small product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] float32 -> [..., outputs]."""
        rows = x.reshape(-1, self.weights.depth).contiguous()
        out = torch.empty(len(rows), self.weights.outputs)
        self.compute(rows.numpy(), out.numpy())
        return out.view(*x.shape[:-1], self.weights.outputs)

    def compute(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """x [rows, inputs], out [rows, outputs], both C-contiguous."""
        compact.multiply(x, self.weights, self._bias, out, self._threads)


class PackedEmbedding(torch.nn.Module):
    """torch.nn.Embedding over packed weights; what it returns is multiplied by `scale`, where there is one."""

    def __init__(self, weights: linear.Packed, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.weights = weights
        self.panels = torch.nn.Buffer(torch.from_numpy(weights.panels))
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] int64, each within the vocabulary -> [..., embedding] float32."""
        out = torch.empty(*ids.shape, self.weights.depth)
        self.gather(ids.reshape(-1).numpy(), out.view(-1, self.weights.depth).numpy())
        return out if self.scale is None else out * self.scale.to(ARITHMETIC)

    def gather(self, ids: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """ids [n], out [n, embedding], not scaled. Raises IndexError for an id that there is not."""
        compact.gather(self.weights, ids, out)


def gathers(embedding: torch.nn.Module) -> bool:
    """Whether it returns rows of its weight as they are, or, by transformers' convention, times its embed_scale."""
    return type(embedding) is torch.nn.Embedding or type(embedding).__name__.endswith("TextScaledWordEmbedding")
