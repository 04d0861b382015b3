"""The frontend's admin port: it has the TLS and the auth of the public port, and lets admins in alone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.common import audit
from services.common.config import resolve
from services.common.errors import StartError
from services.frontend import admin
from services.frontend.config import FrontendConfig
from tests.frontend.test_auth import AUDIENCE, ISSUER, bearer, jwks, refusal, signed, tokens_file
from tests.support.certificates import Authority
from tests.support.cluster import free_port

LOGGER = "services.frontend.request_log"
REQUEST = admin_pb2.SetLogLevelRequest(level="error", logger=LOGGER)
DENIED = ("PERMISSION_DENIED", "ADMIN_ONLY")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    logging.getLogger(LOGGER)
    yield
    logging.getLogger(LOGGER).setLevel(logging.NOTSET)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls(authority: Authority) -> dict[str, Any]:
    """Settings of a listener."""
    files = authority.issue("server")
    return {"tls_cert": files.cert, "tls_key": files.key}


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[str]:
    port = free_port()
    async with admin.serving(FrontendConfig(admin_port=port, **settings), {}):
        yield f"127.0.0.1:{port}"


@asynccontextmanager
async def dialled(address: str, authority: Authority, name: str = "") -> AsyncIterator[Any]:
    """By a client with a certificate of that name, or none."""
    files = authority.issue(name.replace("/", "_"), name) if name else None
    own = (files.key.read_bytes(), files.cert.read_bytes()) if files else ()
    shown = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *own)
    async with grpc.aio.secure_channel(address, shown) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def test_a_token_needs_the_role_and_the_log_says_whose_it_was(
    authority: Authority, tls: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    listed = tokens_file(tmp_path / "tokens.yaml", acme=(), operations=("admin",))
    async with serving(auth="tokens", auth_tokens=listed, **tls) as address, dialled(address, authority) as stub:
        assert await refusal(stub.SetLogLevel(REQUEST)) == ("UNAUTHENTICATED", "NO_TOKEN")
        assert await refusal(stub.SetLogLevel(REQUEST, metadata=bearer("nobody"))) == (
            "UNAUTHENTICATED",
            "UNKNOWN_TOKEN",
        )
        assert await refusal(stub.SetLogLevel(REQUEST, metadata=bearer("acme"))) == DENIED
        assert await refusal(stub.GetStats(admin_pb2.GetStatsRequest(), metadata=bearer("acme"))) == DENIED
        assert logging.getLogger(LOGGER).level == logging.NOTSET
        await stub.SetLogLevel(REQUEST, metadata=bearer("operations"))
        assert logging.getLogger(LOGGER).level == logging.ERROR
    (told,) = [record.fields for record in caplog.records if record.name == audit.__name__]  # type: ignore[attr-defined]
    assert (told["method"], told["status"], told["identity"]) == ("SetLogLevel", "OK", "operations")


async def test_a_signed_token_needs_the_role(authority: Authority, tls: dict[str, Any], tmp_path: Path) -> None:
    keys = str(jwks(tmp_path / "jwks.json"))
    settings = {"auth": "jwt", "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_keys": keys, **tls}
    async with serving(**settings) as address, dialled(address, authority) as stub:
        user, boss = ((("authorization", f"Bearer {token}"),) for token in (signed(), signed(roles=["admin"])))
        assert await refusal(stub.SetLogLevel(REQUEST, metadata=user)) == DENIED
        await stub.SetLogLevel(REQUEST, metadata=boss)


async def test_a_certificate_needs_a_name_of_an_admin(
    authority: Authority, tls: dict[str, Any], tmp_path: Path
) -> None:
    names = tmp_path / "names.yaml"
    listed = [{"name": "listed.test", "tenant": "ops", "roles": ["admin"]}, {"name": "user.test", "tenant": "user"}]
    names.write_text(yaml.safe_dump(listed))
    mutual = tls | {"tls_client_ca": authority.ca, "auth": "mtls"}
    async with serving(**mutual, admin_names=["spiffe://test/boss"]) as address:
        async with dialled(address, authority, "spiffe://test/boss") as stub:
            await stub.SetLogLevel(REQUEST)
        async with dialled(address, authority, "spiffe://test/acme") as stub:
            assert await refusal(stub.SetLogLevel(REQUEST)) == DENIED
        async with dialled(address, authority) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.SetLogLevel(REQUEST)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with serving(**mutual, auth_names=names) as address:
        async with dialled(address, authority, "listed.test") as stub:
            await stub.SetLogLevel(REQUEST)
        async with dialled(address, authority, "user.test") as stub:
            assert await refusal(stub.SetLogLevel(REQUEST)) == DENIED


async def test_without_auth_whoever_reaches_loopback_may() -> None:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).SetLogLevel(REQUEST)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"admin_host": "0.0.0.0"}, "admin_host is 0.0.0.0, which others reach, without tls_cert and auth"),
        ({"admin_host": "10.0.0.7", "auth": "tokens", "auth_tokens": "t"}, "which others reach, without tls_cert;"),
        ({"admin_host": "::", "tls_cert": "c", "tls_key": "k"}, "which others reach, without auth;"),
        ({"admin_names": ["boss.test"]}, "admin_names is set, but auth is off; set auth to mtls"),
    ],
)
def test_a_port_that_strangers_reach_is_refused_at_the_start(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(json.dumps({"frontend": {"admin_port": 0, **settings}}))
    with pytest.raises(StartError, match=message):
        resolve(FrontendConfig, ["--config", str(file)], {})


def test_with_tls_and_auth_it_may_be_elsewhere(tmp_path: Path) -> None:
    FrontendConfig(admin_port=0, admin_host="0.0.0.0", tls_cert="c", tls_key="k", auth="tokens", auth_tokens="t")


async def test_the_command_shows_its_token_over_tls(authority: Authority, tls: dict[str, Any], tmp_path: Path) -> None:
    import asyncio

    listed = tokens_file(tmp_path / "tokens.yaml", operations=("admin",), acme=())
    client = authority.issue("client", "client.test")
    flags = ["--tls-ca", str(authority.ca), "--tls-cert", str(client.cert), "--tls-key", str(client.key)]
    settings = {"auth": "tokens", "auth_tokens": listed, "tls_client_ca": authority.ca, **tls}
    async with serving(**settings) as address:

        def log_level(*arguments: str, token: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "services.cli.main", "log-level", "error", address, "--logger", LOGGER]
            environ = os.environ | {"TRIPTYCH_TOKEN": token}
            return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, env=environ)

        right, denied, nothing, plain = await asyncio.gather(
            asyncio.to_thread(log_level, *flags, token="operations-token"),
            asyncio.to_thread(log_level, *flags, token="acme-token"),
            asyncio.to_thread(log_level, *flags, token=""),
            asyncio.to_thread(log_level, token="operations-token"),
        )
    assert (right.returncode, right.stdout) == (0, f"{address} frontend: error\n")
    assert denied.returncode == 1 and "PERMISSION_DENIED: SetLogLevel needs the role admin" in denied.stderr
    assert nothing.returncode == 1 and "UNAUTHENTICATED" in nothing.stderr and "--token" in nothing.stderr
    assert plain.returncode == 1 and "--tls-ca" in plain.stderr
