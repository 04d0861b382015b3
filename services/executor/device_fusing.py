"""Modules of a loaded model on a device replaced by ones that do the same in fewer launches (device_modules.py).

As on the CPU (fusing.py), what a module does is not told by its name: a float32 copy of the first of each kind is
compared on the CPU with a replacement of that copy, and all of that kind stay as they are where the two differ.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from services.executor.attention.contract import Scores
from services.executor.attention.reference import ReferenceStep
from services.executor.device_elementwise import Elementwise
from services.executor.device_modules import DeviceAttention, DeviceLayer, DeviceMlp, DeviceNorm, WideAngles
from services.executor.fused import Heads

Make = Callable[[torch.nn.Module, Elementwise], torch.nn.Module | None]
"""A replacement of a module, None where it has none."""

_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION_PARTS = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "dense"})
_HEAD_NORMS = ("q_norm", "k_norm")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
"""Before both parts, then after both."""
_PLAIN = (bool, int, float, str, Scores, Heads)
_NUMBERS = ("layer_idx", "layer")
_PROBE_TOKENS = 3
_TOLERANCE = 1e-4
"""Of a probe, relative to its largest value: far above rounding, far below what another formula gives."""

log = logging.getLogger(__name__)


def install(model: torch.nn.Module, elementwise: Elementwise) -> dict[str, int]:
    """Replaces what it can, from the inside out; returns how many of which class."""
    counts: dict[str, int] = {}
    for makes in ((_plain_norm, _offset_norm, _mlp), (_attention,), (_layer,)):
        for name in _replace(model, makes, elementwise):
            counts[name] = counts.get(name, 0) + 1
    _widen_angles(model)
    log.info("fused on the device: %s", ", ".join(f"{n} {name}" for name, n in counts.items()) or "nothing")
    return counts


def _replace(model: torch.nn.Module, makes: Sequence[Make], elementwise: Elementwise) -> list[str]:
    """The class of each module that was replaced."""
    replaced: list[str] = []
    classes: list[str] = []
    verdicts: dict[Hashable, bool] = {}
    # By name, since a list of modules would keep every original's weights until the last is replaced.
    for name in [name for name, _ in model.named_modules() if name]:
        if any(name.startswith(f"{parent}.") for parent in replaced):
            continue
        module = model.get_submodule(name)
        for make in makes:
            kind = (make, _kind(module))
            if kind not in verdicts:
                verdicts[kind] = _agree(module, make)
            candidate = make(module, elementwise) if verdicts[kind] else None
            if candidate is not None:
                model.set_submodule(name, candidate)
                replaced.append(name)
                classes.append(type(module).__name__)
                break
    return classes


def _plain_norm(module: torch.nn.Module, elementwise: Elementwise, offset: float = 0.0) -> torch.nn.Module | None:
    weight: Any = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or epsilon is None or weight is None or weight.ndim != 1:
        return None
    return DeviceNorm(weight.detach(), float(epsilon), offset, elementwise)


def _offset_norm(module: torch.nn.Module, elementwise: Elementwise) -> torch.nn.Module | None:
    return _plain_norm(module, elementwise, offset=1.0)


def _mlp(module: torch.nn.Module, elementwise: Elementwise) -> torch.nn.Module | None:
    parts = dict(module.named_children())
    if parts.keys() != _MLP_PARTS:
        return None
    joined, down = _joined([parts["gate_proj"], parts["up_proj"]]), parts["down_proj"]
    if joined is None or not isinstance(down, torch.nn.Linear):
        return None
    return DeviceMlp(joined, down, parts["act_fn"], elementwise)


def _attention(module: torch.nn.Module, elementwise: Elementwise) -> torch.nn.Module | None:
    parts = dict(module.named_children())
    if parts.keys() - set(_HEAD_NORMS) not in _ATTENTION_PARTS:
        return None
    out = parts.get("o_proj", parts.get("dense"))
    norms = [norm for name in _HEAD_NORMS if isinstance(norm := parts.get(name), DeviceNorm)]
    dim = int(module.head_dim)  # type: ignore[arg-type]
    if (
        not isinstance(out, torch.nn.Linear)
        or len(norms) != len(parts.keys() & set(_HEAD_NORMS))
        or len(norms) == 1
        or any(norm.width != dim for norm in norms)
        or len({(norm.epsilon, norm.offset) for norm in norms}) > 1
    ):
        return None
    joined = _joined([parts["q_proj"], parts["k_proj"], parts["v_proj"]])
    if joined is None:
        return None
    queries, every = out.weight.shape[1] // dim, len(joined.weight) // dim
    angles = int(getattr(module, "rotary_ndims", dim))  # phi's, which rotates a part of each head
    heads = Heads(queries, (every - queries) // 2, dim, angles)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return DeviceAttention(joined, out, heads, layer, _scores(module, angles), norms)


def _layer(module: torch.nn.Module, elementwise: Elementwise) -> torch.nn.Module | None:
    parts: dict[str, Any] = dict(module.named_children())
    names = parts.keys() - {"self_attn", "mlp"}
    order = next((order for order in (_NORMS, _FOUR_NORMS) if names == set(order)), None)
    if order is None or not {"self_attn", "mlp"} <= parts.keys():
        return None
    norms = {name: parts[name] for name in order}
    if not isinstance(parts["self_attn"], DeviceAttention | _AnyAttention) or not all(
        isinstance(norm, DeviceNorm) for norm in norms.values()
    ):
        return None
    if len({(norm.epsilon, norm.offset) for norm in norms.values()}) > 1:
        return None
    return DeviceLayer(parts["self_attn"], parts["mlp"], norms, elementwise)


def _joined(layers: Sequence[torch.nn.Module]) -> torch.nn.Linear | None:
    """One layer with the outputs of all."""
    linear = [layer for layer in layers if type(layer) is torch.nn.Linear]
    biases: list[torch.Tensor] = [layer.bias for layer in linear if layer.bias is not None]
    if len(linear) < len(layers) or len(biases) not in (0, len(linear)):
        return None
    weight = torch.cat([layer.weight for layer in linear])
    joined = torch.nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    joined.weight = torch.nn.Parameter(weight, requires_grad=False)
    joined.register_parameter("bias", torch.nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None)
    return joined


def _widen_angles(model: torch.nn.Module) -> None:
    """Where every layer's attention turns heads by the kernel, which takes float32."""
    attentions = [module for module in model.modules() if hasattr(module, "o_proj") or hasattr(module, "layer_idx")]
    if not attentions or not all(isinstance(module, DeviceAttention) for module in attentions):
        return
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            model.set_submodule(name, WideAngles(module, next(model.parameters()).device))


def _kind(module: torch.nn.Module) -> Hashable:
    """Class, plain settings and shapes of a module and of those in it; not which of a model's layers it is.

    What an attention does otherwise for its number shows in the scores it asks for, which its replacement holds.
    """
    return tuple((name, type(part), _settings(part), _shapes(part)) for name, part in module.named_modules())


def _settings(module: torch.nn.Module) -> Hashable:
    own = sorted((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN))
    return tuple((key, value) for key, value in own if key not in _NUMBERS)


def _shapes(module: torch.nn.Module) -> Hashable:
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple((name, tensor.shape) for name, tensor in held)


@torch.inference_mode()
def _agree(module: torch.nn.Module, make: Make) -> bool:
    """Whether a float32 copy of the module and its replacement make the same of random numbers."""
    if make(module, Elementwise()) is None:
        return False
    original = _copy(module)
    candidate = make(original, Elementwise())
    if candidate is None:
        return False
    try:
        expected, got = (_made_by(one, candidate) for one in (original, candidate))
    except (TypeError, ValueError, NotImplementedError) as error:
        log.info("%s is left as it is: it cannot be probed: %s", type(module).__name__, error)
        return False
    return bool((expected - got).abs().max() <= _TOLERANCE * expected.abs().max())


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """In float32, on the CPU; what a layer consists of is replaced by something small, since its norms are compared."""
    memo: dict[int, Any] = {}
    if isinstance(attention := getattr(module, "self_attn", None), DeviceAttention):
        memo = {id(attention): _AnyAttention(), id(module.mlp): torch.nn.Tanh()}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = torch.nn.Parameter(tensor.detach().float().cpu(), requires_grad=False)
    return copy.deepcopy(module, memo)


class _AnyAttention(torch.nn.Module):
    """In the place of a layer's own."""

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        """Anything but what the layer does."""
        return 2 * hidden_states.sin(), None


def _made_by(module: torch.nn.Module, candidate: torch.nn.Module) -> torch.Tensor:
    """What `module`, the candidate or what it stands for, makes of a probe."""
    made: torch.Tensor
    if isinstance(candidate, DeviceNorm):
        made = module(_random(1, _PROBE_TOKENS, candidate.width))
    elif isinstance(candidate, DeviceMlp):
        made = module(_random(1, _PROBE_TOKENS, candidate.gate_up.weight.shape[1]))
    elif isinstance(candidate, DeviceAttention):
        x = _random(1, _PROBE_TOKENS, candidate.qkv_proj.weight.shape[1])
        made = _attended(module, x, candidate.heads.angles)[0]
    elif isinstance(candidate, DeviceLayer):
        x = _random(1, _PROBE_TOKENS, candidate.width)
        made = module(x, attention_mask=None, position_embeddings=_angles(x, 8), attention_step=ReferenceStep())
    else:
        raise TypeError(type(candidate).__name__)
    return made


def _scores(attention: torch.nn.Module, angles: int) -> Scores:
    """How a layer asks for its scores."""
    weight: torch.Tensor = attention.get_parameter("q_proj.weight")
    with torch.inference_mode():
        return _attended(attention, weight.new_zeros(1, 1, weight.shape[1]), angles)[1]


def _attended(attention: torch.nn.Module, x: torch.Tensor, angles: int) -> tuple[torch.Tensor, Scores]:
    """What an attention module makes of x, and how it asked for its scores."""
    step = ReferenceStep()
    out = attention(hidden_states=x, position_embeddings=_angles(x, angles), attention_mask=None, attention_step=step)
    return out[0], step.scores


def _angles(x: torch.Tensor, angles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of x's tokens; both halves are the same, as in every family, and the kernel reads the first."""
    half_cos, half_sin = _random(2, x.shape[1], angles // 2).to(x)
    cos, sin = (torch.cat([half, half], dim=-1) for half in (half_cos, half_sin))
    return cos[None], sin[None]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)  # whatever the default
