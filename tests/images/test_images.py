"""The images, built and run for real."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.checkpoint import EMBEDDED_MODEL, fetched_path
from tests.support.checkpoints import reference_ids
from tests.support.cluster import free_port
from tests.support.images import BASE, Container, Images

pytestmark = [pytest.mark.slow, pytest.mark.one_shard, pytest.mark.timeout(3600)]

ANY_USER = "12345:0"
"""As OpenShift gives them: a user that no file knows, of group 0."""
MODEL = f"/models/{EMBEDDED_MODEL}"
COMPILERS = ("gcc", "cc", "g++", "c++", "clang", "nvcc", "make", "ld", "pip", "pip3")


@pytest.fixture
def containers(images: Images) -> Iterator[list[Container]]:
    """To be closed after the test."""
    open_: list[Container] = []
    yield open_
    for one in open_:
        one.close()


def test_an_image_is_small_where_it_has_no_torch(images: Images, built: dict[str, str]) -> None:
    base = images.size_bytes(BASE)
    sizes = {service: (images.size_bytes(name) - base) / 1e6 for service, name in built.items()}
    print(f"\nMB without the base: {sizes}")
    assert sizes["frontend"] < 250
    assert sizes["scheduler"] < 250


def test_an_image_runs_as_a_numbered_user_and_starts_its_service(images: Images, built: dict[str, str]) -> None:
    for service, name in built.items():
        config = images.config(name)
        assert config["User"] == "65532:65532"
        assert config["Entrypoint"] == (["triptych"] if service == "client" else ["triptych", service])
        labels = config["Labels"]
        assert isinstance(labels, dict)
        assert labels["org.opencontainers.image.title"] == f"triptych-{service}"
        assert {f"org.opencontainers.image.{key}" for key in ("licenses", "revision", "version", "description")} <= set(
            labels
        )


def test_an_image_has_no_compiler_no_pip_and_its_own_extra_alone(
    images: Images, built: dict[str, str], containers: list[Container]
) -> None:
    foreign = {
        "frontend": ["torch", "transformers", "safetensors", "numba", "gguf", "triptych_client"],
        "scheduler": ["torch", "transformers", "tokenizers", "jinja2", "numba", "triptych_client"],
        "executor": ["cupy", "llguidance", "pytest", "triptych_client"],
        "client": ["torch", "tokenizers", "llguidance", "numpy"],
    }
    for service, name in built.items():
        container = Container(images, name, ANY_USER)
        containers.append(container)
        found = container.run("sh", "-c", f"for name in {' '.join(COMPILERS)}; do command -v $name; done; true")
        assert found.stdout == "", service
        code = f"from importlib.util import find_spec; print([name for name in {foreign[service]} if find_spec(name)])"
        assert container.run("python3", "-c", code).stdout.strip() == "[]", service


def test_P6_a_random_user_writes_to_the_cache_and_temporary_folders_alone(
    images: Images, built: dict[str, str], containers: list[Container]
) -> None:
    for name in built.values():
        container = Container(images, name, ANY_USER)
        containers.append(container)
        look = "find / -xdev -writable -not -type l -not -path '/proc/*' -not -path '/dev/*' -not -path '/sys/*'"
        writable = set(container.run("sh", "-c", f"{look} 2>/dev/null; true").stdout.split())
        assert writable <= {
            "/cache",
            "/tmp",
            "/var/tmp",
            "/run/lock",
            "/dev",
            "/dev/shm",
            "/etc/hosts",
            "/etc/resolv.conf",
        }
        assert {"/cache", "/tmp"} <= writable


def test_P6_an_executor_that_can_write_nowhere_says_what_to_mount(
    images: Images, built: dict[str, str], containers: list[Container]
) -> None:
    container = Container(images, built["executor"], ANY_USER)
    containers.append(container)
    images.buildah(
        "run",
        "--isolation",
        "chroot",
        "--user",
        "0",
        container.name,
        "--",
        "chmod",
        "755",
        "/cache",
        "/tmp",
        "/var/tmp",
    )
    ended = container.run("triptych", "executor", "--model", MODEL)
    (line,) = ended.stderr.strip().splitlines()[:1]
    assert "user id 12345 cannot write to /cache/triptych (Permission denied)" in line
    assert "TRIPTYCH_CACHE" in line
    assert "Traceback" not in ended.stderr


def test_the_three_images_answer_together_with_the_real_model(
    images: Images, built: dict[str, str], containers: list[Container], log: Path
) -> None:
    ports = {service: free_port() for service in ("frontend", "scheduler", "executor")}
    peers = {"scheduler": ("--executor", "executor"), "frontend": ("--engine", "scheduler")}
    volume = f"{fetched_path(EMBEDDED_MODEL)}:{MODEL}:ro"
    for service in ("executor", "scheduler", "frontend"):
        container = Container(images, built[service], ANY_USER)
        containers.append(container)
        command = ["triptych", service, "--model", MODEL, "--port", str(ports[service])]
        if service in peers:
            flag, peer = peers[service]
            command += [flag, f"127.0.0.1:{ports[peer]}"]
        container.start(log, *command, volumes=[volume])
    _wait_generate(ports["frontend"], log)
    client = Container(images, built["client"], ANY_USER)
    containers.append(client)
    prompt = "The capital of France is"
    address = f"127.0.0.1:{ports['frontend']}"
    answered = client.run(
        "triptych", "generate", prompt, "--address", address, "--max-tokens", "12", "--temperature", "0"
    )
    assert answered.returncode == 0, answered.stderr + log.read_text()
    assert _reference(prompt, 12) in answered.stdout


def test_the_cuda_variant_is_built_up_to_its_torch(images: Images) -> None:
    images.build("executor", target="environment", arguments={"VARIANT": "cuda"})


def _reference(prompt: str, count: int) -> str:
    """What transformers says."""
    from tokenizers import Tokenizer

    path = fetched_path(EMBEDDED_MODEL)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    (ids,) = reference_ids(path, [tokenizer.encode(prompt).ids], count)
    return str(tokenizer.decode(ids)).strip()


def _wait_generate(port: int, log: Path) -> None:
    deadline = time.monotonic() + 900
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            try:
                told = health.Check(health_pb2.HealthCheckRequest(service="generate"), timeout=5)
                if told.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.5)
    raise TimeoutError(f"no token can be made after 900 s:\n{log.read_text()[-4000:]}")
