"""All layers of a model as one module: a decode step goes through them in one compiled call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from kernels.cpu import decode, tile
from kernels.cpu.paged_attention import get_num_threads
from services.executor.attention.contract import AttentionStep
from services.executor.attention.cpu import CpuStep
from services.executor.fused import Angles, FusedLayer, FusedMlp, FusedNorm
from services.executor.packing import PackedLinear
from services.executor.scratch import Scratch


class FusedStack(torch.nn.Module):
    """Layers that are alike, one after the other; stands in their list as the only one.

    All get the same position embeddings. What is no decode of few rows, or runs on another attention backend than the
    CPU's, goes from layer to layer.
    """

    def __init__(self, layers: Sequence[FusedLayer], scratch: Scratch) -> None:
        """Raises ValueError where layers differ in what `fits` asks for."""
        super().__init__()
        if not fits(layers):
            raise ValueError("these layers are not alike, or have parts that the decode kernel does not know")
        self.layers = torch.nn.ModuleList(layers)
        self._heads = layers[0].self_attn.heads
        self._inner = layers[0].mlp.down_proj.weights.depth
        self._weights = _weights(layers)
        self._counters = decode.counters(len(layers))
        self._threads = get_num_threads()
        self._scratch = scratch

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Angles,
        attention_step: AttentionStep,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, width] float32, contiguous; it is changed to the result, and returned."""
        step = attention_step
        if isinstance(step, CpuStep) and step.is_decode and step.tokens <= decode.MOST_ROWS:
            self._decode(hidden_states[0].numpy(), position_embeddings, step)
            return hidden_states
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings, attention_step=step, **others)
        return hidden_states

    def _decode(self, x: np.ndarray, angles: Angles, step: CpuStep) -> None:
        cos, sin = (one[0].numpy() for one in angles)
        decode.run(x, self._weights, step.cache.whole, step.rows, cos, sin, self._between(len(x)), self._threads)

    def _between(self, rows: int) -> decode.Buffers:
        heads = self._heads
        widths = {"projected": heads.queries + 2 * heads.kv, "queries": heads.queries, "attended": heads.queries}
        by_head = (
            self._scratch.take(purpose, rows, count * heads.dim).array.reshape(rows, count, heads.dim)
            for purpose, count in widths.items()
        )
        return decode.Buffers(*by_head, self._scratch.take("inner", rows, self._inner).array, self._counters)


def fits(layers: Sequence[FusedLayer]) -> bool:
    """Whether the decode kernel computes what these do: alike, in order, packed in one type, two norms, SiLU."""
    return (
        len({_traits(layer) for layer in layers}) == 1
        and [layer.self_attn.layer for layer in layers] == list(range(len(layers)))
        and all(_is_known(layer) for layer in layers)
    )


def _is_known(layer: FusedLayer) -> bool:
    mlp, width = layer.mlp, layer.width
    if not isinstance(mlp, FusedMlp) or not mlp.is_silu or layer.norms.after_attention or layer.norms.after_mlp:
        return False
    products = _products(layer)
    return (
        all(type(one) is PackedLinear for one in products)  # a rank's must meet those of others
        and len({one.weights.panels.dtype for one in products}) == 1
        and layer.self_attn.o_proj.weights.outputs == mlp.down_proj.weights.outputs == width
        and mlp.gate_up.weights.outputs == 2 * mlp.down_proj.weights.depth
        and mlp.down_proj.weights.depth % tile.OUTPUTS == 0
    )


def _traits(layer: FusedLayer) -> Hashable:
    attention, mlp, norms = layer.self_attn, layer.mlp, layer.norms
    if not isinstance(mlp, FusedMlp):
        return None
    return (
        attention.heads,
        attention.q_norm and attention.q_norm.epsilon,
        (norms.before_attention.epsilon, norms.before_mlp.epsilon),
        tuple((one.weights.panels.shape, one.weights.panels.dtype, one.weights.outputs) for one in _products(layer)),
    )


def _products(layer: FusedLayer) -> tuple[PackedLinear, ...]:
    return layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up, layer.mlp.down_proj


def _weights(layers: Sequence[FusedLayer]) -> decode.Weights:
    attentions = [layer.self_attn for layer in layers]
    products = [_products(layer) for layer in layers]
    has_bias = any(one.bias is not None for layer in products for one in layer)
    q_norm = attentions[0].q_norm
    by_head = [(one.q_norm, one.k_norm) for one in attentions]
    return decode.Weights(
        panels=products[0][0].weights.panels,
        addresses=np.array([[one.weights.panels.ctypes.data for one in layer] for layer in products]),
        biases=np.stack([_biases(layer) for layer in products]) if has_bias else np.zeros((len(layers), 0), np.float32),
        gains=_gains([(layer.norms.before_attention, layer.norms.before_mlp) for layer in layers]),
        epsilon=np.float32(layers[0].norms.before_attention.epsilon),
        head_gains=np.zeros((len(layers), 2, 0), np.float32) if q_norm is None else _gains(by_head),
        head_epsilon=np.float32(0 if q_norm is None else q_norm.epsilon),
        scales=np.array([one.scores.scale for one in attentions], np.float32),
        windows=np.array([one.scores.window_tokens or 0 for one in attentions]),
        caps=np.array([one.scores.soft_cap or 0 for one in attentions], np.float32),
    )


def _gains(norms: Sequence[tuple[FusedNorm, FusedNorm]]) -> np.ndarray:
    return np.stack([np.stack([norm.weight.numpy() for norm in pair]) for pair in norms])


def _biases(products: Sequence[PackedLinear]) -> np.ndarray:
    """Of all outputs, one product after the other; 0 where there is none."""
    dense = [np.zeros(one.weights.outputs, np.float32) if one.bias is None else one.bias.numpy() for one in products]
    return np.concatenate(dense)
