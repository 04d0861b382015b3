"""Three processes with mutual TLS on every hop: who is refused, and certificates that change while work goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from tests.e2e.test_keepalive import READY, silent
from tests.support.calls import by_ids, greedy
from tests.support.certificates import Authority, place
from tests.support.cluster import Cluster, free_port, health
from tests.support.secured import NAMES, TOKEN, Secured, issue, listener_flags, peer_flags, running_secured

pytestmark = [pytest.mark.slow, pytest.mark.one_shard, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def secured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with running_secured(tiny, tmp_path_factory.mktemp("secured")) as made:
        yield made


async def answer(secured: Secured, tokens: int = 4) -> int:
    """Ids of a greedy answer."""
    from triptych.inference.v1 import inference_pb2_grpc

    async with secured.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(by_ids([3, 4], greedy(max_tokens=tokens, ignore_eos=True)), metadata=TOKEN, timeout=60)
        return sum([len(choice.token_ids) async for message in call for choice in message.choices])


async def test_an_answer_comes_through_three_hops_of_mutual_tls(secured: Secured) -> None:
    assert await answer(secured) == 4
    assert all(health(secured.cluster.probe_port(name), "readiness") == "SERVING" for name in secured.cluster.ports)
    plain = grpc.insecure_channel(secured.cluster.address)
    with plain as channel, pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(3)


async def test_an_admin_call_needs_a_name_that_is_listed(secured: Secured) -> None:
    address = f"127.0.0.1:{secured.cluster.ports['scheduler']}"
    async with grpc.aio.secure_channel(address, secured.credentials("frontend")) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        assert (await stub.GetLoad(admin_pb2.GetLoadRequest(), timeout=20)).HasField("heartbeat")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), timeout=20)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    async with grpc.aio.secure_channel(address, secured.credentials("client")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest(), timeout=20)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def wait_for_log(cluster: Cluster, name: str, text: str, timeout_s: float = 60) -> None:
    """Until a service has logged it."""
    deadline = time.monotonic() + timeout_s
    while text not in cluster.log(name):
        assert time.monotonic() < deadline, cluster.log(name)[-2000:]
        time.sleep(0.1)


@pytest.mark.parametrize("service", ["frontend", "scheduler"])
def test_a_service_with_a_wrong_certificate_is_not_let_in_to_the_next(
    secured: Secured, service: str, tmp_path: Path
) -> None:
    """None, one of another CA, and one of this CA with a name that is not allowed; beside the service that is."""
    other = Authority(tmp_path, "other")
    stranger = other.issue("stranger", NAMES[service])
    client = secured.files["client"]
    shown: dict[str, tuple[Sequence[str], str]] = {
        "none": (["--peer-ca", str(secured.trusted)], "UNAVAILABLE"),
        "other-ca": (peer_flags(secured.trusted, stranger), "UNAVAILABLE"),
        "other-name": (peer_flags(secured.trusted, client), "PERMISSION_DENIED"),
        "distrusts": (peer_flags(other.ca, secured.files[service]), "UNAVAILABLE"),
    }
    for name, (flags, code) in shown.items():
        name = f"{service}-{name}"
        listener = listener_flags(secured.trusted, secured.files[service])
        cluster = Cluster(secured.cluster.model, tmp_path, {service: [*listener, *flags]}, dict(secured.cluster.ports))
        cluster.ports[name] = free_port()
        try:
            cluster.start_one(service, name=name)
            wait_for_log(cluster, name, code)
            assert health(cluster.probe_port(service), "generate") in ("NOT_SERVING", "UNAVAILABLE")
        finally:
            cluster.processes[name].kill()
            cluster.processes[name].wait()


async def test_G4_pings_and_silence_end_no_connection_of_tls(secured: Secured) -> None:
    addresses = [f"127.0.0.1:{port}" for name, port in secured.cluster.ports.items()]
    assert await silent(*addresses, credentials=secured.credentials()) == [{READY}] * 6
    assert secured.cluster.log("frontend").count("attached to engine") == 1


async def test_all_certificates_are_rotated_under_load_to_those_of_another_ca(secured: Secured, tmp_path: Path) -> None:
    """As operators do it: trust both, change certificates, trust the new one alone. No stream ends; then every hop is
    made anew, by a scheduler that is started again, with the new certificates alone."""
    later = Authority(tmp_path, "later")
    streams = [asyncio.create_task(answer(secured, 200)) for _ in range(4)]
    await asyncio.sleep(0.5)
    place(secured.trusted, secured.authority.ca.read_bytes() + later.ca.read_bytes())
    assert await answer(secured) == 4
    issue(later, secured.files)
    assert await answer(secured) == 4
    place(secured.trusted, later.ca.read_bytes())
    assert await answer(secured) == 4
    assert await asyncio.gather(*streams) == [200] * 4
    assert secured.cluster.log("frontend").count("attached to engine") == 1
    secured.cluster.kill("scheduler")
    secured.cluster.processes["scheduler"].wait()
    await asyncio.to_thread(secured.cluster.wait_generate, False, timeout_s=60)
    await asyncio.to_thread(secured.cluster.revive)
    assert await answer(secured) == 4
    assert secured.cluster.log("frontend").count("attached to engine") == 2
    assert "were read again" in secured.cluster.log("frontend")
