"""A frontend and a scheduler need neither torch nor transformers: by their imports and by their extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_NEEDED = {
    "frontend": ["torch", "transformers", "safetensors", "numba", "gguf", "cupy"],
    "scheduler": ["torch", "transformers", "safetensors", "numba", "gguf", "cupy", "tokenizers", "jinja2"],
}


@pytest.mark.parametrize(
    ("service", "module"), [*((service, "main") for service in NOT_NEEDED), ("frontend", "adapters.vllm")]
)
def test_a_service_imports_nothing_that_is_not_its_own(service: str, module: str) -> None:
    code = f"import json, sys; import services.{service}.{module}; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(_output(sys.executable, "-c", code, cwd=ROOT))
    assert f"services.{service}.{module}" in modules
    assert not [name for name in NOT_NEEDED[service] if name in modules]
    others = [f"services.{name}" for name in ("frontend", "scheduler", "executor", "cli") if name != service]
    assert not [name for name in modules if name in others]


def test_the_schedulers_core_imports_numpy_and_the_standard_library_alone() -> None:
    code = (
        "import json, sys; before = set(sys.modules); import numpy; import services.scheduler.core.scheduler; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    modules = json.loads(_output(sys.executable, "-c", code, cwd=ROOT))
    ours = {name for name in modules if name.startswith("services.")}
    assert ours - {"services.scheduler"} == {name for name in ours if name.startswith("services.scheduler.core")}
    assert {name.partition(".")[0] for name in modules} - sys.stdlib_module_names <= {"numpy", "services"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("service", NOT_NEEDED)
def test_an_environment_of_one_extra_imports_its_service(service: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    _output(*install, str(ROOT / "proto"), f"{ROOT}[{service}]", cwd=tmp_path)
    code = (
        "import importlib.util as u, json; "
        f"import services.{service}.main as m; "
        f"print(json.dumps([m.__file__, [n for n in {NOT_NEEDED[service]!r} if u.find_spec(n)]]))"
    )
    file, found = json.loads(_output(python, "-c", code, cwd=tmp_path))
    assert Path(file).is_relative_to(tmp_path)
    assert found == []
    command = [str(tmp_path / "venv" / "bin" / "triptych"), service, "--print-config"]
    assert "host: 127.0.0.1  # default" in _output(*command, cwd=tmp_path)


def _output(*command: str, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
