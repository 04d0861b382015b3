"""Grammars with real models: the embedded one writes JSON by 210 schemas, a tiny one is preempted and says the same."""

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

from services.frontend import tokenizer
from tests.executor.mini_scheduler import serve
from tests.support.attached import Frontend, Port, Told, scheduler_for, until_idle
from tests.support.calls import by_text, generate
from tests.support.cluster import Cluster, running

Grammar = generation_pb2.Grammar
Options = inference_pb2.Options
SCHEMAS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "json_schemas.json").read_text(encoding="utf-8")
)
GREEDY = generation_pb2.Sampling(temperature=0)
UNREPEATED = generation_pb2.Sampling(temperature=0, frequency_penalty=0.5)
"""A model of 135M says the same for ever where a schema lets it."""

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
        sampling=UNREPEATED,
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


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_stop_string_ends_an_answer_inside_its_grammar(embedded_cluster: Cluster) -> None:
    options = Options(
        sampling=GREEDY,
        max_tokens=60,
        stop=["three"],
        grammar=Grammar(lark='start: "one, " "two, " "three, " /[a-z ]{9}/'),
    )
    async with grpc.aio.insecure_channel(embedded_cluster.address) as channel:
        answer = await generate(channel, by_text("Count.", options))
    assert answer.text == "one, two, " and answer.finishes[0].stop_string == "three"


PATTERN = "(item [a-z]{3,9} costs [0-9]{2}; ){4}"


@pytest.mark.parametrize("forced", [False, True])
async def test_a_pool_that_preempts_changes_no_id_under_a_grammar(tiny: Path, forced: bool) -> None:
    """Real logits at random, two steps in flight, two choices each; neighbours without a grammar beside them."""
    read = tokenizer.load(tokenizer.load_definition(tiny), tiny)
    drawn, preemptions = [], []
    for blocks in (200, 24):
        async with (
            serve(tiny, block_tokens=8) as rig,
            scheduler_for(
                Port(rig.port), tiny, max_model_len=160, block_size=8, num_kv_blocks=blocks, max_num_seqs=8
            ) as server,
            Frontend(server) as frontend,
        ):
            await frontend.greeted()
            for seed in range(6):
                grammar = Grammar(regex=PATTERN, forced_tokens=forced) if seed % 3 else None
                await frontend.submit(
                    [5 + seed, 6, 7],
                    seed=seed,
                    request_id=10 * seed + 1,
                    num_choices=2,
                    max_tokens=150 if grammar else 60,
                    sampling=generation_pb2.Sampling(temperature=1.2, top_p=1, repetition_penalty=1),
                    grammar=grammar,
                )
            told = [frontend.told.setdefault(10 * seed + 1 + i, Told()) for seed in range(6) for i in range(2)]
            await asyncio.wait_for(asyncio.gather(*(one.done.wait() for one in told)), 100)
            await until_idle(server)
            preemptions.append(server.engine.core.counters.preemptions)
            drawn.append([one.ids for one in told])
            for number, one in enumerate(told):
                assert one.failed is None
                if (number // 2) % 3:
                    assert re.fullmatch(PATTERN, read.decode(one.ids, skip_special_tokens=True))
    assert drawn[0] == drawn[1]
    assert preemptions[0] == 0 < preemptions[1]
