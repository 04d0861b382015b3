"""Tool calls and reasoning through a whole frontend: streamed, unary, cut by the engine's steps, beside logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2

from services.frontend import served_model
from services.frontend.reasoning import tags
from services.frontend.tool_calls import formats
from tests.frontend.harness import Served, scripted, serving, text_checkpoint
from tests.frontend.output_samples import SAMPLES, Sample
from tests.frontend.tool_models import Chat, answered, asked, tool, tool_checkpoint
from tests.support.calls import Answer, by_text, chat, generate, greedy
from tests.support.checkpoints import EOS_ID

CALLS = generation_pb2.FINISH_REASON_TOOL_CALLS
STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TWO = (
    '<think>\nWhich?\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "é漢😀"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "nobody_knows", "arguments": {}}\n</tool_call>'
)


@dataclass
class Seen:
    """A choice as a client has it in the end."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # id, name, arguments
    finish: inference_pb2.Finish | None = None

    @classmethod
    def of(cls, choices: Iterable[inference_pb2.Choice]) -> Seen:
        seen = cls()
        for choice in choices:
            assert seen.finish is None
            seen.text += choice.text
            seen.reasoning += choice.reasoning
            for piece in choice.tool_calls:
                assert bool(piece.id) == bool(piece.name) == (piece.index not in seen.calls), "id and name come once"
                whole = seen.calls.setdefault(piece.index, [piece.id, piece.name, ""])
                whole[2] += piece.arguments
            if choice.HasField("finish"):
                seen.finish = choice.finish
        return seen

    @property
    def reason(self) -> int:
        assert self.finish is not None
        return self.finish.reason


def seen(answer: Answer, index: int = 0) -> Seen:
    return Seen.of(choice for m in answer.messages for choice in m.choices if choice.index == index)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_checkpoint(tmp_path_factory.mktemp("tools") / "tiny-tools", plain=MARKS)


def ids_of(path: Path, text: str) -> list[int]:
    return list(served_model.load(str(path), None).tokenizer.encode(text, add_special_tokens=False))


def request(**fields: Any) -> Chat:
    return Chat(**{"messages": [asked()], "tools": [tool()], "options": greedy(seed=7)} | fields)


async def both(served: Served, asked_for: Chat) -> Seen:
    """The stream's, and its unary twin's, which is the same."""
    asked_for.options.seed = 7  # ids of calls are made of it
    streamed = seen(await chat(served.channel, asked_for))
    unary = await served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=asked_for))
    (choice,) = unary.response.choices
    assert Seen.of([choice]) == streamed
    return streamed


@pytest.mark.parametrize("ids_per_step", [1, 3, 1000])
async def test_calls_and_reasoning_are_told_apart_however_the_engine_steps(path: Path, ids_per_step: int) -> None:
    script = [*ids_of(path, TWO), EOS_ID]
    async with serving(path, scripted(script, ids_per_step=ids_per_step)) as served:
        found = await both(served, request())
        assert (found.text, found.reasoning) == ("I look.\n", "Which?")
        assert [call[1:] for call in found.calls.values()] == [
            ["get_weather", '{"city": "é漢😀"}'],
            ["nobody_knows", "{}"],  # a name that no tool has is told all the same: the caller knows its tools
        ]
        assert found.reason == CALLS and found.finish is not None and found.finish.eos_token_id == EOS_ID
        again = seen(await chat(served.channel, request()))
        assert [call[0] for call in again.calls.values()] == [call[0] for call in found.calls.values()]
        other = seen(await chat(served.channel, request(options=greedy(seed=8))))
        ids = [call[0] for both in (found, other) for call in both.calls.values()]
        assert len(set(ids)) == 4 and all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


async def test_raw_bytes_are_those_of_the_ids_whatever_is_made_of_them(path: Path) -> None:
    script = [*ids_of(path, TWO), EOS_ID]
    async with serving(path, scripted(script, ids_per_step=2)) as served:
        asked_for = request(options=greedy(raw_bytes=True))
        answer = await chat(served.channel, asked_for)
        raw = b"".join(choice.raw for m in answer.messages for choice in m.choices)
        assert raw == TWO.encode() + b"<|im_end|>"
        unary = await served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=asked_for))
        assert unary.response.choices[0].raw == raw
        without = await chat(served.channel, request())
        assert not any(choice.raw for m in without.messages for choice in m.choices)


@pytest.mark.parametrize("options", [{}, {"min_delta_tokens": 7}, {"min_delta_interval_ms": 1}])
async def test_ids_logprobs_and_usage_are_those_of_an_answer_without_parts(path: Path, options: dict[str, int]) -> None:
    script = [*ids_of(path, TWO), EOS_ID]
    async with serving(path, scripted(script)) as served:
        answer = await chat(served.channel, request(options=greedy(logprobs=2, prompt_logprobs=1, **options)))
        assert answer.ids == script and answer.usage.completion_tokens == len(script)
        told = [entry for m in answer.messages for choice in m.choices for entry in choice.logprobs]
        assert [entry.token.token_id for entry in told] == script and all(len(entry.top) == 2 for entry in told)
        raw = b"".join(entry.token.raw for entry in told[:-1])
        assert raw.decode() == TWO
        scored = [entry for m in answer.messages for entry in m.prompt_logprobs.positions]
        assert len(scored) == answer.prompt.prompt_tokens == answer.usage.prompt_tokens
        assert b"".join(entry.token.raw for entry in scored).endswith(b"assistant\n")
        assert answer.messages[-2].choices[0].HasField("cumulative_logprob")


async def test_choices_have_calls_of_their_own(path: Path) -> None:
    """The stub's second choice writes ids one higher: other text, and no calls."""
    async with serving(path, scripted([*ids_of(path, TWO), EOS_ID])) as served:
        answer = await chat(served.channel, request(options=greedy(n=2, max_tokens=400)))
        assert len(seen(answer, 0).calls) == 2 and seen(answer, 0).reason == CALLS
        assert not seen(answer, 1).calls and seen(answer, 1).text
        unary = await served.stub.ChatUnary(
            inference_pb2.ChatUnaryRequest(request=request(options=greedy(n=2, max_tokens=400, seed=1)))
        )
        assert [len(choice.tool_calls) for choice in unary.response.choices] == [2, 0]


async def test_a_call_that_is_cut_by_the_length_is_not_whole(path: Path) -> None:
    script = ids_of(path, '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>')
    async with serving(path, scripted(script)) as served:
        found = await both(served, request(options=greedy(max_tokens=len(script) - 8)))
        assert found.reason == LENGTH and found.text == ""
        ((_, name, arguments),) = found.calls.values()
        assert name == "f" and '{"city": "Paris"}'.startswith(arguments) and 0 < len(arguments) < 17
        found = await both(served, request(options=greedy(max_tokens=4)))
        assert found.reason == LENGTH and not found.calls and found.text.startswith("<tool_call>{")


async def test_stop_strings_match_what_the_model_writes(path: Path) -> None:
    script = [*ids_of(path, TWO), EOS_ID]
    async with serving(path, scripted(script)) as served:
        found = await both(served, request(options=greedy(stop=["</tool_call>"])))
        assert len(found.calls) == 1 and found.reason == CALLS
        assert found.finish is not None and found.finish.stop_string == "</tool_call>"
        found = await both(served, request(options=greedy(stop=['"argu'], include_stop_string=True)))
        assert not found.calls and found.reason == STOP
        assert found.text == 'I look.\n<tool_call>\n{"name": "get_weather", "argu'
        found = await both(served, request(options=greedy(stop=["Which"])))
        assert (found.reasoning, found.text, found.reason) == ("", "", STOP)


async def test_marks_are_special_tokens_that_text_leaves_out_and_readers_see(tmp_path: Path) -> None:
    special = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    template = "{{ '[TOOL_CALLS][ARGS][THINK]' if false }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    path = tool_checkpoint(tmp_path / "m", template=template, special=special)
    written = '[THINK]hm[/THINK]Both.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{"b": 2}'
    script = [*ids_of(path, written), EOS_ID]
    assert len(script) < len(written)
    async with serving(path, scripted(script)) as served:
        for skip in (True, False):
            found = await both(served, request(options=greedy(skip_special_tokens=skip)))
            assert (found.reasoning, found.text) == ("hm", "Both." if skip else "Both.<|im_end|>")
            assert [call[1:] for call in found.calls.values()] == [["add", '{"a": 1}'], ["sub", '{"b": 2}']]
        plain = await generate(served.channel, by_text("x", greedy()))
        assert plain.text == 'hmBoth.add{"a": 1}sub{"b": 2}'
        model = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model
        assert (model.tool_call_format, model.reasoning_format) == ("mistral_v11", "mistral")


async def test_a_character_that_a_mark_breaks_off_is_one_replacement_character(tmp_path: Path) -> None:
    path = tool_checkpoint(tmp_path / "m", template="{{ tools }}[TOOL_CALLS][ARGS]", special=("[TOOL_CALLS]", "[ARGS]"))
    tokenizer = served_model.load(str(path), None).tokenizer
    byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == "é".encode()[:1])
    script = [*ids_of(path, "a"), byte, *ids_of(path, "[TOOL_CALLS]f[ARGS]{}"), *ids_of(path, " b"), EOS_ID]
    async with serving(path, scripted(script)) as served:
        found = await both(served, request())
        assert found.text == "a\ufffd b" and [call[1:] for call in found.calls.values()] == [["f", "{}"]]


async def test_an_answer_that_the_prompt_opened_begins_as_reasoning(path: Path) -> None:
    async with serving(path, scripted([*ids_of(path, "hm\n</think>\n\nyes"), EOS_ID])) as served:
        opened = request(template_args={"thinking": "open"})
        found = await both(served, opened)
        assert (found.reasoning, found.text, found.reason) == ("hm", "yes", STOP)
        closed = await both(served, request(template_args={"thinking": "off"}))
        assert (closed.reasoning, closed.text) == ("", "hm\n</think>\n\nyes")
        spelled = await both(served, request(messages=[asked("say <think>")]))
        assert spelled.reasoning == ""
        for start, inside in (("<think>\nso", True), ("<think>a</think>b", False)):
            continued = Chat(messages=[asked(), answered(start)], continue_final_message=True, options=greedy())
            found = await both(served, continued)
            assert found.reasoning == ("hm" if inside else "")


async def test_without_tools_or_with_none_text_that_looks_like_a_call_is_text(path: Path) -> None:
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    async with serving(path, scripted([*ids_of(path, written), EOS_ID])) as served:
        none = inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_NONE)
        for asked_for in (request(tools=[]), request(tool_choice=none)):
            found = await both(served, asked_for)
            assert (found.text, found.calls, found.reason) == (written, {}, STOP)


async def test_formats_are_told_and_can_be_set(path: Path) -> None:
    written = "[f(a=1)]<think>"
    async with serving(path, scripted([50, EOS_ID])) as served:
        model = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model
        assert (model.tool_call_format, model.reasoning_format) == ("hermes", "think")
        assert list(model.features) == ["grammar", "tools", "reasoning"]
    engine = scripted([*ids_of(path, written), EOS_ID])
    async with serving(path, engine, tool_call_format="pythonic", reasoning_format="none") as served:
        model = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model
        assert (model.tool_call_format, model.reasoning_format, list(model.features)) == (
            "pythonic",
            "",
            ["grammar", "tools"],
        )
        found = await both(served, request())
        assert found.text == "<think>" and [call[1:] for call in found.calls.values()] == [["f", '{"a": 1}']]


@pytest.mark.parametrize("sample", [pytest.param(s, id=s.id) for s in SAMPLES if s.tool_calls])
def test_samples_mean_the_same_when_ids_cut_them(path: Path, sample: Sample) -> None:
    """Every cut between ids, through the detokenizer: the reader's input as it is in a stream."""
    from services.frontend.engine import EngineFinish, Outputs
    from services.frontend.generation import Choice
    from services.frontend.output_reader import OutputFormats
    from services.frontend.request import EngineFacts, Job, Options, Sampling

    tokenizer = served_model.load(str(path), None).tokenizer
    ids = tuple(tokenizer.encode(sample.written, add_special_tokens=False))
    reasoning = tags.FORMATS.get(sample.reasoning_format)
    form = formats.FORMATS[sample.tool_calls]
    read = OutputFormats(reasoning, form, sample.in_reasoning, sample.schemas)
    job = Job((1,), Options(Sampling(), 7), 999, frozenset(), EngineFacts("e", "m", "f", 512, 1024), formats=read)

    def told(cuts: Sequence[int]) -> tuple[str, str, dict[int, str], dict[int, str]]:
        choice, text, thought = Choice(job, tokenizer), "", ""
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            finish = EngineFinish("stop", None) if stop == len(ids) else None
            delta = choice.push(Outputs(ids[start:stop], finish=finish))
            text, thought = text + delta.text, thought + delta.reasoning
            for called in delta.calls:
                names.setdefault(called.index, called.name)
                arguments[called.index] = arguments.get(called.index, "") + called.arguments
        return text, thought, names, arguments

    whole = told([])
    assert whole[:2] == (sample.text, sample.reasoning)
    assert tuple(zip(whole[2].values(), whole[3].values(), strict=True)) == sample.calls
    for cut in range(1, len(ids)):
        assert told([cut]) == whole
    assert told(range(1, len(ids))) == whole


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ('{"name": function name, "parameters": dictionary}', "llama3_json", ""),
        ("<|python_tag|> parameters", "llama3_json", ""),
        ("[func_name1(params_name1=params_value1)]", "pythonic", ""),
        ("<|python_start|>", "pythonic", ""),
        ("<tool_call> </think>", "hermes", "think"),
        ("<tool_call><function=", "qwen3_coder", ""),
        ("<tool_call><arg_key> <think>", "glm45", "think"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", ""),
        ("{%- set dsml_token = '｜DSML｜' -%} <think>", "deepseek_v32", "think"),
        ("[TOOL_CALLS] [", "mistral", ""),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral_v11", "mistral"),
        ("<｜tool▁sep｜>\n```json </think>", "deepseek_v3", "think"),
        ("<｜tool▁sep｜>", "deepseek_v31", ""),
        ("<|im_start|>", "", ""),
    ],
)
def test_formats_are_recognised_by_what_templates_write(template: str, calls: str, reasoning: str) -> None:
    form, thought = formats.recognise(template), tags.recognise(template)
    assert ("" if form is None else form.name, "" if thought is None else thought.name) == (calls, reasoning)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED)}, "tool_choice"),
        ({"tool_choice": inference_pb2.ToolChoice(name="get_weather")}, "tool_choice"),
        ({"tools": [tool(), tool("t", strict=True)]}, "tools[1].strict"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
async def test_what_needs_a_grammar_is_refused_where_the_engine_has_none(
    path: Path, fields: dict[str, Any], named: str
) -> None:
    async with serving(path, scripted([50, EOS_ID], features=())) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat(served.channel, request(**fields))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED and named in (caught.value.details() or "")


def test_a_checkpoint_without_marks_is_as_before(tmp_path: Path) -> None:
    model = served_model.load(str(text_checkpoint(tmp_path / "m")), None)
    assert model.tool_calls is None and model.reasoning is None and model.features == ()
    assert json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())["chat_template"]
