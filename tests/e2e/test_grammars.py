"""Grammars through three real processes: the embedded model writes JSON by 210 schemas, a tiny one is preempted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import psutil
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from tests.support.calls import by_ids, generate
from tests.support.cluster import Cluster, running

Grammar = generation_pb2.Grammar
Options = inference_pb2.Options
SCHEMAS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "json_schemas.json").read_text(encoding="utf-8")
)
GREEDY = generation_pb2.Sampling(temperature=0)
MAX_TOKENS = 256
AT_ONCE = 32


@pytest.fixture(scope="module")
def embedded_cluster(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(embedded, tmp_path_factory.mktemp("logs"), frontend=["--grammar-compile-s", "60"]) as cluster:
        yield cluster


def asked_for(entry: dict[str, Any], number: int) -> inference_pb2.ChatRequest:
    """Every second one with forced tokens."""
    text = f"Answer with JSON alone: {entry['name']}."
    options = Options(
        sampling=GREEDY,
        max_tokens=MAX_TOKENS,
        grammar=Grammar(json_schema=json.dumps(entry["schema"]), forced_tokens=number % 2 == 1),
    )
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=[inference_pb2.ContentPart(text=text)])
    return inference_pb2.ChatRequest(messages=[message], options=options)


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_the_embedded_model_completes_nine_schemas_of_ten_and_what_it_completes_validates(
    embedded_cluster: Cluster,
) -> None:
    async with grpc.aio.insecure_channel(embedded_cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        turn = asyncio.Semaphore(AT_ONCE)

        async def answer(entry: dict[str, Any], number: int) -> inference_pb2.Choice:
            async with turn:
                request = inference_pb2.ChatUnaryRequest(request=asked_for(entry, number))
                return (await stub.ChatUnary(request)).response.choices[0]

        entries = SCHEMAS["compile"]
        told = await asyncio.gather(*(answer(entry, number) for number, entry in enumerate(entries)))
    scheduler = psutil.Process(embedded_cluster.processes["scheduler"].pid)
    assert scheduler.memory_info().rss < 250 << 20
    unfinished = []
    for entry, choice in zip(entries, told, strict=True):
        if choice.finish.reason != generation_pb2.FINISH_REASON_STOP:
            unfinished.append((entry["name"], choice.text[:80]))
            continue
        validator = jsonschema.Draft202012Validator(
            entry["schema"], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(choice.text))
    print(f"{len(entries) - len(unfinished)} of {len(entries)} complete; not: {unfinished}")
    assert len(entries) >= 200 and len(unfinished) <= len(entries) / 10


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_schemas_that_cannot_be_compiled_are_refused_at_the_door(embedded_cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(embedded_cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for number, entry in enumerate(SCHEMAS["refused"]):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=asked_for(entry, number)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, entry["name"]
            assert "options.grammar.json_schema: " in (caught.value.details() or ""), entry["name"]


@pytest.mark.parametrize("forced", [False, True])
async def test_a_pool_that_preempts_changes_no_id_under_a_grammar(tiny: Path, tmp_path: Path, forced: bool) -> None:
    """Real logits, two steps in flight, n > 1; neighbours without a grammar beside them."""
    pattern = "(item [a-z]{3,9} costs [0-9]{2}; ){5}"
    drawn = []
    for blocks in (400, 34):
        folder = tmp_path / str(blocks)
        folder.mkdir()
        flags = ["--num-kv-blocks", str(blocks), "--block-size", "8", "--max-model-len", "256"]
        with running(tiny, folder, scheduler=flags) as cluster:
            async with grpc.aio.insecure_channel(cluster.address) as channel:
                calls = []
                for seed in range(6):
                    options = Options(
                        sampling=generation_pb2.Sampling(temperature=1.2),
                        seed=seed,
                        n=2,
                        max_tokens=200,
                        grammar=Grammar(regex=pattern, forced_tokens=forced) if seed % 3 else None,
                        ignore_eos=not seed % 3,
                        stop=["costs 7"] if seed == 4 else [],
                    )
                    calls.append(generate(channel, by_ids([5 + seed, 6, 7], options)))
                drawn.append(await asyncio.gather(*calls))
    for seed, (whole, preempted) in enumerate(zip(*drawn, strict=True)):
        assert ids_of(whole) == ids_of(preempted)
        for choice in (0, 1):
            text = text_of(whole, choice)
            if seed == 4 and not re.fullmatch(pattern, text):  # cut by its stop string
                assert re.fullmatch("(item [a-z]{3,9} costs [0-9]{2}; ){0,4}item [a-z]{3,9} ", text)
            elif seed % 3:
                assert re.fullmatch(pattern, text)


def ids_of(messages: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for message in messages:
        for choice in message.choices:
            found.setdefault(choice.index, []).extend(choice.token_ids)
    return found


def text_of(messages: Any, index: int) -> str:
    return "".join(choice.text for message in messages for choice in message.choices if choice.index == index)
