"""TLS and tokens of the command line and of the client package, against a frontend that asks for both."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli import up_plan
from services.common.errors import StartError
from tests.frontend.harness import scripted, serving, text_checkpoint
from tests.support.certificates import SERVER, Authority
from triptych_client import Client, SyncClient, TriptychError, tls_credentials


@pytest.fixture
def made(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a frontend with mutual TLS whose certificate names no address, and tokens."""
    authority = Authority(tmp_path)
    server = authority.issue("server", SERVER)
    authority.issue("me", "spiffe://test/me")
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump([{"sha256": hashlib.sha256(b"acme-token").hexdigest(), "tenant": "acme"}]))
    yield {
        "tls_cert": server.cert,
        "tls_key": server.key,
        "tls_client_ca": authority.ca,
        "auth": "tokens",
        "auth_tokens": tokens,
    }


def tls_flags(folder: Path) -> list[str]:
    return [
        *(
            "--tls-ca",
            str(folder / "ca.pem"),
            "--tls-cert",
            str(folder / "me.pem"),
            "--tls-key",
            str(folder / "me.key"),
        ),
        *("--tls-server-name", SERVER),
    ]


async def generate(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """`triptych generate`: exit code, standard output, standard error."""
    command = (sys.executable, "-m", "services.cli.main", "generate", "hello", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=os.environ | environ)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_shows_a_certificate_and_a_token(made: dict[str, Any], tmp_path: Path) -> None:
    async with serving(text_checkpoint(tmp_path / "model"), scripted([72, 73, 2]), **made) as served:
        address = f"127.0.0.1:{served.frontend.server.port}"
        flags = ("--address", address, *tls_flags(tmp_path))
        right, by_flag, nothing, plain, unnamed = await asyncio.gather(
            generate(*flags, TRIPTYCH_TOKEN="acme-token"),
            generate(*flags, "--token", "acme-token"),
            generate(*flags),
            generate("--address", address),
            generate("--address", address, *tls_flags(tmp_path)[:-2]),
        )
        assert (right[0], by_flag[0]) == (0, 0)
        assert right[1] == by_flag[1] != ""
        assert [submit.tenant for submit in served.engine.submits] == ["acme", "acme"]
        assert nothing[0] == 1
        assert "TRIPTYCH_TOKEN, or with --token" in nothing[2]
        assert plain[0] == 1
        assert "--tls-ca where it speaks TLS" in plain[2]
        assert unnamed[0] == 1
        assert "no TLS with" in unnamed[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-ca", "/nowhere.pem"], "cannot read /nowhere.pem: No such file"),
        (["--tls-cert", "x"], "--tls-cert is given without --tls-ca"),
        (["--tls-server-name", "x"], "--tls-server-name is given without --tls-ca"),
        (["--tls-ca", __file__, "--tls-cert", __file__], "--tls-cert and --tls-key go together"),
        (["--token", "a b"], "the token holds a space"),
    ],
)
async def test_flags_that_cannot_be_used_are_told(flags: list[str], message: str) -> None:
    code, _, told = await generate(*flags)
    assert code == 1
    assert message in told


async def test_both_clients_show_a_certificate_and_a_token(made: dict[str, Any], tmp_path: Path) -> None:
    async with serving(text_checkpoint(tmp_path / "model"), scripted([72, 73, 2]), **made) as served:
        address = f"127.0.0.1:{served.frontend.server.port}"
        credentials = tls_credentials(tmp_path / "ca.pem", tmp_path / "me.pem", tmp_path / "me.key")
        arguments: dict[str, Any] = {"credentials": credentials, "server_name": SERVER}
        async with Client(address, token="acme-token", **arguments) as client:
            answer = await client.generate_unary("hello")

        def ask(token: str) -> str:
            with SyncClient(address, token=token, **arguments) as client:
                return client.generate_unary("hello").text

        assert await asyncio.to_thread(ask, "acme-token") == answer.text
        with pytest.raises(TriptychError) as refused:
            await asyncio.to_thread(ask, "wrong")
        assert (refused.value.code.name, refused.value.reason) == ("UNAUTHENTICATED", "UNKNOWN_TOKEN")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheduler.tls-cert", "a", "--scheduler.tls-key", "b"], "frontend.peer_ca is not; set it to the CA"),
        (["--frontend.peer-ca", "a"], "scheduler.tls_cert is not"),
        (
            [
                "--scheduler.peer-ca",
                "a",
                "--executor.tls-cert",
                "a",
                "--executor.tls-key",
                "b",
                "--executor.tls-client-ca",
                "c",
            ],
            "scheduler.peer_cert is not",
        ),
        (["--frontend.tls-cert", "a", "--frontend.tls-key", "b", "--prompt", "x"], "--prompt asks without TLS"),
    ],
)
def test_up_refuses_services_that_could_not_talk(flags: list[str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        up_plan.read(["--port", "0", *flags])


def test_up_asks_health_in_plain_text_where_a_service_speaks_tls() -> None:
    plan = up_plan.read(["--port", "0", "--frontend.tls-cert", "a", "--frontend.tls-key", "b"])
    assert plan.probes["frontend"] != plan.addresses["frontend"]
    assert plan.probes["frontend"].endswith(
        dict(zip(plan.commands["frontend"].arguments, plan.commands["frontend"].arguments[1:], strict=False))[
            "--health-port"
        ]
    )
    assert plan.probes["scheduler"] == plan.addresses["scheduler"]
    assert not plan.is_open
