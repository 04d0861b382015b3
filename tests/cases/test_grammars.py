"""Row X1: schemas, expressions and grammars that do not compile, through a real frontend."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2

from tests.frontend.harness import Served, fields_at_fault, reason, scripted, serving, text_checkpoint
from tests.support.calls import EVERY_CALL, STREAM_AND_UNARY, ask, by_ids, generate, place
from tests.support.checkpoints import EOS_ID

Grammar = generation_pb2.Grammar
Options = inference_pb2.Options
Tag = Grammar.Tag
Tags = Grammar.StructuralTags

DEEP = 5000
BAD: dict[str, tuple[generation_pb2.Grammar, str]] = {
    "a schema that is no JSON": (Grammar(json_schema="{type: object}"), "json_schema"),
    "a schema that is no schema": (Grammar(json_schema='{"type": "objekt"}'), "json_schema"),
    "a list for a schema": (Grammar(json_schema="[]"), "json_schema"),
    "an empty schema text": (Grammar(json_schema=""), "json_schema"),
    "a keyword that is not implemented": (Grammar(json_schema='{"not": {"type": "null"}}'), "json_schema"),
    "a schema that nothing satisfies": (Grammar(json_schema='{"enum": []}'), "json_schema"),
    "a schema elsewhere": (Grammar(json_schema='{"$ref": "https://example.com/x"}'), "json_schema"),
    "a schema that is itself": (Grammar(json_schema='{"$ref": "#"}'), "json_schema"),
    "a schema nested deep": (Grammar(json_schema='{"items":' * DEEP + "{}" + "}" * DEEP), "json_schema"),
    "huge bounds": (Grammar(regex="(a{1000}){1000}"), "regex"),
    "an open bracket": (Grammar(regex="("), "regex"),
    "an expression nested deep": (Grammar(regex="(" * DEEP + "a" + ")" * DEEP), "regex"),
    "the empty language": (Grammar(regex="[^\\s\\S]"), "regex"),
    "the empty text": (Grammar(regex=""), "regex"),
    "no start": (Grammar(lark='begin: "a"'), "lark"),
    "a grammar nested deep": (Grammar(lark="start: " + "(" * DEEP + '"a"' + ")" * DEEP), "lark"),
    "a grammar that never ends": (Grammar(lark="start: start"), "lark"),
    "no choices": (Grammar(choices=Grammar.Choices()), "choices.values"),
    "an empty choice": (Grammar(choices=Grammar.Choices(values=["a", ""])), "choices.values[1]"),
    "no tags": (Grammar(structural_tags=Tags()), "structural_tags.tags"),
    "a tag without a start": (
        Grammar(structural_tags=Tags(tags=[Tag(json_schema="{}")])), "structural_tags.tags[0].begin"
    ),
    "a tag's schema that is none": (
        Grammar(structural_tags=Tags(tags=[Tag(begin="<a>", json_schema="{}"), Tag(begin="<b>", json_schema="5")])),
        "structural_tags.tags[1].json_schema",
    ),
    "no rule": (Grammar(), ""),
    "too many bytes": (Grammar(regex="a" * 70_000), ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("x1") / "tiny-text")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    async with serving(model, scripted([50, 51, EOS_ID])) as served:
        yield served


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@EVERY_CALL
async def test_X1_what_does_not_compile_is_refused_by_name_on_every_call(served: Served, rpc: str) -> None:
    for what, (grammar, field) in BAD.items():
        where = place(rpc, f"options.grammar.{field}".rstrip("."))
        error = await refused(ask(served.channel, rpc, Options(grammar=grammar)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, what
        assert fields_at_fault(error) == [where] and len(error.details() or "") > len(where) + 10, what
    assert served.engine.submits == []


async def test_X1_a_grammar_over_its_budget_touches_nobody_else(model: Path) -> None:
    """Its worker is stuck; meanwhile requests without a grammar are answered, and so are those with a known one."""
    async with serving(model, scripted([50, 51, EOS_ID]), grammar_compile_s=2) as served:
        known = by_ids([10], Options(grammar=Grammar(choices=Grammar.Choices(values=["yes"]))))
        await generate(served.channel, known)
        process = served.frontend.grammars._worker._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        stuck = by_ids([10], Options(grammar=Grammar(regex="[ab]{9}")))
        slow = asyncio.create_task(refused(generate(served.channel, stuck)))
        await asyncio.sleep(0.02)
        for _ in range(5):
            await generate(served.channel, by_ids([10], Options()))
            await generate(served.channel, known)
        assert not slow.done()
        error = await slow
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(error) == "GRAMMAR"
        assert fields_at_fault(error) == ["options.grammar.regex"] and "grammar_compile_s" in (error.details() or "")
        fresh = Grammar(choices=Grammar.Choices(values=["no"]))
        await generate(served.channel, by_ids([10], Options(grammar=fresh)))


@EVERY_CALL
async def test_X1_what_compiles_reaches_the_engine_as_it_was_and_again_without_the_worker(
    served: Served, rpc: str
) -> None:
    person = json.dumps({"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False})
    grammars = [
        Grammar(json_schema=person, forced_tokens=True),  # a schema may hold itself
        Grammar(regex="[a-z]{1,20}"),
        Grammar(lark='start: "a"+'),
        Grammar(choices=Grammar.Choices(values=["yes", "no"])),
        Grammar(structural_tags=Tags(tags=[Tag(begin="<a>", json_schema="{}", end="</a>")], required=True)),
    ]
    for grammar in [*grammars, *grammars]:
        await ask(served.channel, rpc, Options(grammar=grammar))
    assert [submit.grammar for submit in served.engine.submits] == [*grammars, *grammars]
    described = await served.stub.GetModel(inference_pb2.GetModelRequest())
    assert list(described.model.features) == ["grammar"] and described.model.limits["max_grammar_bytes"] == 65536
    assert list(served.engine.hellos[0].features) == ["grammar"]


CONTRADICTIONS: dict[str, tuple[inference_pb2.Options, str]] = {
    "ignore_eos": (Options(ignore_eos=True, grammar=Grammar(regex="a+")), "options.ignore_eos"),
    "logprobs of forced ids": (
        Options(logprobs=0, grammar=Grammar(regex="a+", forced_tokens=True)), "options.grammar.forced_tokens",
    ),
    "more ids than a choice has bytes": (
        Options(min_tokens=4, max_tokens=9, grammar=Grammar(choices=Grammar.Choices(values=["yes", "no"]))),
        "options.min_tokens",
    ),
}  # fmt: skip


@STREAM_AND_UNARY
@pytest.mark.parametrize("what", CONTRADICTIONS)
async def test_options_that_contradict_a_grammar_are_refused(served: Served, what: str, rpc: str) -> None:
    options, field = CONTRADICTIONS[what]
    error = await refused(ask(served.channel, rpc, options))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [place(rpc, field)]
    assert served.engine.submits == []


async def test_an_engine_without_grammars_is_not_sent_one(model: Path) -> None:
    async with serving(model, scripted([50, EOS_ID], features=())) as served:
        error = await refused(generate(served.channel, by_ids([10], Options(grammar=Grammar(regex="a")))))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED and fields_at_fault(error) == ["options.grammar"]
        described = await served.stub.GetModel(inference_pb2.GetModelRequest())
        assert list(described.model.features) == [] and served.engine.submits == []
