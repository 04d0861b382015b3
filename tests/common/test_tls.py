"""TLS of a listener and of a channel: who is let in, what is refused at the start, and files that change."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.common.errors import RequestError, StartError
from services.common.peer import Peer
from services.common.peer_names import PeerNames
from services.common.server import Access, Server, warn_of_plain_text
from services.common.tls import PeerTls, ServerTls
from services.scheduler.admin import ADMIN_SERVICE, OPEN_QUESTIONS
from tests.support.certificates import DAY, SERVER, Authority, Files, place
from tests.support.cluster import free_port

FRONTEND = "spiffe://test/frontend"
OPERATOR = "operator.test"


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Answers, when it is reached; a stream until it is cut."""

    async def GetLoad(self, request: Any, context: Any) -> Any:
        return admin_pb2.GetLoadResponse()

    async def FlushPrefixCache(self, request: Any, context: Any) -> Any:
        return admin_pb2.FlushPrefixCacheResponse(flushed_blocks=7)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for sequence in range(10**9):
            yield admin_pb2.SubscribeKvEventsResponse(sequence=sequence)
            await asyncio.sleep(0.005)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def serving(tls: ServerTls | None, names: PeerNames | None = None, **access: Any) -> AsyncIterator[Server]:
    server = Server("127.0.0.1", 0, access=Access(tls, admit=names.admit if names is not None else None, **access))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server.grpc)
    await server.start([ADMIN_SERVICE])
    try:
        yield server
    finally:
        await server.stop()


def mutual(authority: Authority) -> ServerTls:
    files = authority.issue("server")
    return ServerTls(files.cert, files.key, authority.ca)


async def flush(port: int, tls: PeerTls | None) -> grpc.StatusCode:
    """How a call ends."""
    peer = Peer(f"127.0.0.1:{port}", tls)
    try:
        await admin_pb2_grpc.AdminServiceStub(peer.channel()).FlushPrefixCache(
            admin_pb2.FlushPrefixCacheRequest(), timeout=20
        )
        return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await peer.close()


async def test_a_channel_that_trusts_the_servers_ca_gets_through(authority: Authority) -> None:
    files = authority.issue("server")
    async with serving(ServerTls(files.cert, files.key)) as server:
        assert await flush(server.port, PeerTls(authority.ca)) is grpc.StatusCode.OK


async def test_the_servers_certificate_must_be_of_the_ca_and_have_the_name(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("server", SERVER)
    async with serving(ServerTls(files.cert, files.key)) as server:
        assert await flush(server.port, PeerTls(authority.ca)) is grpc.StatusCode.UNAVAILABLE  # 127.0.0.1 is no name
        assert await flush(server.port, PeerTls(authority.ca, server_name=SERVER)) is grpc.StatusCode.OK
        other = Authority(tmp_path, "other")
        assert await flush(server.port, PeerTls(other.ca, server_name=SERVER)) is grpc.StatusCode.UNAVAILABLE
        assert await flush(server.port, None) is grpc.StatusCode.UNAVAILABLE  # plain text


async def test_a_client_certificate_that_is_missing_expired_or_of_another_ca_is_refused(
    authority: Authority, tmp_path: Path
) -> None:
    good, other = authority.issue("client", FRONTEND), Authority(tmp_path, "other").issue("stranger", FRONTEND)
    late = authority.issue("late", FRONTEND, lasts=-DAY)
    async with serving(mutual(authority)) as server:
        assert await flush(server.port, PeerTls(authority.ca, good.cert, good.key)) is grpc.StatusCode.OK
        assert await flush(server.port, PeerTls(authority.ca)) is grpc.StatusCode.UNAVAILABLE
        assert await flush(server.port, PeerTls(authority.ca, other.cert, other.key)) is grpc.StatusCode.UNAVAILABLE
        # Our own channel refuses to begin with such a file; a client of another make would show it.
        shown = grpc.ssl_channel_credentials(authority.ca.read_bytes(), late.key.read_bytes(), late.cert.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", shown) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest(), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tls_below_1_2_is_refused(authority: Authority) -> None:
    files = authority.issue("server")

    def handshake(most: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = most
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as secured,
        ):
            return secured.version()

    async with serving(ServerTls(files.cert, files.key)) as server:
        with pytest.warns(DeprecationWarning), pytest.raises(ssl.SSLError):
            await asyncio.to_thread(handshake, ssl.TLSVersion.TLSv1_1)
        with pytest.warns(DeprecationWarning):
            assert await asyncio.to_thread(handshake, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"


async def test_only_listed_names_may_call_and_only_admins_may_change(authority: Authority) -> None:
    names = PeerNames([FRONTEND], [OPERATOR], ADMIN_SERVICE, OPEN_QUESTIONS)
    certificates = {name: authority.issue(f"c{i}", name) for i, name in enumerate((FRONTEND, OPERATOR, "else.test"))}
    codes: dict[str, list[str]] = {}
    async with serving(mutual(authority), names) as server:
        for name, files in certificates.items():
            peer = Peer(f"127.0.0.1:{server.port}", PeerTls(authority.ca, files.cert, files.key))
            stub = admin_pb2_grpc.AdminServiceStub(peer.channel())
            health = health_pb2_grpc.HealthStub(peer.channel())
            codes[name] = [
                await _code(stub.GetLoad(admin_pb2.GetLoadRequest())),
                await _code(stub.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())),
                await _code(health.Check(health_pb2.HealthCheckRequest(service="liveness"))),
            ]
            await peer.close()
    assert codes == {
        FRONTEND: ["OK", "PERMISSION_DENIED", "OK"],
        OPERATOR: ["OK", "OK", "OK"],
        "else.test": ["PERMISSION_DENIED", "PERMISSION_DENIED", "OK"],
    }


async def _code(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def test_without_admin_names_nobody_is_an_admin() -> None:
    with pytest.raises(RequestError, match="FlushPrefixCache is for admins"):
        await PeerNames((), (), ADMIN_SERVICE, OPEN_QUESTIONS).admit(
            f"/{ADMIN_SERVICE}/FlushPrefixCache", _Shown([b"else.test"])
        )


class _Shown:
    def __init__(self, names: list[bytes]) -> None:
        self._names = names

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": self._names}


async def test_probes_ask_health_in_plain_text_and_nothing_else(authority: Authority) -> None:
    port = free_port()
    async with serving(mutual(authority), health_port=port) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert await _code(admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest())) == (
                "UNIMPLEMENTED"
            )
        assert server.port != port


@pytest.mark.parametrize("is_on", [True, False])
async def test_reflection_is_served_as_configured(is_on: bool) -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async with (
        serving(None, reflection=is_on) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        try:
            answer = await anext(aiter(call))
            names = [service.name for service in answer.list_services_response.service]
        except grpc.aio.AioRpcError as error:
            names = [error.code().name]
    assert (ADMIN_SERVICE in names) is is_on
    assert is_on or names == ["UNIMPLEMENTED"]


async def test_a_servers_certificate_is_rotated_under_load(authority: Authority, tmp_path: Path) -> None:
    """To one of another CA: new connections trust that alone, a stream that runs goes on, no call is lost."""
    files = authority.issue("server")
    async with serving(ServerTls(files.cert, files.key)) as server:
        address = f"127.0.0.1:{server.port}"
        peer = Peer(address, PeerTls(authority.ca))
        stream = admin_pb2_grpc.AdminServiceStub(peer.channel()).SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        seen = [(await stream.read()).sequence]
        later = Authority(tmp_path, "later")
        later.issue("server", files=files)
        assert await flush(server.port, PeerTls(later.ca)) is grpc.StatusCode.OK
        assert await flush(server.port, PeerTls(authority.ca)) is grpc.StatusCode.UNAVAILABLE
        for _ in range(20):
            seen.append((await stream.read()).sequence)
        assert seen == list(range(21))
        await peer.close()


async def test_a_channel_takes_the_new_certificate_for_its_next_connection(
    authority: Authority, tmp_path: Path
) -> None:
    """And what runs on the old connection goes on."""
    later = Authority(tmp_path, "later")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.ca.read_bytes())
    server_files, mine = authority.issue("server"), authority.issue("mine", FRONTEND)
    tls = ServerTls(server_files.cert, server_files.key, both)
    names = PeerNames(["renewed.test"])
    async with serving(tls, names) as server:
        peer = Peer(f"127.0.0.1:{server.port}", PeerTls(authority.ca, mine.cert, mine.key))
        before = peer.channel()
        stub = admin_pb2_grpc.AdminServiceStub(before)
        assert await _code(stub.GetLoad(admin_pb2.GetLoadRequest())) == "PERMISSION_DENIED"
        place(both, authority.ca.read_bytes() + later.ca.read_bytes())
        later.issue("mine", "renewed.test", files=mine)
        assert peer.channel() is not before
        stub = admin_pb2_grpc.AdminServiceStub(peer.channel())
        stream = stub.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        assert (await stream.read()).sequence == 0
        del stub
        later.issue("mine", "renewed.test", files=mine)
        assert peer.channel() is not before
        assert await _code(admin_pb2_grpc.AdminServiceStub(peer.channel()).GetLoad(admin_pb2.GetLoadRequest())) == "OK"
        assert [(await stream.read()).sequence for _ in range(20)] == list(range(1, 21))
        await peer.close()


async def test_a_half_written_rotation_leaves_the_old_certificate(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("server")
    async with serving(ServerTls(files.cert, files.key)) as server:
        files.cert.write_bytes(files.cert.read_bytes()[:200])
        with caplog.at_level(logging.ERROR):
            assert await flush(server.port, PeerTls(authority.ca)) is grpc.StatusCode.OK
        assert "holds no certificate" in caplog.text
        assert "stays in use" in caplog.text
        authority.issue("server", files=files)
        assert await flush(server.port, PeerTls(authority.ca)) is grpc.StatusCode.OK


def _encrypted(files: Files) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    secret = serialization.BestAvailableEncryption(b"x")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))


FAULTS: dict[str, tuple[Any, str]] = {
    "no key": (lambda files: files.key.unlink(), "tls_key: cannot read .*server.key: No such file"),
    "no certificate": (lambda files: files.cert.write_text("x"), "tls_cert: .*server.pem holds no certificate in PEM"),
    "no key in it": (lambda files: files.key.write_text("x"), "tls_key: .*server.key holds no private key in PEM"),
    "an encrypted key": (_encrypted, "tls_key: .*server.key is encrypted; give a key without a passphrase"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_cannot_serve_are_told_at_the_start(fault: str, authority: Authority) -> None:
    files = authority.issue("server")
    spoil, message = FAULTS[fault]
    spoil(files)
    with pytest.raises(StartError, match=message):
        ServerTls(files.cert, files.key).credentials()


def test_a_key_of_another_certificate_is_told(authority: Authority) -> None:
    with pytest.raises(StartError, match="is not the key of the certificate"):
        ServerTls(authority.issue("server").cert, authority.issue("other").key).credentials()


def test_an_expired_certificate_and_an_expired_ca_are_told(authority: Authority) -> None:
    late = authority.issue("late", lasts=-DAY)
    with pytest.raises(StartError, match=r"tls_cert: the certificate .*late.pem expired at \d{4}-.*renew it"):
        ServerTls(late.cert, late.key).credentials()
    with pytest.raises(StartError, match=r"peer_ca: the certificates of .* have expired"):
        PeerTls(late.cert).files()


def test_what_deserves_a_look_is_warned_of(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files = authority.issue("soon", lasts=DAY)
    files.key.chmod(0o644)
    ServerTls(files.cert, files.key).credentials()
    assert "every user of this machine may read" in caplog.text
    assert "expires at" in caplog.text


def test_plain_text_beyond_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        warn_of_plain_text(host)
    assert caplog.text == ""
    warn_of_plain_text("0.0.0.0")
    assert "listening on 0.0.0.0 in plain text" in caplog.text
