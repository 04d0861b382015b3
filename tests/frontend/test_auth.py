"""Identity on the public API: tokens, signed tokens, certificates, and what a tenant may do to another's requests."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import http.server
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from services.common.caller import Identity
from services.common.errors import RequestError, StartError
from services.frontend.auth import key_set
from services.frontend.auth.signed import Claims, SignedTokens
from services.frontend.config import FrontendConfig
from tests.frontend.harness import Served, reason, retry_after_s, scripted, serving, text_checkpoint
from tests.support.certificates import Authority

ISSUER, AUDIENCE = "https://id.test", "triptych"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("model"))


def tokens_file(path: Path, **tenants: Any) -> Path:
    """Of tokens "TENANT-token", for tenants with their roles."""
    entries = [
        {"sha256": hashlib.sha256(f"{tenant}-token".encode()).hexdigest(), "tenant": tenant, "roles": list(roles)}
        for tenant, roles in tenants.items()
    ]
    path.write_text(yaml.safe_dump(entries))
    return path


def bearer(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {tenant}-token"),)


def prompt(**options: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hello", options=inference_pb2.Options(**options))


async def refusal(call: Any) -> tuple[str, str]:
    """Status and reason of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return failure.value.code().name, reason(failure.value)


async def drained(call: Any) -> list[Any]:
    return [message async for message in call]


async def test_a_call_is_of_its_tokens_tenant_whatever_it_calls_itself(model: Path, tmp_path: Path) -> None:
    listed = tokens_file(tmp_path / "tokens.yaml", acme=(), gate=("delegate",))
    async with serving(model, scripted([7, 8, 2]), auth="tokens", auth_tokens=listed) as served:
        await drained(served.stub.Generate(prompt(), metadata=bearer("acme")))
        label = (("triptych-tenant", "acme"),)
        await drained(served.stub.Generate(prompt(), metadata=bearer("acme") + label))
        await drained(served.stub.Generate(prompt(), metadata=bearer("gate") + label))
        assert [submit.tenant for submit in served.engine.submits] == ["acme"] * 3
        # What keeps cached blocks apart: the digest that a prompt's blocks are chained to.
        await drained(served.stub.Generate(prompt(), metadata=bearer("gate")))
        roots = [submit.root_digest for submit in served.engine.submits]
        assert len(set(roots[:3])) == 1
        assert roots[3] != roots[0]
        other = (("triptych-tenant", "other"),)
        assert await refusal(served.stub.Generate(prompt(), metadata=bearer("acme") + other)) == (
            "PERMISSION_DENIED",
            "OTHER_TENANT",
        )


async def test_a_call_without_a_known_token_is_refused_whatever_it_asks(model: Path, tmp_path: Path) -> None:
    listed = tokens_file(tmp_path / "tokens.yaml", acme=())
    wrong: dict[str, tuple[tuple[str, str], ...]] = {
        "NO_TOKEN": (("triptych-tenant", "acme"),),
        "UNKNOWN_TOKEN": (("authorization", "Bearer acme-token2"),),
        "NOT_BEARER": (("authorization", "Basic YWNtZTp0b2tlbg=="),),
        "SEVERAL_TOKENS": bearer("acme") * 2,
    }
    async with serving(model, auth="tokens", auth_tokens=listed, vllm_adapter=True) as served:
        adapter = vllm_engine_pb2_grpc.VllmEngineStub(served.channel)
        for told, metadata in wrong.items():
            calls = [
                served.stub.Generate(prompt(), metadata=metadata),
                served.stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(), metadata=metadata),
                served.stub.Tokenize(inference_pb2.TokenizeRequest(), metadata=metadata),
                served.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
                adapter.Generate(vllm_engine_pb2.GenerateRequest(), metadata=metadata),
                adapter.Abort(vllm_engine_pb2.AbortRequest(), metadata=metadata),
                adapter.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=metadata),
            ]
            assert await asyncio.gather(*map(refusal, calls)) == [("UNAUTHENTICATED", told)] * len(calls)
        assert (await adapter.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
        assert served.engine.submits == []


async def test_a_withdrawn_token_is_refused_and_a_broken_file_changes_nothing(model: Path, tmp_path: Path) -> None:
    path = tokens_file(tmp_path / "tokens.yaml", acme=(), zeta=())
    async with serving(model, auth="tokens", auth_tokens=path) as served:

        async def ask(tenant: str) -> None:
            await served.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(tenant))

        await ask("acme")
        path.write_text("- {tenant: acme, sha256: short}")
        await ask("acme")
        tokens_file(path, zeta=(), late=())
        assert await refusal(ask("acme")) == ("UNAUTHENTICATED", "UNKNOWN_TOKEN")
        await ask("zeta")
        await ask("late")


async def test_another_tenants_token_does_not_end_a_request_nor_rule_the_cache(model: Path, tmp_path: Path) -> None:
    listed = tokens_file(tmp_path / "tokens.yaml", acme=(), rival=(), boss=("admin",))
    engine = scripted([7] * 200, step_s=0.02)
    async with serving(model, engine, auth="tokens", auth_tokens=listed, vllm_adapter=True) as served:
        adapter = vllm_engine_pb2_grpc.VllmEngineStub(served.channel)
        request = vllm_engine_pb2.GenerateRequest(request_id="r1", text="hello", stream=True)
        request.sampling_params.max_tokens = 100
        request.sampling_params.ignore_eos = True
        call = adapter.Generate(request, metadata=bearer("acme"))
        replies = aiter(call)
        await anext(replies)
        abort = vllm_engine_pb2.AbortRequest(request_ids=["r1"])
        await adapter.Abort(abort, metadata=bearer("rival"))
        await anext(replies)
        assert not call.done()
        await adapter.Abort(abort, metadata=bearer("acme"))
        assert (await drained(replies))[-1].complete.finish_reason == "abort"
        flush = common_pb2.FlushCacheRequest()
        follow = common_pb2.SubscribeKvEventsRequest()
        denied = ("PERMISSION_DENIED", "ADMIN_ONLY")
        assert await refusal(adapter.FlushCache(flush, metadata=bearer("rival"))) == denied
        assert await refusal(adapter.SubscribeKvEvents(follow, metadata=bearer("rival"))) == denied
        with pytest.raises(grpc.aio.AioRpcError) as passed:  # the stub engine has no cache to flush
            await adapter.FlushCache(flush, metadata=bearer("boss"))
        assert passed.value.code() is not grpc.StatusCode.PERMISSION_DENIED


async def test_a_tenant_is_held_to_its_rates_and_another_is_not(model: Path, tmp_path: Path) -> None:
    listed = tokens_file(tmp_path / "tokens.yaml", acme=(), zeta=())
    settings = {"tenant_requests_per_s": 0.01, "tenant_burst_requests": 2, "tenant_max_requests": 1}
    engine = scripted([7] * 200, step_s=0.02)
    async with serving(model, engine, auth="tokens", auth_tokens=listed, **settings) as served:
        call = served.stub.Generate(prompt(max_tokens=100), metadata=bearer("acme"))
        await call.read()
        assert await refusal(served.stub.Generate(prompt(), metadata=bearer("acme"))) == (
            "RESOURCE_EXHAUSTED",
            "TENANT_REQUESTS",
        )
        call.cancel()
        while True:
            try:
                await served.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer("acme"))
                break
            except grpc.aio.AioRpcError as error:  # until the cancel is there
                assert reason(error) == "TENANT_REQUESTS"
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await served.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer("acme"))
        assert reason(failure.value) == "TENANT_REQUEST_RATE"
        assert 90 < retry_after_s(failure.value) <= 100
        await served.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer("zeta"))


async def test_tokens_of_prompt_and_answer_are_counted(model: Path) -> None:
    settings = {"tenant_tokens_per_min": 6.0, "tenant_burst_tokens": 10}
    async with serving(model, scripted([7] * 20), **settings) as served:
        tokens = len(served.ids("hello")) + 10
        assert tokens > 10
        await drained(served.stub.Generate(prompt(max_tokens=10)))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await drained(served.stub.Generate(prompt(max_tokens=1)))
        assert reason(failure.value) == "TENANT_TOKEN_RATE"
        # At 0.1 tokens a second up to 1, from 10 less what was used.
        assert retry_after_s(failure.value) == pytest.approx((tokens - 10 + 1) / 0.1, abs=5)


# Signed tokens


def jwks(path: Path) -> Path:
    public = {"rsa": (RSA_KEY, jwt.algorithms.RSAAlgorithm), "ec": (EC_KEY, jwt.algorithms.ECAlgorithm)}
    keys = [
        json.loads(kind.to_jwk(key.public_key())) | {"kid": name, "use": "sig"} for name, (key, kind) in public.items()
    ]
    symmetric = {"kty": "oct", "kid": "oct", "k": base64.urlsafe_b64encode(b"secret" * 8).decode().rstrip("=")}
    path.write_text(json.dumps({"keys": [*keys, symmetric]}))
    return path


def claims(**changed: Any) -> dict[str, Any]:
    made = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "exp": time.time() + 600} | changed
    return {name: value for name, value in made.items() if value is not None}


def signed(key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "rsa", **changed: Any) -> str:
    return jwt.encode(claims(**changed), key, algorithm, headers={"kid": kid} if kid else None)


def forged_with_the_public_key() -> str:
    """HMAC whose secret is the public key's PEM: what a verifier takes that lets the token choose the algorithm."""
    secret = RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )

    def encode(value: Any) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    signing = encode({"alg": "HS256", "kid": "rsa", "typ": "JWT"}) + b"." + encode(claims())
    mac = hmac.new(secret, signing, hashlib.sha256).digest()
    return (signing + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")).decode()


class Call:
    """A call's context, with a token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)


@pytest.fixture
def verifier(tmp_path: Path) -> SignedTokens:
    return SignedTokens(Claims(ISSUER, AUDIENCE, ("RS256", "ES256")), key_set.FileKeys(jwks(tmp_path / "jwks.json")))


async def identity(verifier: SignedTokens, token: str) -> Identity | str:
    try:
        return await verifier.identify(Call(token))
    except RequestError as error:
        assert error.code is grpc.StatusCode.UNAUTHENTICATED
        return error.reason


async def test_a_signed_token_says_tenant_and_roles(verifier: SignedTokens) -> None:
    assert await identity(verifier, signed()) == Identity("acme")
    assert await identity(verifier, signed(EC_KEY, "ES256", "ec", sub="zeta", roles=["admin", "cook"])) == Identity(
        "zeta", frozenset({"admin"})
    )
    assert await identity(verifier, signed(aud=["else", AUDIENCE], roles="admin delegate")) == Identity(
        "acme", frozenset({"admin", "delegate"})
    )
    assert await identity(verifier, signed(exp=time.time() - 20)) == Identity("acme")  # within the leeway of 30 s


async def test_every_check_of_a_signed_token_refuses_by_itself(verifier: SignedTokens) -> None:
    now = time.time()
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    unsigned = jwt.encode(claims(), None, "none", headers={"kid": "rsa"})
    whole = signed()
    head, body, mark = whole.split(".")
    other_body = signed(sub="zeta").split(".")[1]
    expected = {
        "TOKEN_EXPIRED": signed(exp=now - 40),
        "TOKEN_NOT_YET": signed(nbf=now + 40),
        "WRONG_AUDIENCE": signed(aud="else"),
        "WRONG_ISSUER": signed(iss="https://else.test"),
        "CLAIM_MISSING": signed(exp=None),
        "UNKNOWN_KEY": signed(kid="gone"),
        "WRONG_ALGORITHM": unsigned,
        "NOT_A_JWT": "acme-token",
        "WRONG_SIGNATURE": signed(stranger),
        "NO_TENANT": signed(sub=""),
    }
    assert {told: await identity(verifier, token) for told, token in expected.items()} == {
        told: told for told in expected
    }
    assert await identity(verifier, signed(sub=None)) == "CLAIM_MISSING"
    assert await identity(verifier, signed(kid=None)) == "UNKNOWN_KEY"  # of two keys
    assert await identity(verifier, signed(algorithm="RS384")) == "WRONG_ALGORITHM"
    assert await identity(verifier, f"{head}.{other_body}.{mark}") == "WRONG_SIGNATURE"
    assert await identity(verifier, f"{head}.{body}.") == "WRONG_SIGNATURE"
    assert await identity(verifier, forged_with_the_public_key()) == "WRONG_ALGORITHM"
    assert await identity(verifier, jwt.encode(claims(), b"secret" * 8, "HS256", headers={"kid": "oct"})) == (
        "WRONG_ALGORITHM"
    )


async def test_an_algorithm_that_is_listed_but_not_the_keys_is_refused(verifier: SignedTokens) -> None:
    """RS256 under the name of the EC key: the key, not the token, says how it signs."""
    assert await identity(verifier, signed(RSA_KEY, "RS256", "ec")) == "WRONG_SIGNATURE"


@contextmanager
def issuer(answers: list[bytes]) -> Iterator[tuple[str, list[str]]]:
    """A server of key sets on loopback: its URL, and the requests it has had. The last answer stays; b"" fails."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers[min(len(asked), len(answers) - 1)]
            asked.append(self.path)
            self.send_response(200 if body else 500)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/jwks", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_keys_are_fetched_kept_renewed_and_not_lost_with_the_issuer(tmp_path: Path) -> None:
    now = [0.0]
    body = jwks(tmp_path / "jwks.json").read_bytes()
    with issuer([b"", body, body, b""]) as (url, asked):
        keys = key_set.FetchedKeys(url, clock=lambda: now[0])
        verifier = SignedTokens(Claims(ISSUER, AUDIENCE, ("RS256",)), keys)
        assert await identity(verifier, signed()) == "UNKNOWN_KEY"
        assert await identity(verifier, signed()) == "UNKNOWN_KEY"  # not asked again at once
        assert len(asked) == 1
        now[0] += key_set.LEAST_S
        assert await asyncio.gather(*(identity(verifier, signed()) for _ in range(20))) == [Identity("acme")] * 20
        assert len(asked) == 2
        for number in range(20):  # made-up key ids do not make us ask, but once in a while
            assert await identity(verifier, signed(kid=f"made up {number}")) == "UNKNOWN_KEY"
        assert len(asked) == 2
        now[0] += key_set.FRESH_S
        assert await identity(verifier, signed()) == Identity("acme")
        assert len(asked) == 3
        now[0] += key_set.FRESH_S
        assert await identity(verifier, signed()) == Identity("acme")  # the issuer answers no more
        assert len(asked) == 4


async def test_a_service_takes_signed_tokens(model: Path, tmp_path: Path) -> None:
    settings = {
        "auth": "jwt",
        "jwt_issuer": ISSUER,
        "jwt_audience": AUDIENCE,
        "jwt_keys": str(jwks(tmp_path / "jwks.json")),
    }
    async with serving(model, scripted([7, 2]), **settings) as served:
        metadata = (("authorization", f"Bearer {signed()}"),)
        await drained(served.stub.Generate(prompt(), metadata=metadata))
        assert [submit.tenant for submit in served.engine.submits] == ["acme"]
        late = (("authorization", f"Bearer {signed(exp=time.time() - 60)}"),)
        assert await refusal(served.stub.Generate(prompt(), metadata=late)) == ("UNAUTHENTICATED", "TOKEN_EXPIRED")


# Certificates


@asynccontextmanager
async def as_client(served: Served, authority: Authority, name: str) -> AsyncIterator[Any]:
    files = authority.issue(name.replace("/", "_"), name)
    shown = grpc.ssl_channel_credentials(authority.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())
    async with grpc.aio.secure_channel(f"127.0.0.1:{served.frontend.server.port}", shown) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def test_a_certificate_is_an_identity(model: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server")
    tls = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
    async with serving(model, scripted([7, 2]), auth="mtls", **tls) as served:
        async with as_client(served, authority, "spiffe://test/acme") as stub:
            await drained(stub.Generate(prompt()))
        async with as_client(served, authority, "zeta.test") as stub:
            await drained(stub.Generate(prompt()))
        assert [submit.tenant for submit in served.engine.submits] == ["spiffe://test/acme", "zeta.test"]
    names = tmp_path / "names.yaml"
    names.write_text(yaml.safe_dump([{"name": "spiffe://test/acme", "tenant": "acme"}]))
    async with serving(model, scripted([7, 2]), auth="mtls", auth_names=names, **tls) as served:
        async with as_client(served, authority, "spiffe://test/acme") as stub:
            await drained(stub.Generate(prompt()))
        assert served.engine.submits[-1].tenant == "acme"
        async with as_client(served, authority, "zeta.test") as stub:
            assert await refusal(stub.Generate(prompt())) == ("PERMISSION_DENIED", "UNKNOWN_NAME")


# What an operator is told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auth": "tokens"}, "auth is tokens, and auth_tokens is not set"),
        ({"auth": "jwt", "jwt_issuer": "x"}, "jwt_audience is not set"),
        ({"auth": "mtls"}, "tls_client_ca is not set"),
        ({"auth_tokens": "x"}, "auth_tokens is set, but auth is off"),
        ({"jwt_keys": "http://id.test/jwks"}, "use https"),
        ({"jwt_keys": "https://me:pw@id.test/jwks"}, "no user and password"),
        ({"auth": "jwt", "jwt_algorithms": ["HS256"]}, "RS256"),
        ({"auth": "jwt", "jwt_algorithms": ["none"]}, "RS256"),
        ({"tls_cert": "x"}, "tls_cert is set without tls_key"),
        ({"tls_client_ca": "x"}, "tls_client_ca is set without tls_cert"),
        ({"peer_cert": "x"}, "peer_cert is set without peer_key"),
        ({"peer_server_name": "x"}, "without peer_ca"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrontendConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {tenant: acme, sha256: short}", r"0\.sha256: "),
        ("- {tenant: acme}", r"0\.sha256: Field required"),
        (f"- {{tenant: '', sha256: {'a' * 64}}}", r"0\.tenant: "),
        (f"- {{tenant: acme, sha256: {'a' * 64}, role: admin}}", r"0\.role: Extra inputs"),
        (f"- {{tenant: acme, sha256: {'a' * 64}, roles: [root]}}", r"0\.roles: 'root' is no role"),
        ("tenant: acme", "the file: "),
        ("- [", "cannot read"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_used_is_told_without_its_hashes(
    text: str, message: str, tmp_path: Path
) -> None:
    from services.frontend.auth.listed import Tokens

    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(StartError, match=message) as error:
        Tokens(path)
    assert "aaaa" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}'])
def test_a_key_set_that_cannot_be_used_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(text)
    with pytest.raises(StartError, match="jwt_keys: "):
        key_set.of(str(path))
