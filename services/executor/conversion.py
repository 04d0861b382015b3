"""Which tensors of a checkpoint's files make which tensor of the model, by transformers' own mapping.

Files keep the names they were published with, such as one tensor an expert; a model may hold them renamed or fused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from services.common.errors import StartError

_RECOMPUTED = r"rotary_emb\.inv_freq"
"""Old checkpoints hold these; they follow from the config."""

Fetch = Callable[[str], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Recipe:
    """How one tensor of the model is made out of tensors of the files."""

    target: str
    sources: tuple[str, ...]
    """Names in the files, in the order in which they are joined."""
    patterns: tuple[str, ...] = ()
    """The converter's pattern that each source is of; empty without a converter."""
    converter: WeightConverter | None = None

    def make(self, model: PreTrainedModel, fetch: Fetch) -> torch.Tensor:
        """The tensor, of what `fetch` returns for each source. Raises StartError for parts that do not fit together."""
        if self.converter is None:
            return fetch(self.sources[0])
        transform = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            transform.add_tensor(self.target, source, pattern, partial(fetch, source))
        made: torch.Tensor
        try:
            (made,) = transform.convert(self.target, model=model, config=model.config).values()
        except (RuntimeError, ValueError, KeyError) as error:
            raise StartError(
                f"{self.target} cannot be made of {len(self.sources)} tensors, the first being {self.sources[0]}:"
                f" {' '.join(str(error).split())[:300]}"
            ) from error
        return made


def plan(model: PreTrainedModel, names: Collection[str]) -> tuple[dict[str, Recipe], list[str]]:
    """Recipes by target for the tensors `names` of the files, and those of `names` that the model has no place for.

    Raises StartError where two tensors claim one place, or for a mapping that splits tensors.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    if split := [one for one in converters if len(one.target_patterns) > 1]:
        raise StartError(f"the files' {split[0].source_patterns} would have to be split, which is not served yet")
    places = model.state_dict()
    found: dict[str, list[tuple[str, str | None]]] = {}
    unexpected: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if target not in places and name in places:
            target, pattern = name, None
        if target in places:
            found.setdefault(target, []).append((name, pattern))
        elif not _ignored(model, name):
            unexpected.append(name)
    return {target: _recipe(target, sources, by_pattern) for target, sources in found.items()}, unexpected


def _recipe(target: str, sources: list[tuple[str, str | None]], converters: dict[str, WeightConverter]) -> Recipe:
    names = tuple(name for name, _ in sources)
    patterns = tuple(pattern for _, pattern in sources if pattern is not None)
    if not patterns and len(names) == 1:
        return Recipe(target, names)
    if len(patterns) < len(names):
        raise StartError(f"the weights hold {target} more than once: {', '.join(names[:3])}")
    return Recipe(target, names, patterns, converters[patterns[0]])


def _ignored(model: PreTrainedModel, name: str) -> bool:
    """Whether the family's old checkpoints hold this for nothing."""
    patterns = {_RECOMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())}
    return any(re.search(pattern, name) for pattern in patterns)
