"""Row P5: nothing that is read is run, and no service listens beyond loopback unless it is told to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.cli.parts import config_type
from services.common.config import SERVICES
from tests.support.cluster import Cluster, running
from tests.support.unsafe_code import faults

ROOT = Path(__file__).parents[2]
SHIPPED = ("services", "kernels", "loadtest", "clients/python/triptych_client", "proto/hatch_build.py")

PLANTED = [
    "import pickle",
    "import torch, pickle as p",
    "from pickle import loads",
    "import dill.source",
    "x = torch.load(path)",
    "from torch import load",
    "yaml.load(text, Loader=yaml.Loader)",
    "from yaml import unsafe_load",
    "yaml.full_load(text)",
    "eval(text)",
    "exec(text)",
    "np.load(path, allow_pickle=True)",
    "AutoModel.from_pretrained(path, trust_remote_code=flag)",
    "torch.distributed.broadcast_object_list(objects)",
]
HARMLESS = "model.eval()\nyaml.safe_load(text)\nnp.load(path, allow_pickle=False)\nimport json\nconnection.execute(x)\n"


def sources() -> list[Path]:
    """All Python that is installed, generated stubs left out."""
    found = [
        path for part in SHIPPED for path in ([ROOT / part] if part.endswith(".py") else (ROOT / part).rglob("*.py"))
    ]
    return [path for path in found if not re.search(r"_pb2(_grpc)?\.py$", path.name)]


def test_P5_nothing_that_is_installed_runs_what_it_reads() -> None:
    assert len(sources()) > 200
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}" for path in sources() for line, name in faults(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("planted", PLANTED)
def test_P5_each_way_of_running_what_is_read_is_found(planted: str) -> None:
    assert len(list(faults(HARMLESS + planted))) == 1
    assert list(faults(HARMLESS)) == []


def listeners(process: psutil.Process) -> Iterator[str]:
    """Addresses that a process and its children listen on, for TCP or UDP."""
    for one in (process, *process.children(recursive=True)):
        for connection in one.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or (connection.type == 2 and not connection.raddr):
                yield str(connection.laddr.ip).removeprefix("::ffff:")  # of IPv4, as gRPC's sockets say it


def beyond_loopback(cluster: Cluster) -> dict[str, set[str]]:
    """By service."""
    found = {name: set(listeners(psutil.Process(process.pid))) for name, process in cluster.processes.items()}
    assert all(found.values()), found
    return {
        name: {ip for ip in addresses if not ipaddress.ip_address(ip.partition("%")[0]).is_loopback}
        for name, addresses in found.items()
    }


@pytest.mark.parametrize("service", SERVICES)
def test_P5_a_service_that_is_told_nothing_listens_on_loopback(service: str) -> None:
    assert config_type(service)().host == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_P5_no_process_of_a_cluster_listens_beyond_loopback(tmp_path: Path) -> None:
    """With all that starts more sockets: workers, ranks, the adapter."""
    from tests.support.checkpoints import tiny_llama

    model = tiny_llama(tmp_path / "tiny-llama")
    flags = {
        "frontend": ["--workers", "2", "--vllm-adapter"],
        "scheduler": ["--tp-size", "2"],
        "executor": ["--tp-size", "2"],
    }
    with running(model, tmp_path, **flags) as cluster:
        assert beyond_loopback(cluster) == {"executor": set(), "scheduler": set(), "frontend": set()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_P5_one_that_is_told_to_is_seen_by_this_test_and_says_so(tmp_path: Path) -> None:
    from tests.support.checkpoints import tiny_llama

    model = tiny_llama(tmp_path / "tiny-llama")
    cluster = Cluster(model, tmp_path, {"frontend": ["--host", "0.0.0.0"]})
    try:
        cluster.start()
        assert beyond_loopback(cluster)["frontend"] in ({"0.0.0.0"}, {"::"})
        assert "in plain text" in cluster.log("frontend")
        assert "auth is off" in cluster.log("frontend")
    finally:
        cluster.stop()
