"""Streams that are resumed on a real checkpoint: the ids and texts of the undisturbed ones, whatever was killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2

from tests.support.broken import joined, resume_of
from tests.support.calls import by_ids, generate
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import Cluster, free_port, health, running
from triptych_client import Client, Completion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [50 + i for i in range(20)]
SAMPLED = generation_pb2.Sampling(temperature=1.0, top_k=-1, repetition_penalty=1.2)
WAYS: dict[str, dict[str, Any]] = {
    "seeded": {"seed": 11},
    "three choices with logprobs": {"seed": 11, "n": 3, "logprobs": 1},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two frontends before one engine."""
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")
    with running(model, tmp_path_factory.mktemp("logs")) as cluster:
        cluster.ports["frontend-2"] = free_port()
        cluster.start_one("frontend", name="frontend-2")
        try:
            while health(cluster.ports["frontend-2"], "generate") != "SERVING":
                assert cluster.processes["frontend-2"].poll() is None, cluster.log("frontend-2")
            yield cluster
        finally:
            second = cluster.processes.pop("frontend-2")
            second.kill()
            second.wait()


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_goes_on_from_every_fourth_message_on_another_frontend(cluster: Cluster, way: str) -> None:
    options = inference_pb2.Options(sampling=SAMPLED, max_tokens=24, ignore_eos=True, **WAYS[way])
    async with (
        grpc.aio.insecure_channel(cluster.address) as first,
        grpc.aio.insecure_channel(f"127.0.0.1:{cluster.ports['frontend-2']}") as second,
    ):
        whole = (await generate(first, by_ids(PROMPT, options))).messages
        again = inference_pb2.Options()
        for cut in range(1, len(whole), 4):
            again.CopyFrom(options)
            again.resume.CopyFrom(resume_of(whole[:cut]))
            rest = (await generate(second, by_ids(PROMPT, again))).messages
            check_same(joined([*whole[:cut], *rest]), joined(whole))
            assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens


async def test_a_frontend_and_a_scheduler_that_are_killed_are_pauses(cluster: Cluster) -> None:
    address = f"ipv4:{cluster.address},127.0.0.1:{cluster.ports['frontend-2']}"
    options: dict[str, Any] = {"seed": 3, "max_tokens": 200, "ignore_eos": True, "n": 2}
    async with Client(address) as client:
        expected: Completion = await client.generate(PROMPT, **options).collect()
        stream = client.generate(PROMPT, **options)
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 20:
                cluster.kill("frontend")
            if len(deltas) == 150:
                cluster.kill("scheduler")
                cluster.processes["scheduler"].wait()
                cluster.start_one("scheduler")
        got = {index: [i for d in deltas if d.index == index for i in d.token_ids] for index in (0, 1)}
        texts = {index: "".join(d.text for d in deltas if d.index == index) for index in (0, 1)}
    assert got == {choice.index: list(choice.token_ids) for choice in expected.choices}
    assert texts == {choice.index: choice.text for choice in expected.choices}
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == 400
    cluster.revive()


def check_same(got: dict[int, inference_pb2.Choice], expected: dict[int, inference_pb2.Choice]) -> None:
    """Ids, texts and finishes exactly; logprobs as near as another batch computes them."""
    assert got.keys() == expected.keys()
    for index, choice in expected.items():
        mine = got[index]
        assert (mine.token_ids, mine.text, mine.finish) == (choice.token_ids, choice.text, choice.finish)
        told = [entry.token.logprob for entry in choice.logprobs]
        assert [entry.token.logprob for entry in mine.logprobs] == pytest.approx(told, abs=1e-4)
        assert mine.cumulative_logprob == pytest.approx(choice.cumulative_logprob, abs=1e-3)
