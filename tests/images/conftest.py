"""Images of all services, built once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.images import Images

TORCH_OF_PIP = {"TORCH_INDEX_CPU": ""}
"""torch from where pip is configured to take it from, as the tests' own environment does."""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A store with the base alone."""
    made = Images(tmp_path_factory.mktemp("images"))
    made.make_base()
    yield made
    made.buildah("rmi", "--all", "--force")


@pytest.fixture(scope="session")
def built(images: Images) -> dict[str, str]:
    """Names of the images, by service."""
    services = {"frontend": {}, "scheduler": {}, "client": {}, "executor": TORCH_OF_PIP}
    return {service: images.build(service, arguments=arguments) for service, arguments in services.items()}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of what runs in containers."""
    return tmp_path / "log"
