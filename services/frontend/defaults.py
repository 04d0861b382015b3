"""What an unset sampling field means: the checkpoint's generation_config.json, else the contract's documented value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import RequestError, StartError
from services.frontend.request import Sampling
from services.frontend.validation import check_sampling

_MODELS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}


def sampling_defaults(generation: Mapping[str, Any]) -> Sampling:
    """Reads generation_config.json's fields; `do_sample: false` means temperature 0. Raises StartError."""
    found: dict[str, Any] = {}
    for name, kind in _MODELS.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise StartError(f"generation_config.json: {name} is {value!r}, a number is needed")
        found[name] = kind(value)
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    sampling = Sampling(**found)
    try:
        check_sampling(sampling, path="generation_config.json")
    except RequestError as error:
        raise StartError(error.message) from error
    return sampling
