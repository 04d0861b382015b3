"""Requests with grammars: a real scheduler and its masks, a stub executor that draws at random what they allow.

The stub refuses a mask of the wrong step or slot, a second one, or one that nobody waits for; `bench` asserts that it
had nothing to complain of.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import Faults, StubExecutor
from services.common.grammar_compiler import Compiler
from services.frontend import tokenizer
from services.frontend.tokenizer import TextTokenizer
from services.scheduler import grammar_compiling
from tests.frontend.harness import text_checkpoint
from tests.support.attached import Frontend, Told, bench, finished, scheduler_for, until, until_idle, write_model
from tests.support.checkpoints import EOS_ID

Grammar = generation_pb2.Grammar
VOCAB = 512
PROMPT = [5, 6, 7]
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["ann", "bob", "eve"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
WIDE = "a{1000000}"
"""Takes a second to compile."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("grammars") / "tiny-text")


@pytest.fixture(scope="module")
def text(model: Path) -> Callable[[Told], str]:
    read: TextTokenizer = tokenizer.load(tokenizer.load_definition(model), model)
    return lambda told: read.decode(told.ids, skip_special_tokens=True)


def choices(*values: str, **fields: Any) -> generation_pb2.Grammar:
    return Grammar(choices=Grammar.Choices(values=values), **fields)


def stopped(told: Told) -> bool:
    assert told.failed is None, told.failed
    return told.finished.reason == generation_pb2.FINISH_REASON_STOP


async def submit(frontend: Frontend, grammar: generation_pb2.Grammar, **fields: Any) -> Told:
    return await frontend.submit(PROMPT, grammar=grammar, **({"max_tokens": 64, "stop_ids": [EOS_ID]} | fields))


async def run(frontend: Frontend, grammar: generation_pb2.Grammar, **fields: Any) -> Told:
    told = await submit(frontend, grammar, **fields)
    await finished(told)
    return told


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_every_kind_ends_whole_beside_requests_without_one(
    model: Path, text: Callable[[Told], str], in_flight: int
) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=in_flight)) as made:
        frontend = made.frontend
        assert "grammar" in (await frontend.greeted()).features
        tag = Grammar.Tag(begin="<f>", end="</f>", json_schema='{"const": {"a": true}}')
        asked = {
            "yes|no|maybe": choices("yes", "no", "maybe"),
            "[a-c]{5}x": Grammar(regex="[a-c]{5}x"),
            "(ab?)c": Grammar(lark='start: "a" "b"? "c"'),
            "(true|false)": Grammar(json_schema='{"type": "boolean"}'),
            '<f>{ ?"a" ?: ?true ?}</f>': Grammar(
                structural_tags=Grammar.StructuralTags(tags=[tag], required=True, single=True)
            ),
        }
        told = {pattern: await submit(frontend, grammar, seed=9) for pattern, grammar in asked.items()}
        people = [await submit(frontend, Grammar(json_schema=PERSON), seed=seed) for seed in range(4)]
        plain = [await frontend.submit(PROMPT, seed=seed, max_tokens=20) for seed in range(3)]
        await finished(*told.values(), *people, *plain)
        for pattern, one in told.items():
            assert stopped(one) and re.fullmatch(pattern, text(one)), (pattern, text(one))
            assert not one.finished.HasField("stop_id")  # the grammar's end, not EOS
        for one in people:
            jsonschema.validate(json.loads(text(one)), json.loads(PERSON))
        for seed, one in enumerate(plain):
            assert one.ids == expected_ids(PROMPT, seed, 20, VOCAB)
        await made.idle()
        stats = made.server.engine.stats()
        assert stats.grammar_requests == 9 and stats.masks == made.stub.masks_seen > 50 and stats.mask_s > 0
        masked = sum(len(plan.masked_slots) // 4 for plan in made.stub.plans)
        assert masked == made.stub.masks_seen


async def test_eos_ends_where_the_language_may_go_on_and_the_length_ends_it_anywhere(
    model: Path, text: Callable[[Told], str]
) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        told = [await submit(made.frontend, Grammar(regex="a+"), seed=seed) for seed in range(12)]
        await finished(*told)
        assert all(re.fullmatch("a+", text(one)) for one in told)
        ended = [one for one in told if stopped(one)]
        assert ended and all(one.finished.stop_id == EOS_ID == one.ids[-1] for one in ended)
        cut = await run(made.frontend, Grammar(regex="b{40}"), max_tokens=7)
        assert text(cut) == "b" * 7 and cut.finished.reason == generation_pb2.FINISH_REASON_LENGTH


async def test_min_tokens_hold_eos_back_but_not_the_end_of_the_language(
    model: Path, text: Callable[[Told], str]
) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        for seed in range(6):
            held = await run(made.frontend, Grammar(regex="a+"), seed=seed, min_tokens=20)
            assert len(held.ids) >= 20
        short = await run(made.frontend, choices("yes", "no"), min_tokens=30)
        assert stopped(short) and text(short) in ("yes", "no")
        # "go" may go on as "goes"; with its ids banned the language is at its end there, before min_tokens.
        ids = [i for i in range(VOCAB) if i not in (EOS_ID, *made_ids(model, "go"))]
        bans = generation_pb2.Sampling(banned_token_ids=ids)
        ended = await run(made.frontend, choices("go", "goes"), min_tokens=30, sampling=bans)
        assert stopped(ended) and text(ended) == "go" and not ended.finished.HasField("stop_id")


def made_ids(model: Path, word: str) -> tuple[int, ...]:
    """Of each of its letters, and of it."""
    read = tokenizer.load(tokenizer.load_definition(model), model)
    pieces = [read.encode(piece, add_special_tokens=False) for piece in (*word, word)]
    return tuple(dict.fromkeys(i for piece in pieces for i in piece))


async def test_bans_that_leave_nothing_of_the_language_end_that_request_alone(
    model: Path, text: Callable[[Told], str]
) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        frontend = made.frontend
        letters = made_ids(model, "c")
        beside = await submit(frontend, Grammar(regex="[ab]{30}"))
        biases = dict.fromkeys(letters, float("-inf"))
        others = [i for i in range(VOCAB) if i not in letters]
        for sampling in (
            generation_pb2.Sampling(banned_token_ids=letters),
            generation_pb2.Sampling(logit_bias=biases),
            generation_pb2.Sampling(allowed_token_ids=others),
        ):
            told = await run(frontend, Grammar(regex="(b|c){3}c{9}"), sampling=sampling)
            assert told.code is grpc.StatusCode.INVALID_ARGUMENT and told.failed.reason == "GRAMMAR_CONTRADICTED"
        await finished(beside)
        assert stopped(beside) and re.fullmatch("[ab]{30}", text(beside))


async def test_an_id_that_the_grammar_does_not_allow_fails_its_request_alone(
    model: Path, text: Callable[[Told], str]
) -> None:
    """As from an executor that has lost a mask."""
    stub = StubExecutor(max_in_flight=2, faults=Faults(bad_ids={(77, 3): 400}))
    async with bench(model, stub=stub) as made:
        beside = await submit(made.frontend, Grammar(regex="[ab]{30}"), seed=1)
        told = await run(made.frontend, Grammar(regex="[ab]{30}"), seed=77)
        assert told.code is grpc.StatusCode.INTERNAL and told.failed.reason == "GRAMMAR_FAILED"
        assert "cannot go on" in told.failed.message
        await finished(beside)
        assert stopped(beside) and len(text(beside)) == 30


async def test_a_row_that_fails_leaves_its_neighbours_their_masks(model: Path, text: Callable[[Told], str]) -> None:
    stub = StubExecutor(max_in_flight=2, faults=Faults(failed_rows=frozenset({(77, 3), (78, 0)})))
    async with bench(model, stub=stub) as made:
        asked = {seed: await submit(made.frontend, Grammar(regex="[ab]{20}"), seed=seed) for seed in (1, 77, 78, 2)}
        await finished(*asked.values())
        assert [asked[seed].failed.reason for seed in (77, 78)] == ["ROW_FAILED"] * 2
        assert all(len(text(asked[seed])) == 20 for seed in (1, 2))


@pytest.mark.parametrize("forced", [False, True])
async def test_choices_and_preemptions_change_no_id(model: Path, text: Callable[[Told], str], forced: bool) -> None:
    grammar = Grammar(regex="(key: [a-f]{4}; ){8}", forced_tokens=forced)
    drawn: list[list[list[int]]] = []
    for blocks in (200, 26):
        stub = StubExecutor(max_in_flight=2)
        async with bench(model, stub=stub, block_size=4, num_kv_blocks=blocks, max_model_len=100) as made:
            for seed in range(3):
                await submit(made.frontend, grammar, seed=seed, num_choices=3, request_id=10 * seed + 1, max_tokens=97)
            told = [made.frontend.told.setdefault(10 * seed + 1 + i, Told()) for seed in range(3) for i in range(3)]
            await finished(*told)
            assert all(stopped(one) and re.fullmatch("(key: [a-f]{4}; ){8}", text(one)) for one in told)
            drawn.append([one.ids for one in told])
            assert (made.server.engine.core.counters.preemptions > 3) == (blocks == 26)
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn[0]}) == 9


async def test_forced_ids_are_appended_and_cost_no_step(model: Path, text: Callable[[Told], str]) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"a_long_name": {"type": "boolean"}, "another_long_name": {"type": "boolean"}},
            "required": ["a_long_name", "another_long_name"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    )
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        found = {}
        for forced in (False, True):
            before = made.server.engine.core.applied_step
            told = await run(made.frontend, Grammar(json_schema=schema, forced_tokens=forced), seed=4)
            jsonschema.validate(json.loads(text(told)), json.loads(schema))
            found[forced] = made.server.engine.core.applied_step - before
            assert stopped(told)
            ids = len(told.ids)
        assert found[True] < found[False] / 2 and found[True] < ids / 2
        assert any(plan.forced_ids for plan in made.stub.plans)
        stats = made.server.engine.stats()
        assert stats.output_tokens == sum(len(told.ids) for told in made.frontend.told.values())


async def test_forced_ids_stop_at_the_length_and_at_a_stop_id(model: Path, text: Callable[[Told], str]) -> None:
    grammar = choices("abcdefghijkl", forced_tokens=True)
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        whole = await run(made.frontend, grammar)
        assert text(whole) == "abcdefghijkl" and len(whole.ids) > 6
        for length in range(1, len(whole.ids)):
            cut = await run(made.frontend, grammar, max_tokens=length)
            assert cut.ids == whole.ids[:length] and cut.finished.reason == generation_pb2.FINISH_REASON_LENGTH
        at_stop = await run(made.frontend, grammar, stop_ids=[whole.ids[4]])
        assert at_stop.ids == whole.ids[:5] and at_stop.finished.stop_id == whole.ids[4]
        held = await run(made.frontend, grammar, stop_ids=[whole.ids[3]], min_tokens=6, seed=3)
        assert (held.failed is not None and held.failed.reason == "GRAMMAR_CONTRADICTED") or len(held.ids) >= 6
        for sampling in (
            generation_pb2.Sampling(banned_token_ids=[whole.ids[4]]),
            generation_pb2.Sampling(logit_bias={whole.ids[4]: float("-inf")}),
        ):
            banned = await run(made.frontend, grammar, sampling=sampling, seed=3)
            assert whole.ids[4] not in banned.ids


async def test_others_go_on_while_a_grammar_is_compiled(model: Path) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        await run(made.frontend, choices("yes"))
        slow = await submit(made.frontend, Grammar(regex=WIDE), max_tokens=1)
        beside = await run(made.frontend, choices("yes"))
        plain = await made.frontend.run(PROMPT, max_tokens=30)
        assert stopped(beside) and len(plain.ids) == 30 and not slow.done.is_set()
        await finished(slow)


async def test_a_request_may_leave_while_its_grammar_is_compiled(model: Path) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        slow = await submit(made.frontend, Grammar(regex=WIDE), request_id=50)
        await submit(made.frontend, Grammar(regex=WIDE + "b"), request_id=60)
        await made.frontend.abort(50)
        again = await submit(made.frontend, choices("yes"), request_id=60)  # an id used twice ends both
        await finished(again)
        assert again.failed is not None and "use each id once" in again.failed.message
        await made.frontend.synced()
        assert made.server.engine._grammars.num_waiting == 0 and not slow.done.is_set()
        late = await submit(made.frontend, Grammar(regex="b" + WIDE), timeout_ms=20)
        await finished(late)
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_resumed_request_without_choice_0_leaves_while_its_grammar_is_compiled(model: Path) -> None:
    resumed = [engine_pb2.Submit.Resumed(choice=1)]
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        await submit(made.frontend, Grammar(regex=WIDE), request_id=50, num_choices=2, resumed=resumed)
        await made.frontend.synced()
        assert made.server.engine._grammars.num_waiting == 1
        await made.frontend.abort(51)
        await made.frontend.synced()
        assert made.server.engine._grammars.num_waiting == 0
        await submit(made.frontend, Grammar(regex=WIDE), request_id=60, num_choices=2, resumed=resumed)
        again = await run(made.frontend, choices("yes"), request_id=60, num_choices=2)
        assert again.failed is not None and "use each id once" in again.failed.message
        assert made.server.engine._grammars.num_waiting == 0


class Panic(BaseException):
    """As the compiler's, which is no Exception."""


@pytest.mark.parametrize("fault", [MemoryError, Panic])
async def test_a_compiler_that_breaks_ends_its_request_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    def broken(*_: object) -> None:
        raise fault("out of luck")

    async with bench(model) as made:
        with monkeypatch.context() as patched:
            patched.setattr(Compiler, "compile", broken)
            told = await run(made.frontend, choices("yes"))
        assert told.code is grpc.StatusCode.INTERNAL and told.failed.reason == "GRAMMAR_FAILED"
        assert "out of luck" in told.failed.message and made.server.engine._grammars.num_waiting == 0
        assert stopped(await run(made.frontend, choices("yes")))


async def test_too_many_requests_that_wait_for_their_grammars_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiling, "MAX_WAITING", 1)
    async with bench(model) as made:
        slow = await submit(made.frontend, Grammar(regex=WIDE), max_tokens=1)
        refused = await run(made.frontend, choices("yes"))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED and refused.failed.reason == "QUEUE_FULL"
        await finished(slow)


async def test_what_waits_to_be_compiled_ends_with_its_frontend_but_not_with_a_drain(model: Path) -> None:
    stub = StubExecutor(max_in_flight=2)
    async with stub, scheduler_for(stub, model) as server:
        async with Frontend(server) as frontend:
            await frontend.greeted()
            await submit(frontend, Grammar(regex=WIDE))
            await frontend.synced()
            assert server.engine._grammars.num_waiting == 1
        await until(lambda: server.engine._grammars.num_waiting == 0)
        async with Frontend(server) as frontend:
            await frontend.greeted()
            told = await submit(frontend, Grammar(regex=WIDE + "c"), max_tokens=1)
            await frontend.synced()
            draining = asyncio.ensure_future(server.engine.drain())
            await until(lambda: server.engine.state == engine_pb2.ENGINE_STATE_DRAINING)
            late = await run(frontend, choices("yes"))
            assert late.code is grpc.StatusCode.UNAVAILABLE and late.failed.reason == "DRAINING"
            assert not told.done.is_set()
            await finished(told)
            assert told.failed is None and len(told.ids) == 1
            await draining


async def test_an_abort_while_the_executor_waits_for_masks_leaves_everything_free(model: Path) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=2)) as made:
        for seed in range(20):
            told = await submit(made.frontend, Grammar(regex="[ab]{60}"), seed=seed, request_id=seed + 1)
            if seed % 2:
                await told.first.wait()
            await made.frontend.abort(seed + 1)
        await made.idle()


@pytest.mark.parametrize("fault_at_step", range(1, 12, 2))
async def test_X3_grammars_go_on_in_a_new_epoch_where_they_were(
    model: Path, text: Callable[[Told], str], fault_at_step: int
) -> None:
    faults = Faults(fault_at_step=fault_at_step, epochs=2)
    async with bench(model, stub=StubExecutor(max_in_flight=2, faults=faults)) as made:
        patterns = [("[ab]{30}", False), ("[ab]{8}0123456789[ab]{8}", True), ("(yes|no){12}", True)]
        made.stub.hold()
        told = [await submit(made.frontend, Grammar(regex=p, forced_tokens=forced)) for p, forced in patterns]
        await made.frontend.synced()
        made.stub.release()
        await finished(*told)
        for mine, (pattern, _) in zip(told, patterns, strict=True):
            assert stopped(mine) and re.fullmatch(pattern, text(mine))
        assert len(made.stub.epochs) > 1
        await made.idle()


async def test_a_later_executor_that_serves_no_grammars_ends_what_needs_them_and_nothing_else(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.01)) as made:
        masked = await submit(made.frontend, Grammar(regex="[ab]{200}"), max_tokens=300)
        plain = await made.frontend.submit(PROMPT, max_tokens=60)
        await masked.first.wait()
        await made.stub.stop()
        async with StubExecutor(port=made.stub.port, features=()):
            await finished(masked, plain)
            assert masked.code is grpc.StatusCode.UNAVAILABLE and masked.failed.reason == "EXECUTOR_LOST"
            assert len(plain.ids) == 60
            late = await run(made.frontend, Grammar(regex="[ab]{3}"))
            assert late.code is grpc.StatusCode.UNIMPLEMENTED
            await until_idle(made.server)


async def test_logprobs_stand_beside_a_grammar_but_not_beside_forced_ids(model: Path) -> None:
    async with bench(model) as made:
        told = await run(made.frontend, choices("yes", "no"), logprobs=1)
        assert len(told.logprobs) == len(told.ids) > 0
        refused = await run(made.frontend, choices("yes", forced_tokens=True), logprobs=1)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT and "forced_tokens" in refused.failed.message


@pytest.mark.parametrize("lacks", ["tokenizer", "executor"])
async def test_where_grammars_cannot_be_served_the_hello_says_so_and_the_door_refuses_them(
    model: Path, tmp_path: Path, lacks: str
) -> None:
    stub = StubExecutor(features=() if lacks == "executor" else ("grammar",))
    async with bench(write_model(tmp_path / "m") if lacks == "tokenizer" else model, stub=stub) as made:
        assert "grammar" not in (await made.frontend.greeted()).features
        told = await run(made.frontend, choices("yes"))
        assert told.code is grpc.StatusCode.UNIMPLEMENTED and "grammar" in told.failed.message
        assert len((await made.frontend.run(PROMPT)).ids) == 8


async def test_a_grammar_that_does_not_compile_is_refused_here_too(model: Path) -> None:
    async with bench(model) as made:
        for grammar, says in (
            (Grammar(regex="("), "grammar.regex: "),
            (Grammar(), "grammar: holds no rule"),
            (Grammar(json_schema="[]"), "grammar.json_schema: cannot be read"),
        ):
            told = await run(made.frontend, grammar)
            assert told.code is grpc.StatusCode.INVALID_ARGUMENT and told.failed.message.startswith(says)


async def test_what_many_random_languages_allow_is_all_that_is_ever_drawn(
    model: Path, text: Callable[[Told], str]
) -> None:
    """Random expressions that Python reads alike, some forced, some of n choices, in a pool that preempts them."""
    rng = random.Random(7)
    asked: dict[int, str] = {}
    stub = StubExecutor(max_in_flight=2)
    async with bench(model, stub=stub, block_size=4, num_kv_blocks=41, max_model_len=160) as made:
        begun_s = time.monotonic()
        stub.hold()
        for number in range(100):
            pattern = random_expression(rng, 3) + random_expression(rng, 3)
            grammar = Grammar(regex=pattern, forced_tokens=rng.random() < 0.4)
            if rng.random() < 0.3:
                words = sorted({random_word(rng) for _ in range(5)})
                pattern, grammar = "|".join(words), choices(*words, forced_tokens=rng.random() < 0.4)
            if re.fullmatch(pattern, "") and not re.search("[a-e]", pattern):
                continue
            request_id, count = 100 * number + 1, rng.choice([1, 1, 3])
            await submit(made.frontend, grammar, seed=number, request_id=request_id, num_choices=count, max_tokens=150)
            asked |= {request_id + i: pattern for i in range(count)}
        told = {request_id: made.frontend.told.setdefault(request_id, Told()) for request_id in asked}
        await made.frontend.synced()
        stub.release()
        await finished(*told.values())
        await until_idle(made.server)
        for request_id, one in told.items():
            if one.finished is not None and stopped(one):
                assert re.fullmatch(asked[request_id], text(one)), (asked[request_id], text(one))
        assert sum(one.finished is not None for one in told.values()) == len(told)
        assert sum(stopped(one) for one in told.values()) > 0.9 * len(told)
        assert made.server.engine.core.counters.preemptions > 0
        assert time.monotonic() - begun_s < 60


def random_expression(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(5 if depth else 2)
    if kind == 0:
        return random_word(rng)
    if kind == 1:
        return rng.choice(["[ab]", "[a-e]{3}", "c"])
    inner = random_expression(rng, depth - 1)
    if kind == 2:
        return f"({inner}|{random_expression(rng, depth - 1)})"
    if kind == 3:
        return f"({inner}){{{rng.randrange(1, 3)},{rng.randrange(3, 6)}}}"
    return inner + random_expression(rng, depth - 1)


def random_word(rng: random.Random) -> str:
    return "".join(rng.choices("abcde ,:", k=rng.randrange(1, 8)))
