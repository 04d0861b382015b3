"""AdminService of a scheduler with mutual TLS: each call is for admins, but for the questions that change nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from loadtest.stub_executor import StubExecutor
from services.common import audit, refusals
from services.common.peer import Peer
from services.common.tls import PeerTls
from services.scheduler.admin import OPEN_QUESTIONS
from tests.support.attached import scheduler_for
from tests.support.certificates import Authority

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
METHODS = sorted(SERVICE.methods_by_name, key=lambda name: name == "Drain")  # after it the others are done
ADMIN, FRONTEND = "operator.test", "spiffe://test/frontend"


async def ask(stub: Any, method: str) -> str:
    """How the call ends; a stream's first message is its answer."""
    call = getattr(stub, method)(getattr(admin_pb2, f"{method}Request")(), timeout=20)
    try:
        if SERVICE.methods_by_name[method].server_streaming:
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


def fields(caplog: pytest.LogCaptureFixture, module: Any) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == module.__name__]  # type: ignore[attr-defined]


async def test_every_call_of_the_contract_is_for_admins_but_for_open_questions(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path)
    server = authority.issue("server")
    settings = {
        "tls_cert": server.cert,
        "tls_key": server.key,
        "tls_client_ca": authority.ca,
        "tls_client_names": [FRONTEND],
        "admin_names": [ADMIN],
    }
    codes: dict[str, dict[str, str]] = {}
    async with StubExecutor() as stub, scheduler_for(stub, model, **settings) as scheduler:
        for name in (FRONTEND, "else.test", ADMIN):
            files = authority.issue(name.replace("/", "_"), name)
            peer = Peer(f"127.0.0.1:{scheduler.server.port}", PeerTls(authority.ca, files.cert, files.key))
            admin = admin_pb2_grpc.AdminServiceStub(peer.channel())
            codes[name] = {method: await ask(admin, method) for method in METHODS}
            await peer.close()
        async with asyncio.timeout(20):
            while len(fields(caplog, audit)) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert {"Drain", "SetLogLevel", "FlushPrefixCache", "SubscribeKvEvents", *OPEN_QUESTIONS} == set(METHODS)
    assert codes[ADMIN] == dict.fromkeys(METHODS, "OK")
    assert codes["else.test"] == dict.fromkeys(METHODS, "PERMISSION_DENIED")
    assert codes[FRONTEND] == {method: "OK" if method in OPEN_QUESTIONS else "PERMISSION_DENIED" for method in METHODS}
    assert {line["identity"] for line in fields(caplog, audit)} == {ADMIN}
    assert {line["method"] for line in fields(caplog, audit)} == set(METHODS) - set(OPEN_QUESTIONS)
    first, rest = fields(caplog, refusals)  # the first at once, the others at the end
    assert (first["calls"], first["identity"], first["method"].rpartition("/")[0]) == (1, FRONTEND, SERVICE.full_name)
    assert rest["calls"] == 4 - 1 + len(METHODS)
    assert rest["reasons"] == {"ADMIN_ONLY": 3 + 4, "PEER_NOT_ALLOWED": 2}
