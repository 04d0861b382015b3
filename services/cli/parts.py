"""What the commands are made of, imported late: `triptych chat` needs no torch, and a missing extra has a name."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from services.common.config import ServiceConfig
from services.common.errors import StartError

OWN_PACKAGES = ("services", "kernels", "loadtest")


def part(module: str, *, extra: str, what: str) -> ModuleType:
    """Imports a module of ours. Raises StartError naming the extra where something it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error, extra=extra, what=what) from error


def missing(error: ModuleNotFoundError, *, extra: str, what: str) -> Exception:
    """The error to raise for a module that is not there: the extra to install, or, for one of ours, itself."""
    if (error.name or "").split(".")[0] in OWN_PACKAGES:
        return error
    return StartError(f"{what} needs its extra: pip install 'triptych[{extra}]' ({error.name} is not installed)")


def config_type(service: str) -> type[ServiceConfig]:
    """The config schema of a service."""
    module = part(f"services.{service}.config", extra=service, what=f"the {service}")
    (found,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceConfig) and value is not ServiceConfig
    ]
    return found


def shell_name(command: str) -> str:
    """How the user's shell reaches a command of this environment: by name where PATH leads here, else by path."""
    beside = Path(sys.executable).parent / command
    found = shutil.which(command)
    if not beside.exists() or (found is not None and Path(found).parent == beside.parent):
        return command
    here = Path.cwd()
    return str(beside.relative_to(here)) if beside.is_relative_to(here) else os.fspath(beside)
