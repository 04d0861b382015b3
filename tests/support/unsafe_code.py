"""Finds code that runs what it reads: pickle in its forms, eval and exec, loaders of YAML that make objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator

MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
CALLS = frozenset(
    {
        "eval",
        "exec",
        "torch.load",
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.unsafe_load",
        "torch.hub.load",
    }
)
OBJECT_COLLECTIVES = frozenset(
    {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"}
)
"""Of torch.distributed: they pickle what they carry."""
FORBIDDEN_ARGUMENTS = frozenset({"allow_pickle", "trust_remote_code"})


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _module(alias.name) in MODULES)
        elif isinstance(node, ast.ImportFrom) and _module(node.module or "") in MODULES:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.ImportFrom) and node.module in ("yaml", "torch"):
            wanted = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from ((node.lineno, name) for name in sorted(wanted & CALLS))
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = _dotted(node.func)
    if name in CALLS or name.rpartition(".")[2] in OBJECT_COLLECTIVES:
        yield node.lineno, name
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg in FORBIDDEN_ARGUMENTS and not is_off:
            yield node.lineno, str(keyword.arg)


def _module(name: str) -> str:
    return name.partition(".")[0]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
