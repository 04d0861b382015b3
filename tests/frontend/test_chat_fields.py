"""Chat's fields: what the door refuses by name, and what the template is shown of the rest."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import inference_pb2

from services.common.errors import RequestError
from services.frontend import served_model
from services.frontend.chat_door import read_chat
from services.frontend.config import FrontendConfig
from services.frontend.served_model import ServedModel
from tests.frontend.harness import Served, fields_at_fault, reason, scripted, serving, text_checkpoint
from tests.frontend.tool_models import CITY_SCHEMA, Chat, Message, answered, asked, call, said, tool, tool_checkpoint
from tests.support.calls import chat, greedy
from tests.support.checkpoints import EOS_ID

TOOL = inference_pb2.ROLE_TOOL
Choice = inference_pb2.ToolChoice
LIMITS = FrontendConfig(max_tools=2, max_tool_schema_bytes=200).limits()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_checkpoint(
        tmp_path_factory.mktemp("tools") / "tiny-tools", plain=("<tool_call>", "</tool_call>", "<think>", "</think>")
    )


@pytest.fixture(scope="module")
def model(path: Path) -> ServedModel:
    return served_model.load(str(path), None)


@pytest.fixture
async def served(path: Path) -> AsyncIterator[Served]:
    async with serving(path, scripted([50, EOS_ID])) as served:
        yield served


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def prompt(model: ServedModel, request: Chat) -> str:
    """What the template makes of a request, control tokens that users spell as they spell them."""
    conversation = read_chat(request, LIMITS, "")
    ids = model.chat.ids(model.chat.render(conversation, "messages"))
    return model.tokenizer.decode(ids, skip_special_tokens=False)


ARGUMENTS = "messages[0].tool_calls[0].arguments"
IMAGE = inference_pb2.ContentPart(media=inference_pb2.Media(mime_type="image/png", data=b"x"))


@pytest.mark.parametrize(
    ("request_", "field", "said_"),
    [
        (
            Chat(messages=[Message(role=1, content=[IMAGE])]),
            "messages[0].content[0].media",
            "'image/png' is not",
        ),
        (Chat(messages=[said(9)]), "messages[0].role", "is 9"),
        (Chat(messages=[said(3, reasoning="r")]), "messages[0].reasoning", "this is the user's"),
        (Chat(messages=[said(3, tool_calls=[call()])]), "messages[0].tool_calls", "this is the user's"),
        (Chat(messages=[said(3, tool_call_id="a1")]), "messages[0].tool_call_id", "is for a tool's messages"),
        (Chat(messages=[asked(), said(TOOL)]), "messages[1].tool_call_id", "is empty"),
        (Chat(messages=[asked(), said(TOOL, tool_call_id="a1")]), "messages[1].tool_call_id", "no call of an earlier"),
        (Chat(messages=[answered(tool_calls=[call(name="")])]), "messages[0].tool_calls[0].name", "is empty"),
        (
            Chat(messages=[answered(tool_calls=[call(arguments="{")])]),
            "messages[0].tool_calls[0].arguments",
            "not JSON",
        ),
        (
            Chat(messages=[answered(tool_calls=[call(arguments="[1]")])]),
            "messages[0].tool_calls[0].arguments",
            "object",
        ),
        (
            Chat(messages=[answered(tool_calls=[inference_pb2.ToolCall(index=1, name="f")])]),
            "messages[0].tool_calls[0].index",
            "its place is 0",
        ),
        (Chat(messages=[asked()], continue_final_message=True), "messages[0].role", "is user"),
        (Chat(messages=[answered()], continue_final_message=True), "messages[0].content", "is empty"),
        (
            Chat(messages=[answered("x", tool_calls=[call()])], continue_final_message=True),
            "messages[0].tool_calls",
            "cannot be continued",
        ),
        (Chat(messages=[asked()], tools=[tool(name="a b")]), "tools[0].name", "1 to 64 letters"),
        (Chat(messages=[asked()], tools=[tool(name="x" * 65)]), "tools[0].name", "1 to 64 letters"),
        (Chat(messages=[asked()], tools=[tool(), tool()]), "tools[1].name", "once more"),
        (Chat(messages=[asked()], tools=[tool(schema="{")]), "tools[0].parameters_json_schema", "not JSON"),
        (Chat(messages=[asked()], tools=[tool(schema="[]")]), "tools[0].parameters_json_schema", "not a JSON object"),
        (Chat(messages=[asked()], tools=[tool(schema='{"a": NaN}')]), "tools[0].parameters_json_schema", "NaN"),
        (
            Chat(messages=[asked()], tools=[tool(schema='{"type": "array"}')]),
            "tools[0].parameters_json_schema",
            "'array'",
        ),
        (Chat(messages=[asked()], tool_choice=Choice(mode=1)), "tool_choice.mode", "needs tools"),
        (Chat(messages=[asked()], tools=[tool()], tool_choice=Choice(mode=0)), "tool_choice.mode", "AUTO, NONE or"),
        (Chat(messages=[asked()], tools=[tool()], tool_choice=Choice(name="x")), "tool_choice.name", "no tool"),
        (Chat(messages=[asked()], parallel_tool_calls=True), "parallel_tool_calls", "needs tools"),
        (Chat(messages=[asked()], template_args={"messages": []}), "template_args['messages']", "other fields"),
        (Chat(messages=[asked()], template_args={"tools": []}), "template_args['tools']", "other fields"),
        (Chat(messages=[asked()], template_args={"bos_token": ""}), "template_args['bos_token']", "other fields"),
        (Chat(messages=[asked()], template_args={"raise_exception": 1}), "template_args['raise_exception']", "nothing"),
        (Chat(messages=[asked()], template_args={"think": 1}), "template_args['think']", "it knows: thinking"),
        (Chat(messages=[asked()], template_args={"a": float("nan")}), "template_args['a']", "finite"),
    ],
)
async def test_what_cannot_be_is_refused_naming_the_field(
    served: Served, request_: Chat, field: str, said_: str
) -> None:
    error = await failure(chat(served.channel, request_))
    assert fields_at_fault(error) == [field] and said_ in (error.details() or "")
    unserved = field.endswith("media")
    assert error.code() is (grpc.StatusCode.UNIMPLEMENTED if unserved else grpc.StatusCode.INVALID_ARGUMENT)
    unary = await failure(served.stub.ChatUnary(inference_pb2.ChatUnaryRequest(request=request_)))
    assert fields_at_fault(unary) == [f"request.{field}"]
    assert served.engine.submits == []


@pytest.mark.parametrize("written", ["[" * 100_000, '{"a":' * 50_000])
def test_json_that_is_nested_without_end_is_refused(written: str) -> None:
    limits = FrontendConfig(max_tool_schema_bytes=1_000_000).limits()
    with pytest.raises(RequestError, match=r"tools\[0\].parameters_json_schema"):
        read_chat(Chat(messages=[asked()], tools=[tool(schema=written)]), limits, "")
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls\[0\].arguments"):
        read_chat(Chat(messages=[answered(tool_calls=[call(arguments=written)])]), limits, "")


async def test_how_much_may_be_asked_is_told_and_counted(path: Path) -> None:
    limits = {"max_tools": 2, "max_tool_schema_bytes": 200, "max_prompt_bytes": 2000}
    async with serving(path, scripted([50, EOS_ID]), **limits) as served:
        model = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model
        assert {name: model.limits[name] for name in limits} == limits
        for request, field in (
            (Chat(messages=[asked()], tools=[tool(name=f"t{i}") for i in range(3)]), "tools"),
            (Chat(messages=[asked()], tools=[tool(schema=CITY_SCHEMA + " " * 200)]), "tools[0].parameters_json_schema"),
            (Chat(messages=[asked()], tools=[tool(description="x" * 2000)]), "messages"),
            (Chat(messages=[answered(reasoning="x" * 2000)]), "messages"),
            (Chat(messages=[answered(tool_calls=[call(arguments=json.dumps({"a": "x" * 2000}))])]), "messages"),
            (Chat(messages=[asked()], template_args={"thinking": "x" * 2000}), "messages"),
        ):
            error = await failure(chat(served.channel, request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]


def test_the_template_sees_tools_calls_reasoning_and_names(model: ServedModel) -> None:
    request = Chat(
        tools=[tool(description="The weather"), tool("now", "")],
        messages=[
            said(3, "Weather?", name="ann"),
            answered("I look.", reasoning="Hm.", tool_calls=[call()]),
            said(TOOL, "rain", tool_call_id="a1"),
        ],
        template_args={"thinking": "open"},
    )
    city = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
    weather = f'{{"name": "get_weather", "description": "The weather", "parameters": {city}}}'
    nothing = '{"name": "now", "parameters": {"type": "object", "properties": {}}}'
    assert prompt(model, request) == (
        f'<|im_start|>system\nTools:\n{{"type": "function", "function": {weather}}}\n'
        f'{{"type": "function", "function": {nothing}}}\n'
        'Write <tool_call>{"name": "...", "arguments": {...}}</tool_call><|im_end|>\n'
        "<|im_start|>user ann\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool a1\nrain<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_tools_that_must_not_be_called_are_not_shown(model: ServedModel) -> None:
    with_tools = Chat(messages=[asked()], tools=[tool()], tool_choice=Choice(mode=Choice.MODE_NONE))
    assert prompt(model, with_tools) == prompt(model, Chat(messages=[asked()]))


def test_the_final_message_is_continued_as_it_stands(model: ServedModel) -> None:
    request = Chat(messages=[asked(), answered("The sky is ")], continue_final_message=True)
    assert prompt(model, request) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe sky is "


def test_a_template_that_hides_the_final_message_cannot_continue_it(tmp_path: Path) -> None:
    hiding = served_model.load(str(text_checkpoint(tmp_path / "m", chat_template="{{ messages[0]['content'] }}")), None)
    with pytest.raises(RequestError, match="does not show the last one"):
        prompt(hiding, Chat(messages=[asked(), answered("x")], continue_final_message=True))


def test_whole_numbers_of_template_args_are_integers(tmp_path: Path) -> None:
    template = "{{ [a, b, c, d] | tojson }}{{ messages[0]['content'] }}"
    shown = served_model.load(str(text_checkpoint(tmp_path / "m", chat_template=template)), None)
    args = {"a": 1, "b": 1.5, "c": [True, None], "d": {"e": "f"}}
    written = prompt(shown, Chat(messages=[asked("x")], template_args=args))
    assert written == '[1, 1.5, [true, null], {"e": "f"}]x'


def test_variables_with_a_default_in_the_template_can_be_set_and_tools_cannot(tmp_path: Path) -> None:
    """As Llama 3.1's: https://github.com/vllm-project/vllm/blob/main/examples/tool_chat_template_llama3.1_json.jinja."""
    template = (
        "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{% if not date_string is defined %}"
        "{% set date_string = 'today' %}{% endif %}{% if not tools is defined %}{% set tools = none %}{% endif %}"
        "{{ date_string }}{{ tools | tojson }}"
    )
    llama = served_model.load(str(text_checkpoint(tmp_path / "m", chat_template=template)), None)
    assert llama.chat.takes_tools
    assert prompt(llama, Chat(messages=[asked()])) == "todaynull"
    assert prompt(llama, Chat(messages=[asked()], template_args={"date_string": "then"})) == "thennull"
    with pytest.raises(RequestError, match=r"custom_tools.*other fields"):
        prompt(llama, Chat(messages=[asked()], template_args={"custom_tools": [1]}))


def test_arguments_are_text_where_a_template_joins_them(tmp_path: Path) -> None:
    """As DeepSeek V3's does: https://huggingface.co/deepseek-ai/DeepSeek-V3-0324/blob/main/tokenizer_config.json."""
    template = (
        "{% for m in messages %}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] + '\\n' + c['function']['arguments'] + '|' }}{% endfor %}{% endfor %}"
    )
    joining = served_model.load(str(text_checkpoint(tmp_path / "m", chat_template=template)), None)
    request = Chat(messages=[answered(tool_calls=[call(arguments='{"a":  1}'), call(arguments="")])])
    assert prompt(joining, request) == 'get_weather\n{"a":  1}|get_weather\n{}|'


def test_a_template_of_its_own_for_tools_is_taken_with_tools_alone(tmp_path: Path) -> None:
    """Hermes 2 Pro has two, under these names."""
    path = text_checkpoint(tmp_path / "m", chat_template=None)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    model = served_model.load(str(path), None)
    assert prompt(model, Chat(messages=[asked()])) == "plain"
    assert prompt(model, Chat(messages=[asked()], tools=[tool()])) == "tools 1"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("newer{{ tools[0] and '' }}")
    assert prompt(served_model.load(str(path), None), Chat(messages=[asked()], tools=[tool()])) == "newer"


@pytest.mark.parametrize(
    ("template", "config", "code", "why"),
    [
        ("{{ messages[0].content }}", {"tool_call_format": "hermes"}, "FAILED_PRECONDITION", "NO_TOOLS"),
        ("{{ messages[0].content }}{{ tools }}", {}, "FAILED_PRECONDITION", "NO_TOOL_CALL_FORMAT"),
        (None, {}, "FAILED_PRECONDITION", "NO_TOOLS"),
        ("<tool_call>{{ tools }}", {"tool_call_format": "none"}, "FAILED_PRECONDITION", "NO_TOOL_CALL_FORMAT"),
    ],
)
async def test_tools_that_the_model_cannot_have_are_refused(
    tmp_path: Path, template: str | None, config: dict[str, Any], code: str, why: str
) -> None:
    path = text_checkpoint(tmp_path / "m", chat_template=template)
    async with serving(path, scripted([50, EOS_ID]), **config) as served:
        error = await failure(chat(served.channel, Chat(messages=[asked()], tools=[tool()])))
        assert error.code().name == code and reason(error) == why
        model = (await served.stub.GetModel(inference_pb2.GetModelRequest())).model
        assert "tools" not in model.features
        none = Choice(mode=Choice.MODE_NONE)
        if template is not None:
            await chat(served.channel, Chat(messages=[asked()], tools=[tool()], tool_choice=none, options=greedy()))


async def test_tokenize_takes_a_whole_chat(served: Served) -> None:
    request = Chat(messages=[asked()], tools=[tool()], template_args={"thinking": "open"})
    tokenized = await served.stub.Tokenize(inference_pb2.TokenizeRequest(chat=request))
    answer = await chat(served.channel, request)
    assert tuple(tokenized.token_ids) == served.engine.prompts[-1]
    assert answer.prompt.prompt_tokens == len(tokenized.token_ids)
    request.parallel_tool_calls = True
    error = await failure(served.stub.Tokenize(inference_pb2.TokenizeRequest(chat=request)))
    assert fields_at_fault(error) == ["chat.parallel_tool_calls"]
