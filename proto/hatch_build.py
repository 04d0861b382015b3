"""Build hook: generates the Python stubs beside the .proto files. Nothing generated is committed."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface):  # type: ignore[type-arg]
    """Runs protoc (from grpcio-tools) with the message, gRPC and type-stub plugins."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        from grpc_tools import protoc

        root = Path(self.root)
        protos = sorted(str(p.relative_to(root)) for p in root.glob("triptych/**/*.proto"))
        scripts = Path(sys.executable).parent
        args = [
            "protoc",
            f"-I{root}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={root}",
            f"--grpc_python_out={root}",
            f"--mypy_out=quiet:{root}",
            f"--mypy_grpc_out=quiet:{root}",
            *(f"--plugin={name}={path}" for name, path in self._plugins(scripts).items()),
            *protos,
        ]
        if protoc.main(args) != 0:
            raise RuntimeError("protoc failed; its errors are above")

    @staticmethod
    def _plugins(scripts: Path) -> dict[str, Path]:
        """The mypy-protobuf plugins: in an isolated build they stand beside its other scripts, not always on PATH."""
        import shutil

        found = {}
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
            path = shutil.which(name) or scripts / name
            found[name] = Path(path)
        return found
