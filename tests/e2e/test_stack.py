"""What only the whole stack can show: text in and out of the real model, seeds, memory, several EOS ids."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from tokenizers import Tokenizer
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from services.common.philox import derived_seed
from tests.support.calls import by_ids, chat, generate, greedy
from tests.support.checkpoints import reference_ids
from tests.support.cluster import Cluster, running

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def cluster(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(embedded, tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


@pytest.fixture
async def channel(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        yield channel


def question(text: str, **options: object) -> inference_pb2.ChatRequest:
    content = [inference_pb2.ContentPart(text=text)]
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=content)
    return inference_pb2.ChatRequest(messages=[message], options=greedy(**options))


async def test_a_chat_is_answered_in_text_by_the_real_model(channel: grpc.aio.Channel, embedded: Path) -> None:
    answer = await chat(channel, question("What is the capital of France?", max_tokens=40))
    assert "Paris" in answer.text
    tokenizer = Tokenizer.from_file(str(embedded / "tokenizer.json"))
    assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert answer.reason == "STOP"
    assert answer.finishes[0].eos_token_id == answer.ids[-1] == tokenizer.token_to_id("<|im_end|>")
    assert answer.usage.completion_tokens == len(answer.ids)


async def test_unary_and_stream_agree(channel: grpc.aio.Channel) -> None:
    request = question("Name three colours.", max_tokens=24)
    streamed = await chat(channel, request)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    unary = (await stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=request))).response
    assert unary.choices[0].text == streamed.text
    assert list(unary.choices[0].token_ids) == streamed.ids
    # The second one finds more of its prompt in the cache.
    assert unary.usage.cached_tokens >= streamed.usage.cached_tokens
    unary.usage.cached_tokens = streamed.usage.cached_tokens
    assert unary.usage == streamed.usage


async def test_a_seed_gives_the_same_ids_alone_and_among_others(channel: grpc.aio.Channel) -> None:
    def sampled(seed: int | None) -> inference_pb2.GenerateRequest:
        sampling = generation_pb2.Sampling(temperature=1.0, top_p=0.95)
        options = inference_pb2.Options(sampling=sampling, seed=seed, max_tokens=24, ignore_eos=True)
        return by_ids([504, 3575, 282], options)

    alone = await generate(channel, sampled(7))
    crowd = await asyncio.gather(*(generate(channel, sampled(seed)) for seed in (1, 2, 3, 7, 4, 5, 6, None)))
    assert crowd[3].ids == alone.ids
    assert len({tuple(answer.ids) for answer in crowd}) == len(crowd)
    assert alone.prompt.seed == 7


async def test_frontend_and_scheduler_stay_under_250_mib_while_serving(
    cluster: Cluster, channel: grpc.aio.Channel
) -> None:
    await asyncio.gather(*(generate(channel, by_ids([1, 2, 3 + i], greedy(max_tokens=16))) for i in range(16)))
    for name in ("frontend", "scheduler"):
        assert psutil.Process(cluster.processes[name].pid).memory_info().rss < 250 * MIB


async def test_a_field_not_served_yet_is_refused_by_name(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await generate(channel, by_ids([5], greedy(adapter="a")))
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "options.adapter" in failure.value.details()


async def test_S5_G2_three_choices_are_three_requests_and_usage_counts_them_all(channel: grpc.aio.Channel) -> None:
    prompt = list(range(300, 340))

    def sampled(seed: int, **options: object) -> inference_pb2.GenerateRequest:
        sampling = generation_pb2.Sampling(temperature=1.0, top_p=0.95)
        return by_ids(prompt, inference_pb2.Options(sampling=sampling, seed=seed, max_tokens=20, **options))

    together = await generate(channel, sampled(77, n=3, min_delta_tokens=4))
    apart = [await generate(channel, sampled(derived_seed(77, choice))) for choice in range(3)]
    for index, one in enumerate(apart):
        mine = [choice for message in together.messages for choice in message.choices if choice.index == index]
        assert [token_id for choice in mine for token_id in choice.token_ids] == one.ids
        assert "".join(choice.text for choice in mine) == one.text
        assert len(mine) <= 6 and sum(choice.HasField("finish") for choice in mine) == 1
    assert len({tuple(one.ids) for one in apart}) == 3
    assert together.usage.prompt_tokens == len(prompt)
    assert together.usage.completion_tokens == sum(len(one.ids) for one in apart)
    # The first request filled two blocks of 16 tokens, which the later ones found.
    assert [one.usage.cached_tokens for one in apart] == [32, 32, 32]


async def test_K7_tenants_and_salts_share_no_blocks(channel: grpc.aio.Channel) -> None:
    async def cached(tenant: str, salt: str = "") -> int:
        request = by_ids(list(range(500, 540)), greedy(max_tokens=1, cache_salt=salt))
        answer = await generate(channel, request, metadata=(("triptych-tenant", tenant),))
        return answer.usage.cached_tokens

    assert [await cached("a"), await cached("a"), await cached("b"), await cached("a", "X")] == [0, 32, 0, 0]
    assert [await cached("b"), await cached("a", "X"), await cached("X")] == [32, 32, 0]


def test_K1_a_prompt_larger_than_the_pool_is_refused_and_the_next_request_is_served(tiny: Path, tmp_path: Path) -> None:
    async def checks(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            for options in (greedy(max_tokens=1), greedy()):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await generate(channel, by_ids([5] * 161, options))
                assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "161" in failure.value.details() and "160" in failure.value.details()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await generate(channel, by_ids([5] * 100, greedy(max_tokens=61)))
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            answer = await generate(channel, by_ids([5] * 100, greedy(max_tokens=60, ignore_eos=True)))
            assert len(answer.ids) == 60

    # The model's context is 1,024 tokens; 10 blocks of 16 beside the null block hold 160.
    with running(tiny, tmp_path, scheduler=["--num-kv-blocks", "11"]) as cluster:
        asyncio.run(checks(cluster.address))


def test_X4_every_eos_id_stops_and_ignore_eos_ignores_all_but_not_the_users_stops(tiny: Path, tmp_path: Path) -> None:
    async def checks(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stopped = await generate(channel, by_ids(prompt, greedy(max_tokens=40)))
            assert stopped.ids == ids[: ids.index(eos[1]) + 1]
            assert stopped.reason == "STOP"
            assert stopped.finishes[0].eos_token_id == eos[1]
            ignored = await generate(channel, by_ids(prompt, greedy(max_tokens=40, ignore_eos=True)))
            assert ignored.ids == ids
            assert ignored.reason == "LENGTH"
            options = greedy(max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
            user = await generate(channel, by_ids(prompt, options))
            assert user.ids == ids[: ids.index(stop) + 1]
            assert user.finishes[0].stop_token_id == stop

    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    (ids,) = reference_ids(tiny, [prompt], 40, ignore_eos=True)
    # The later of two EOS ids stands first in the output: a server that knows only one of them would run on.
    fresh = [i for n, i in enumerate(ids) if i not in ids[:n]]
    stop, eos = fresh[3], [fresh[4], fresh[1]]
    model = tmp_path / "several-eos"
    shutil.copytree(tiny, model)
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": eos}))
    with running(model, tmp_path) as cluster:
        asyncio.run(checks(cluster.address))
