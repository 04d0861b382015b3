"""Parts that die, and what clients see: never an OK stream that is cut short."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.calls import Answer, by_ids, generate, greedy
from tests.support.checkpoints import reference_ids
from tests.support.cluster import Cluster, free_port, health, running

PROMPTS = [[3, 4, 5, 6], [7, 8, 9], [10, 11]]
NUM_IDS = 400
ENDLESS = by_ids([3, 4, 5, 6], greedy(max_tokens=1000, ignore_eos=True))


@pytest.fixture(scope="module")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tiny, tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """All three running; what an earlier test ended is started again."""
    shared.revive()
    return shared


async def status_after(cluster: Cluster, kill) -> tuple[grpc.StatusCode, Answer]:
    """Starts an endless stream, kills once the first id is there, and returns how the stream ended."""
    answer = Answer()
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        from triptych.inference.v1 import inference_pb2_grpc

        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ENDLESS, timeout=60)
        try:
            async for message in call:
                answer.messages.append(message)
                if len(answer.ids) == 1 or (answer.ids and kill):
                    kill()
                    kill = lambda: None  # noqa: E731
        except grpc.aio.AioRpcError as error:
            return error.code(), answer
    return grpc.StatusCode.OK, answer


async def streams_through(cluster: Cluster, disturb: Callable[[], object]) -> list[Answer]:
    """Starts a stream for each prompt, disturbs the cluster once each is well under way, and returns how they ended."""
    tasks: list[asyncio.Task[Answer]] = []
    under_way = [asyncio.Semaphore(0) for _ in PROMPTS]  # released with each message
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        for prompt, messages in zip(PROMPTS, under_way, strict=True):
            request = by_ids(prompt, greedy(max_tokens=NUM_IDS, ignore_eos=True))
            tasks.append(asyncio.ensure_future(generate(channel, request, timeout_s=90, on_message=messages.release)))
        for messages in under_way:
            for _ in range(20):
                await messages.acquire()
        await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


def kill_and_start(cluster: Cluster, name: str) -> None:
    cluster.kill(name)
    cluster.processes[name].wait(5)
    cluster.wait_generate(False, timeout_s=15)
    cluster.start_one(name)


def test_X3_streams_outlive_a_killed_executor_and_get_the_ids_of_the_undisturbed(cluster: Cluster, tiny: Path) -> None:
    answers = asyncio.run(streams_through(cluster, lambda: kill_and_start(cluster, "executor")))
    assert [answer.ids for answer in answers] == reference_ids(tiny, PROMPTS, NUM_IDS, ignore_eos=True)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.reason == "LENGTH"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), NUM_IDS)
    assert "3 requests are kept" in cluster.log("scheduler")
    cluster.wait_generate(True, timeout_s=60)


def test_X3_streams_outlive_an_executor_that_is_frozen_in_a_step(cluster: Cluster, tiny: Path) -> None:
    before = cluster.log("scheduler").count("lost the executor")

    def freeze() -> None:
        cluster.kill("executor", signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 20
            while cluster.log("scheduler").count("lost the executor") == before and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            cluster.kill("executor", signal.SIGCONT)

    answers = asyncio.run(streams_through(cluster, freeze))
    assert cluster.log("scheduler").count("lost the executor") == before + 1
    assert [answer.ids for answer in answers] == reference_ids(tiny, PROMPTS, NUM_IDS, ignore_eos=True)


@pytest.mark.parametrize("stopped", ["executor", "scheduler"])
def test_P1_a_frozen_peer_changes_what_the_frontend_says_of_generate_alone(cluster: Cluster, stopped: str) -> None:
    cluster.kill(stopped, signal.SIGSTOP)
    try:
        cluster.wait_generate(False, timeout_s=15)
        assert health(cluster.ports["frontend"], "readiness") == "SERVING"
        assert health(cluster.ports["frontend"], "liveness") == "SERVING"
    finally:
        cluster.kill(stopped, signal.SIGCONT)
    cluster.wait_generate(True, timeout_s=30)
    assert len(asyncio.run(one(cluster)).ids) == 4


def test_P1_a_killed_executor_changes_what_the_others_say_of_generate_alone(cluster: Cluster) -> None:
    cluster.kill("executor")
    cluster.wait_generate(False, timeout_s=15)
    for service in ("frontend", "scheduler"):
        assert health(cluster.ports[service], "readiness") == "SERVING"
        assert health(cluster.ports[service], "liveness") == "SERVING"
    cluster.processes["executor"].wait(5)
    cluster.start_one("executor")
    cluster.wait_generate(True, timeout_s=60)
    assert len(asyncio.run(one(cluster)).ids) == 4


def test_G1_streams_outlive_a_killed_scheduler_and_get_the_ids_of_the_undisturbed(cluster: Cluster, tiny: Path) -> None:
    answers = asyncio.run(streams_through(cluster, lambda: kill_and_start(cluster, "scheduler")))
    assert [answer.ids for answer in answers] == reference_ids(tiny, PROMPTS, NUM_IDS, ignore_eos=True)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.reason == "LENGTH"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), NUM_IDS)


def test_G1_a_scheduler_that_does_not_come_back_ends_streams_unavailable(tiny: Path, tmp_path: Path) -> None:
    with running(tiny, tmp_path, frontend=["--failover-s", "1"]) as cluster:
        code, answer = asyncio.run(status_after(cluster, lambda: cluster.kill("scheduler")))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert answer.finishes == []


def test_a_second_scheduler_takes_the_executor_and_the_first_has_it_back_when_it_leaves(cluster: Cluster) -> None:
    cluster.ports["spare"] = free_port()
    cluster.start_one("scheduler", name="spare")
    try:
        cluster.wait_generate(False, timeout_s=30)
        for _ in range(30):  # the newest keeps it: no epoch is taken back while it lives
            assert health(cluster.ports["frontend"], "generate") == "NOT_SERVING"
            time.sleep(0.1)
        assert health(cluster.ports["spare"], "generate") == "SERVING"
        assert cluster.log("scheduler").count("standing by until it leaves") == 1
    finally:
        cluster.kill("spare")
        cluster.processes.pop("spare").wait(5)
    cluster.wait_generate(True, timeout_s=30)
    assert len(asyncio.run(one(cluster)).ids) == 4


@pytest.mark.parametrize("name", ["frontend", "scheduler", "executor"])
def test_sigterm_ends_each_service_cleanly(cluster: Cluster, name: str) -> None:
    cluster.kill(name, signal.SIGTERM)
    assert cluster.processes[name].wait(15) == 0
    assert "services.common.server: stopped" in cluster.log(name)
    assert "Traceback" not in cluster.log(name)


@pytest.mark.parametrize("name", ["frontend", "scheduler", "executor"])
def test_P2_a_service_told_to_end_refuses_what_is_new_and_streams_end_well(
    cluster: Cluster, tiny: Path, name: str
) -> None:
    """The frontend and the scheduler finish theirs; an executor does its steps in flight, and its successor goes on."""
    refused: list[grpc.StatusCode] = []

    def terminate() -> None:
        cluster.kill(name, signal.SIGTERM)
        service = cluster.ports[name]
        deadline = time.monotonic() + 5
        while health(service, "readiness") == "SERVING" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert health(service, "readiness") in ("NOT_SERVING", "UNAVAILABLE")
        try:
            asyncio.run(one(cluster))
        except grpc.aio.AioRpcError as error:
            refused.append(error.code())
        if name == "executor":
            cluster.processes[name].wait(15)
            cluster.start_one(name)

    answers = asyncio.run(streams_through(cluster, terminate))
    assert [answer.ids for answer in answers] == reference_ids(tiny, PROMPTS, NUM_IDS, ignore_eos=True)
    assert [answer.reason for answer in answers] == ["LENGTH"] * len(PROMPTS)
    assert refused == [grpc.StatusCode.UNAVAILABLE]
    if name != "executor":
        assert cluster.processes[name].wait(15) == 0


async def one(cluster: Cluster) -> Answer:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        return await generate(channel, by_ids([3, 4, 5], greedy(max_tokens=4, ignore_eos=True)), timeout_s=30)
