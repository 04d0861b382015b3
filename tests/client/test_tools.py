"""Tools with the Python client: what it takes, and a call answered, through a whole frontend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from triptych.inference.v1 import inference_pb2

from services.frontend import served_model
from tests.frontend.harness import scripted, serving
from tests.frontend.tool_models import tool_checkpoint
from tests.support.checkpoints import EOS_ID
from triptych_client import Client, FinishReason, Message, Tool, ToolCall
from triptych_client import messages as client_messages
from triptych_client import tools as client_tools

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WRITTEN = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_tool_is_the_same_in_each_of_its_forms() -> None:
    flat = {"name": "get_weather", "description": "d", "parameters": PARAMETERS, "strict": True}
    forms: list[Any] = [
        Tool("get_weather", "d", PARAMETERS, strict=True),
        Tool("get_weather", "d", json.dumps(PARAMETERS), strict=True),
        flat,
        {"type": "function", "function": flat},
    ]
    expected = inference_pb2.Tool(
        name="get_weather", description="d", parameters_json_schema=json.dumps(PARAMETERS), strict=True
    )
    assert client_tools.to_proto([*forms, expected]) == [expected] * 5
    assert client_tools.to_proto([{"name": "now", "description": None}]) == [inference_pb2.Tool(name="now")]
    wrong: Any
    for wrong in ({"name": "f", "params": {}}, {"description": "d"}, "f"):
        with pytest.raises(ValueError, match="a tool has the keys"):
            client_tools.to_proto([wrong])


def test_tool_choice_is_a_mode_or_a_name() -> None:
    choice = inference_pb2.ToolChoice
    assert client_tools.choice_to_proto(None) is None
    assert client_tools.choice_to_proto("required") == choice(mode=choice.MODE_REQUIRED)
    assert client_tools.choice_to_proto("get_weather") == choice(name="get_weather")
    assert client_tools.choice_to_proto(choice(name="auto")) == choice(name="auto")


def test_messages_take_all_that_the_contract_has() -> None:
    call = ToolCall(1, "a1", "f", "{}")
    (turn,) = client_messages.to_proto([Message("assistant", reasoning="r", tool_calls=(call,))])
    assert (turn.reasoning, turn.tool_calls[0].id, turn.tool_calls[0].index) == ("r", "a1", 1)
    (turn,) = client_messages.to_proto([{"role": "tool", "content": "rain", "tool_call_id": "a1", "name": "f"}])
    assert (turn.tool_call_id, turn.name, turn.content[0].text) == ("a1", "f", "rain")
    with pytest.raises(ValueError, match="a message has the keys"):
        client_messages.to_proto([{"role": "user", "text": "hi"}])


async def test_a_call_is_asked_for_read_and_answered(tmp_path: Path) -> None:
    path = tool_checkpoint(tmp_path / "m", plain=("<tool_call>", "</tool_call>", "<think>", "</think>"))
    ids = served_model.load(str(path), None).tokenizer.encode(WRITTEN, add_special_tokens=False)
    async with (
        serving(path, scripted([*ids, EOS_ID])) as served,
        Client(f"127.0.0.1:{served.frontend.server.port}") as client,
    ):
        asked = Message("user", "The weather in Paris?")
        tools = [Tool("get_weather", parameters=PARAMETERS)]
        answer = await client.chat([asked], tools=tools, tool_choice="auto", best_of=2).collect()
        (call,) = answer.tool_calls
        assert (call.name, json.loads(call.arguments), answer.reasoning) == ("get_weather", {"city": "Paris"}, "Hm.")
        assert answer.finish is not None and answer.finish.reason is FinishReason.TOOL_CALLS
        history = [
            asked,
            Message("assistant", reasoning=answer.reasoning, tool_calls=answer.tool_calls),
            Message("tool", "rain", tool_call_id=call.id),
        ]
        await client.chat_unary(history, tools=tools, template_args={"thinking": "off"})
        prompt = served.frontend.model.tokenizer.decode(served.engine.prompts[-1], skip_special_tokens=False)
        assert f"<|im_start|>tool {call.id}\nrain<|im_end|>" in prompt and prompt.endswith("</think>\n\n")
