"""Which models are served, read from config.json before any weight: the one place that says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from services.common.errors import StartError

MODEL_TYPES = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "phi",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""config.json's model_type of the families served: those whose ids are compared with transformers' in the tests."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Position encodings whose angles depend on the position alone. "dynamic" and "longrope" depend on the longest row of
the batch, so a request's ids would depend on its neighbours."""

_RECURRENT_LAYERS = ("conv", "linear", "mamba")
_RECURRENT_TYPES = ("lfm2", "mamba", "rwkv", "xlstm")
"""Parts of the names, of kinds of layers and of model types, that tell of a state beside keys and values."""
_OTHER_MODALITIES = ("audio_config", "speech_config", "vision_config", "vq_config")
_SINKS = frozenset({"gpt_oss"})


@dataclass(frozen=True)
class Architecture:
    """The figures that the KV tensors and the batch are sized by, and what attention must be able to do."""

    vocab_size: int
    context_tokens: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: bool = False
    """Some layers see a limited number of tokens."""
    soft_caps: bool = False
    """Scores are bent by a tanh."""


def read(path: Path) -> PreTrainedConfig:
    """The checkpoint's config; no remote code is run. Raises StartError with the reasons where it is not served."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise StartError(f"cannot read {path / 'config.json'}: {_one_line(error)}") from error
    reasons = list(_of_another_kind(config))
    if not reasons and config.model_type not in MODEL_TYPES:
        reasons.append("that family is not among those tested")
    if reasons:
        raise StartError(
            f"{path} is of model_type {config.model_type!r}: {'; '.join(reasons)};"
            f" served now: {', '.join(sorted(MODEL_TYPES))}"
        )
    if reasons := list(_out_of_reach(config)):
        raise StartError(f"{path} cannot be served: {'; '.join(reasons)}")
    config.pad_token_id = None  # rows are not padded, so what it names, if anything, must not matter
    return config


def figures(config: PreTrainedConfig) -> Architecture:
    """Sizes out of a config that `read` returned; its head_dim wins over hidden_size / heads."""
    return Architecture(
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=_kv_heads(config),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        windows=_window(config) is not None,
        soft_caps=_soft_cap(config) is not None,
    )


def _of_another_kind(config: PreTrainedConfig) -> Iterator[str]:
    """Why a whole kind of models is not served."""
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model, and only decoders are served"
    if any(getattr(config, part, None) is not None for part in _OTHER_MODALITIES):
        yield "it reads more than text (images or sound), and only text is served"
    layers = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if recurrent := sorted(kind for kind in layers if any(word in kind for word in _RECURRENT_LAYERS)):
        yield f"its {', '.join(recurrent)} layers keep a state that is not served"
    elif any(word in config.model_type for word in _RECURRENT_TYPES):
        yield "its layers keep a recurrent state (mamba, linear attention or the like) that is not served"
    if getattr(config, "kv_lora_rank", None):
        yield "its latent attention (MLA) has keys and values of different sizes, which is not served"
    if config.model_type in _SINKS:
        yield "its attention has sinks, which are not served"


def _out_of_reach(config: PreTrainedConfig) -> Iterator[str]:
    """Why a checkpoint of a served family is not served."""
    if getattr(config, "quantization_config", None) is not None:
        yield "it holds quantized weights (quantization_config); serve an unquantized checkpoint"
    for rope_type in sorted(_rope_types(config) - ROPE_TYPES):
        yield f"it has rope_type {rope_type!r}; served now: {', '.join(sorted(ROPE_TYPES))}"
    heads, kv_heads = config.num_attention_heads, _kv_heads(config)
    if heads % kv_heads:
        yield f"it has {heads} query heads on {kv_heads} kv heads; the first must be a multiple of the second"
    if not getattr(config, "head_dim", None) and config.hidden_size % heads:
        yield f"hidden_size {config.hidden_size} is not a multiple of its {heads} heads, and there is no head_dim"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its tokens see later ones (use_bidirectional_attention); only causal models are served"
    if (window := _window(config)) is not None and window < 1:
        yield f"sliding_window is {window}; a token must see itself, so 1 or more, or null"
    if (cap := _soft_cap(config)) is not None and not cap > 0:
        yield f"attn_logit_softcapping is {cap}; it must be above 0, or null"


def _kv_heads(config: PreTrainedConfig) -> int:
    """Of its own number where the family knows one; otherwise a kv head a query head."""
    kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return kv_heads


def _window(config: PreTrainedConfig) -> int | None:
    """Tokens that a layer with a window sees; None: there is no such layer."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    return getattr(config, "sliding_window", None)


def _soft_cap(config: PreTrainedConfig) -> float | None:
    return getattr(config, "attn_logit_softcapping", None)


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Of all layers; some families have their parameters by kind of layer."""
    parameters: dict[str, Any] = config.rope_parameters or {}
    by_kind = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in by_kind or [parameters]}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
