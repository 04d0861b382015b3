"""Images built for real with buildah, without a registry and without Docker: Debian, as root.

The base is a small Debian with Python, made by mmdebstrap. pip inside a build is configured as pip outside is: what
`pip config list` tells goes in as the secret `pip.conf`, folders that it names as volumes, certificates as `ca.crt`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import certifi

ROOT = Path(__file__).parents[2]
BASE = "localhost/python-base:test"
TOOLS = ("buildah", "mmdebstrap")
CA_IN_BUILD = "/run/secrets/ca.crt"


@dataclass(frozen=True)
class Images:
    """A store of images below `folder`."""

    folder: Path

    def make_base(self) -> None:
        """Debian, Python, and certificates."""
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise RuntimeError(f"{', '.join(missing)} not found; `make test-tools` installs it (Debian, as root)")
        self.folder.mkdir(parents=True, exist_ok=True)
        tar = self.folder / "base.tar"
        packages = "--include=python3,python3-venv,ca-certificates"
        _run(["mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", str(tar)])
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(tar), "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        tar.unlink()

    def build(self, service: str, *, target: str = "", arguments: Mapping[str, str] | None = None) -> str:
        """Builds docker/SERVICE.Dockerfile and returns the image's name."""
        name = f"localhost/triptych-{service}:{target or 'test'}"
        command = ["bud", "--isolation", "chroot", "--pull-never", "--network", "host", "--tag", name]
        command += ["--file", str(ROOT / "docker" / f"{service}.Dockerfile"), *self._pip()]
        for key, value in {"BASE": BASE, **(arguments or {})}.items():
            command += ["--build-arg", f"{key}={value}"]
        if target:
            command += ["--target", target]
        self.buildah(*command, str(ROOT))
        return name

    def config(self, name: str) -> dict[str, object]:
        """What the image says of itself: user, entrypoint, labels, environment."""
        told = json.loads(self.buildah("inspect", "--type", "image", name))
        config: dict[str, object] = told["OCIv1"]["config"]
        return config

    def size_bytes(self, name: str) -> int:
        """Of all its layers."""
        (image,) = [one for one in json.loads(self.buildah("images", "--json")) if name in (one["names"] or [])]
        return round(
            float(image["size"].split()[0]) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[image["size"].split()[1]]
        )

    def buildah(self, *arguments: str) -> str:
        """Standard output."""
        return _run([*self.command, *arguments])

    @property
    def command(self) -> list[str]:
        """Of buildah, with this store."""
        store = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        return ["buildah", "--storage-driver", "vfs", *store]

    def _pip(self) -> list[str]:
        secret = self.folder / "pip.conf"
        folders = _pip_configuration(secret)
        certificates = os.environ.get("SSL_CERT_FILE") or certifi.where()
        flags = ["--secret", f"id=pip.conf,src={secret}", "--secret", f"id=ca.crt,src={certificates}"]
        for folder in folders:
            flags += ["--volume", f"{folder}:{folder}:ro"]
        return flags


class Container:
    """A container of an image, with its processes; its network is the machine's."""

    def __init__(self, images: Images, image: str, user: str) -> None:
        self._images, self._user = images, user
        self.name = images.buildah("from", "--pull-never", image).strip()
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs to its end."""
        return subprocess.run(self._command(command, (), environment), capture_output=True, text=True)

    def start(self, log: Path, *command: str, volumes: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Runs beside the test; both outputs go to `log`."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                self._command(command, volumes, None), stdout=file, stderr=file, start_new_session=True
            )
        self._running.append(process)
        return process

    def close(self) -> None:
        """Ends what was started, and takes the container away."""
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._images.buildah("rm", self.name)

    def _command(
        self, command: Sequence[str], volumes: Sequence[str], environment: Mapping[str, str] | None
    ) -> list[str]:
        flags = ["run", "--isolation", "chroot", "--user", self._user]
        for volume in volumes:
            flags += ["--volume", volume]
        for key, value in (environment or {}).items():
            flags += ["--env", f"{key}={value}"]
        return [*self._images.command, *flags, self.name, "--", *command]


def _pip_configuration(file: Path) -> set[Path]:
    """Writes pip's configuration of this machine as pip.conf; returns the folders that it names."""
    listed = _run([sys.executable, "-m", "pip", "config", "list"])
    lines, folders = ["[global]"], set()
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        found = re.fullmatch(r"(?:global|:env:)\.([a-z-]+)=(.*)", line)
        if found is not None:
            settings[found[1]] = str(ast.literal_eval(found[2]))
    settings["cert"] = CA_IN_BUILD
    for key, value in settings.items():
        lines.append(f"{key} = {value}".replace("\n", "\n    "))
        if key in ("find-links", "index-url", "extra-index-url"):
            paths = [Path(word.removeprefix("file://")) for word in value.split() if word.startswith(("/", "file:///"))]
            folders |= {path for path in paths if path.is_dir() and key == "find-links"}
            # An index of files points to what lies beside it.
            folders |= {path.parent for path in paths if path.is_dir() and key != "find-links"}
    file.write_text("\n".join(lines) + "\n")
    return folders


def _run(command: Sequence[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
        )
    return ended.stdout
