"""The logs of the three services as processes: JSON lines, one a request, and never a word of prompt or answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from services.cli.main import main
from tests.support import vllm_calls
from tests.support.calls import by_text, chat, generate, greedy
from tests.support.cluster import ORDER, Cluster, free_port, running

PROMPT, ANSWER = "zanzibar", "quetzalcoatl"
"""Words of a client, and of the model."""
LABEL = "batch 7\n2026-12-01 E forged \x1b[31m\u202e"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[Cluster]:
    """All at debug, as JSON."""
    loud = ["--log-level", "debug", "--log-format", "json"]
    frontend = [*loud, "--vllm-adapter", "--admin-port", str(admin_port)]
    with running(tiny, tmp_path_factory.mktemp("logs"), executor=loud, scheduler=loud, frontend=frontend) as cluster:
        yield cluster


def lines(cluster: Cluster, service: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cluster.log(service).splitlines()]


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end_s, "it does not come"
        time.sleep(0.05)
    return found


def only(text: str) -> generation_pb2.Grammar:
    return generation_pb2.Grammar(choices=generation_pb2.Grammar.Choices(values=[text]))


def said(text: str, **options: Any) -> inference_pb2.ChatRequest:
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=[inference_pb2.ContentPart(text=text)])
    return inference_pb2.ChatRequest(messages=[message], options=greedy(**options))


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def talk(address: str) -> None:
    """Requests that end in every way, all with words in them that no log may hold."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await chat(channel, said(PROMPT, grammar=only(ANSWER), label=LABEL))
        assert answer.text == ANSWER
        await generate(channel, by_text(f"{PROMPT} {ANSWER}", greedy(max_tokens=8, echo=True, logprobs=2, n=2)))
        await stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT))
        await vllm_calls.generate(channel, vllm_calls.by_text(PROMPT, stream=True, max_tokens=4))
        wrong = [
            by_text(PROMPT * 2000, greedy()),
            by_text(PROMPT, greedy(stop=[ANSWER * 1000])),
            by_text(PROMPT, greedy(stop=[ANSWER, ""])),
            by_text(PROMPT, greedy(cache_salt=PROMPT * 1000)),
            by_text(PROMPT, greedy(grammar=generation_pb2.Grammar(regex=f"{ANSWER}("))),
            by_text(PROMPT, greedy(grammar=generation_pb2.Grammar(json_schema=f'{{"type": "{ANSWER}"}}'))),
            by_text(PROMPT, greedy(grammar=generation_pb2.Grammar(lark=f"start: {ANSWER}"))),
            by_text(PROMPT, greedy(grammar=only(ANSWER), min_tokens=10**6)),
        ]
        for request in wrong:
            assert await refused(generate(channel, request)) is grpc.StatusCode.INVALID_ARGUMENT
        tool = inference_pb2.Tool(name="t", description=PROMPT, parameters_json_schema=f'{{"x": "{PROMPT}')
        request = said(PROMPT)
        request.tools.append(tool)
        await refused(chat(channel, request))
        stream = stub.Generate(by_text(PROMPT, greedy(ignore_eos=True, label="left")))
        await stream.read()
        await stream.read()
        stream.cancel()
        await refused(generate(channel, by_text(PROMPT, greedy(ignore_eos=True, label="late")), timeout_s=0.1))


def requests(cluster: Cluster) -> list[dict[str, Any]]:
    return [line for line in lines(cluster, "frontend") if line["message"] == "request ended"]


def test_every_request_has_its_line_and_no_line_a_word_of_it(cluster: Cluster) -> None:
    asyncio.run(talk(cluster.address))
    ends = until(lambda: (found := requests(cluster)) and len(found) == 15 and found)
    statuses = [line["status"] for line in ends]
    assert statuses == ["OK"] * 4 + ["INVALID_ARGUMENT"] * 9 + ["CANCELLED", "DEADLINE_EXCEEDED"]
    first = ends[0]
    assert first["label"] == LABEL and first["output_tokens"] > 0 and first["finish_reasons"] == {"stop": 1}
    for service in ORDER:
        log = cluster.log(service)
        assert all(line["service"] == service for line in lines(cluster, service))  # JSON, every line
        assert log.isascii() and "\x1b" not in log
        for word in (PROMPT, ANSWER):
            assert word not in log, [line for line in log.splitlines() if word in line][:3]
        assert any(line["level"] == "debug" for line in lines(cluster, service)) or service == "executor"


def scheduler_of(cluster: Cluster) -> str:
    return f"127.0.0.1:{cluster.ports['scheduler']}"


async def ask(cluster: Cluster, label: str) -> None:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        await generate(channel, by_text("hi", greedy(max_tokens=1, label=label)))


def test_the_level_is_set_in_all_three_while_they_run(
    cluster: Cluster, admin_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, frontend = scheduler_of(cluster), f"127.0.0.1:{admin_port}"
    assert main(["log-level", "warning", scheduler, frontend]) == 0
    told = capsys.readouterr().out.splitlines()
    assert sorted(told) == sorted(
        [f"{scheduler} scheduler: warning", f"{scheduler} executor: warning", f"{frontend} frontend: warning"]
    )
    asyncio.run(ask(cluster, "unheard"))
    assert main(["log-level", "info", frontend, "--logger", "services.frontend.request_log", "--for-s", "2"]) == 0
    assert capsys.readouterr().out == f"{frontend} frontend: info for 2 s\n"
    asyncio.run(ask(cluster, "heard"))
    until(lambda: any(line.get("label") == "heard" for line in requests(cluster)))
    time.sleep(2.5)
    asyncio.run(ask(cluster, "too late"))
    sizes = {service: len(cluster.log(service)) for service in ORDER}
    time.sleep(1.5)  # heartbeats and self-tests would be told at debug
    assert {service: len(cluster.log(service)) for service in ORDER} == sizes
    assert main(["log-level", "configured", scheduler, frontend]) == 0
    asyncio.run(ask(cluster, "back"))
    until(lambda: any(line.get("label") == "back" for line in requests(cluster)))
    assert not {"unheard", "too late"} & {line.get("label") for line in requests(cluster)}
    audited = [line for line in lines(cluster, "scheduler") if line["message"] == "admin call"]
    assert [line["level"] for line in audited] == ["info"] * 2  # also the one after which info is not told
    assert all(line["method"] == "SetLogLevel" and line["peer"] for line in audited)


def test_a_logger_that_one_of_them_has_is_set_there_and_the_exit_code_says_so(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = scheduler_of(cluster)
    assert main(["log-level", "info", scheduler, "--logger", "services.executor"]) == 1
    told = capsys.readouterr().out
    assert f"{scheduler} executor: info\n" in told
    assert f"{scheduler} scheduler: logger is 'services.executor', and this process has none" in told
    assert main(["log-level", "configured", scheduler, "--logger", "services.executor"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--logger", "no.such"], "INVALID_ARGUMENT: logger: scheduler: logger is 'no.such'"),
        (["--for-s", "0"], "INVALID_ARGUMENT: duration_s: is 0; it must be in [1, 604800]"),
    ],
)
def test_what_cannot_be_set_is_one_error(
    cluster: Cluster, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log-level", "debug", scheduler_of(cluster), *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_service_that_is_not_there_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log-level", "debug", f"127.0.0.1:{free_port()}"]) == 1
    assert ": UNAVAILABLE: " in capsys.readouterr().err


async def test_what_only_a_scheduler_can_answer_is_said_by_the_frontend(cluster: Cluster, admin_port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{admin_port}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        for name in ("GetStats", "GetLoad", "FlushPrefixCache", "Drain"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(admin, name)(getattr(admin_pb2, f"{name}Request")())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert caught.value.details() == f"{name} is the scheduler's to answer; ask on its port"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest()).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_top_shows_these_services(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--interval-s", "0.2", scheduler_of(cluster)]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert engine["state"] == "serving" and engine["free_blocks"] > 0 and engine["step_s"]["execute"] > 0
    assert engine["ttft_s"]["count"] > 0 and engine["finished"]["stop"] > 0
