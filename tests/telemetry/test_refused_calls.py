"""Calls that are not let in: counted with their reason, timed and traced with their status, without their secrets."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from loadtest.otlp_sink import OtlpSink
from services.common import refusals
from services.common.telemetry import names
from services.frontend import request_log
from tests.frontend.harness import scripted, serving, text_checkpoint
from tests.frontend.test_auth import bearer, drained, prompt, refusal, tokens_file
from tests.support.metered import read, scrape

GENERATE = "triptych.inference.v1.InferenceService/Generate"
SECRET = "acme-token2"  # one letter from a token that is known


async def test_a_refused_call_is_counted_timed_and_traced_and_its_token_is_nowhere(
    tmp_path: Path, sink: OtlpSink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings: dict[str, Any] = {
        "auth": "tokens",
        "auth_tokens": tokens_file(tmp_path / "tokens.yaml", acme=(), zeta=()),
        "tenant_requests_per_s": 0.001,
        "tenant_burst_requests": 1,
        "metrics_port": 0,
        "otlp_endpoint": sink.endpoint,
    }
    wrong = (("authorization", f"Bearer {SECRET}"),)
    other = (*bearer("zeta"), ("triptych-tenant", "acme"))
    async with serving(text_checkpoint(tmp_path / "model"), scripted([7, 2]), **settings) as served:
        stub = served.stub
        await drained(stub.Generate(prompt(label="mine"), metadata=bearer("acme")))
        told = [
            await refusal(stub.Generate(prompt(), metadata=wrong)),
            await refusal(stub.Generate(prompt(), metadata=wrong)),
            await refusal(stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(), metadata=wrong)),
            await refusal(stub.Generate(prompt(), metadata=other)),
            await refusal(stub.Generate(prompt(), metadata=bearer("acme"))),
        ]
        assert told == [
            *[("UNAUTHENTICATED", "UNKNOWN_TOKEN")] * 3,
            ("PERMISSION_DENIED", "OTHER_TENANT"),
            ("RESOURCE_EXHAUSTED", "TENANT_REQUEST_RATE"),
        ]
        assert served.frontend.metrics is not None
        port = served.frontend.metrics.port
        metrics = await scrape(port)
        text = await asyncio.to_thread(read, port) + await asyncio.to_thread(read, port, openmetrics=True)
        spans = await sink.until(lambda spans: sum(span.kind == "SERVER" for span in spans) == 6)
    reasons = {"UNKNOWN_TOKEN": 3, "OTHER_TENANT": 1, "TENANT_REQUEST_RATE": 1}
    assert {reason: metrics.value(names.CALLS_FAILED, reason=reason) for reason in reasons} == reasons
    statuses = {"OK": 1, "UNAUTHENTICATED": 2, "PERMISSION_DENIED": 1, "RESOURCE_EXHAUSTED": 1}
    calls = {
        code: metrics.count(names.CALL_DURATION, rpc_method=GENERATE, rpc_response_status_code=code)
        for code in statuses
    }
    assert calls == statuses

    ended = [span.attributes["rpc.response.status_code"] for span in spans if span.kind == "SERVER"]
    assert sorted(ended) == sorted(["OK", *(code for code, _ in told)])
    assert all(span.error is None for span in spans)  # a client's doing

    requests = [record.fields for record in caplog.records if record.name == request_log.__name__]  # type: ignore[attr-defined]
    assert [(line["status"], line["tenant"]) for line in requests] == [("OK", "acme")]
    refused = [record.fields for record in caplog.records if record.name == refusals.__name__]  # type: ignore[attr-defined]
    assert sum(line["calls"] for line in refused) == 5 and len(refused) == 2
    assert refused[-1]["identity"] == "acme"  # whose quota it was
    for seen in (text, repr(spans), repr([record.__dict__ for record in caplog.records])):
        assert SECRET not in seen and "acme-token" not in seen and "zeta-token" not in seen


async def test_a_request_that_is_refused_after_the_door_is_told_with_its_tenant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    listed = tokens_file(tmp_path / "tokens.yaml", acme=())
    async with serving(text_checkpoint(tmp_path / "model"), auth="tokens", auth_tokens=listed) as served:
        stub = inference_pb2_grpc.InferenceServiceStub(served.channel)
        await refusal(stub.Generate(prompt(adapter="a"), metadata=bearer("acme")))
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="hi"), metadata=bearer("acme"))
    told = [record.fields for record in caplog.records if record.name == request_log.__name__]  # type: ignore[attr-defined]
    assert [(line["status"], line["tenant"]) for line in told] == [
        (grpc.StatusCode.UNIMPLEMENTED.name, "acme"),
        ("OK", "acme"),
    ]
