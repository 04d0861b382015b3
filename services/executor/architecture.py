"""Which models are served, read from config.json before any weight: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from services.common.errors import StartError

MODEL_TYPES = frozenset({"llama"})
"""config.json's model_type of the families served."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Position encodings whose angles depend on the position alone. "dynamic" and "longrope" depend on the longest row of
the batch, so a request's ids would depend on its neighbours."""


@dataclass(frozen=True)
class Architecture:
    """The figures that the KV tensors and the batch are sized by."""

    vocab_size: int
    context_tokens: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def kv_block_bytes(self, block_tokens: int, element_bytes: int) -> int:
        """Bytes of one block: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * block_tokens * self.head_dim * element_bytes


def read(path: Path) -> PreTrainedConfig:
    """The checkpoint's config. Raises StartError with the reason where the model is not served; runs no remote code."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise StartError(f"cannot read {path / 'config.json'}: {_one_line(error)}") from error
    if config.model_type not in MODEL_TYPES:
        raise StartError(f"{path} is of model_type {config.model_type!r}; served now: {', '.join(sorted(MODEL_TYPES))}")
    if getattr(config, "quantization_config", None) is not None:
        raise StartError(f"{path} holds quantized weights (quantization_config); serve an unquantized checkpoint")
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise StartError(f"{path} has rope_type {rope_type!r}; served now: {', '.join(sorted(ROPE_TYPES))}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise StartError(
            f"{path} has {config.num_attention_heads} query heads on {config.num_key_value_heads} kv heads;"
            " the first must be a multiple of the second"
        )
    config.pad_token_id = None  # rows are not padded, so what it names, if anything, must not matter
    return config


def figures(config: PreTrainedConfig) -> Architecture:
    """Sizes out of a config that `read` returned; its head_dim wins over hidden_size / heads."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
