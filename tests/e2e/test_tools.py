"""Tools with three real processes: what is promised is kept, by a model that would write anything else."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from services.executor.embedded import fetch
from tests.frontend.tool_models import TEMPLATE
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import Cluster
from triptych_client import Client, FinishReason, Message, Tool

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", "The weather of a city", PLACE), Tool("get_time", "The time now")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A random model under a template that takes tools."""
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny-tools")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    made = Cluster(model, tmp_path_factory.mktemp("logs"), {"frontend": ("--reasoning-format", "none")})
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.mark.slow
async def test_calls_are_made_as_asked_for_and_their_answers_are_read(cluster: Cluster) -> None:
    async with Client(cluster.address, timeout_s=300) as client:
        chat = functools.partial(client.chat_unary, tools=TOOLS, max_tokens=96)
        model = await client.get_model()
        assert model.tool_call_format == "hermes" and {"grammar", "tools"} <= set(model.features)
        asked = Message("user", "What is the weather in Paris?")
        for seed in range(2):
            made = await chat([asked], tool_choice="get_weather", seed=seed, logprobs=0)
            (call,) = made.tool_calls
            jsonschema.validate(json.loads(call.arguments), PLACE)
            assert made.finish is not None and made.finish.reason is FinishReason.TOOL_CALLS
            assert made.text == "" and len(made.choices[0].logprobs) == len(made.token_ids)
            stream = client.chat([asked], tools=TOOLS, tool_choice="get_weather", seed=seed, max_tokens=96)
            streamed = await stream.collect()
            assert streamed.token_ids == made.token_ids and streamed.tool_calls == made.tool_calls
        best = await chat([asked], tool_choice="required", parallel_tool_calls=False, n=2, best_of=4, seed=1)
        assert [len(choice.tool_calls) for choice in best.choices] == [1, 1]
        likelihoods = [choice.cumulative_logprob or 0.0 for choice in best.choices]
        assert likelihoods == sorted(likelihoods, reverse=True)
        history = [
            asked,
            Message("assistant", tool_calls=made.tool_calls),
            Message("tool", "12 degrees, rain", tool_call_id=call.id),
        ]
        answer = await chat(history, tool_choice="none", temperature=0)
        assert answer.text and not answer.tool_calls


def with_tools(embedded: Path, path: Path) -> Path:
    """The embedded model under a template that takes tools, which its own does not."""
    path.mkdir()
    for file in embedded.iterdir():
        if file.name != "chat_template.jinja":
            (path / file.name).symlink_to(file.resolve())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_embedded_model_calls_the_tools_that_it_is_given_and_reads_their_answers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = with_tools(fetch(print), tmp_path_factory.mktemp("embedded") / "smollm2-tools")
    made = Cluster(model, tmp_path_factory.mktemp("logs"), {"frontend": ("--reasoning-format", "none")})
    try:
        made.start()
        async with Client(made.address, timeout_s=300) as client:
            asked = Message("user", "What is the weather in Paris, in celsius?")
            chat = functools.partial(client.chat_unary, tools=TOOLS, max_tokens=128, temperature=0)
            required = await chat([asked], tool_choice="required", parallel_tool_calls=False)
            named = await chat([asked], tool_choice="get_weather")
            for answer, names in ((required, {"get_weather", "get_time"}), (named, {"get_weather"})):
                (call,) = answer.tool_calls
                assert call.name in names and answer.text == ""
                assert answer.finish is not None and answer.finish.reason is FinishReason.TOOL_CALLS
                schema = PLACE if call.name == "get_weather" else {"type": "object", "maxProperties": 0}
                jsonschema.validate(json.loads(call.arguments), schema)
            (call,) = named.tool_calls
            streamed = await client.chat(
                [asked], tools=TOOLS, tool_choice="get_weather", max_tokens=128, temperature=0
            ).collect()
            assert streamed.tool_calls == named.tool_calls and streamed.token_ids == named.token_ids
            history = [
                asked,
                Message("assistant", tool_calls=named.tool_calls),
                Message("tool", "12 degrees, rain", tool_call_id=call.id),
            ]
            answer = await chat(history, tool_choice="none")
            assert answer.text.strip() and not answer.tool_calls
    finally:
        made.stop()
