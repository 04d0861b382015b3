"""Chat templates run in processes of their own: what does not end, or only grows, ends there and nowhere else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import inference_pb2

from services.common.errors import RequestError
from services.frontend import template_processes
from services.frontend.template_processes import Budget, TemplateProcesses
from tests.frontend.harness import fields_at_fault, scripted, serving, text_checkpoint, user
from tests.support.calls import by_text, chat, generate, greedy
from tests.support.checkpoints import EOS_ID

Chat = inference_pb2.ChatRequest
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='a') %}{% for _ in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"


@asynccontextmanager
async def processes(budget: Budget = Budget(20.0, 10_000), **templates: str) -> AsyncIterator[TemplateProcesses]:  # noqa: B008
    made = TemplateProcesses(templates, budget)
    try:
        yield made
    finally:
        await made.close()


def children() -> set[int]:
    """Processes that this one has started and that still are."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z" and "template_worker" in command:
                found.add(int(entry.name))
    return found


async def refusal(made: TemplateProcesses, template: str, variables: dict[str, Any] | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        await made.render(template, variables or {}, "messages")
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.violations[0].field == "messages"
    return caught.value.message


async def test_templates_are_rendered_by_name_and_refuse_in_their_own_words() -> None:
    async with processes(a="A {{ x | tojson }}", b="{{ raise_exception('no ' + x) }}", c="{{ 1 // 0 }}") as made:
        assert await made.render("a", {"x": {"é": [1, None, "\n"]}}, "messages") == 'A {"é": [1, null, "\\n"]}'
        assert await refusal(made, "b", {"x": "secret"}) == "messages: the model's chat template refuses them: no ..."
        assert await refusal(made, "c") == "messages: the model's chat template fails: ZeroDivisionError"
        assert len(children()) == 1
    assert children() == set()


async def test_a_template_without_an_end_is_ended_and_others_are_rendered_meanwhile() -> None:
    async with processes(Budget(0.5, 1000), endless=ENDLESS, fine="ok") as made:
        made.warm()
        endless = asyncio.create_task(refusal(made, "endless"))
        texts = [await made.render("fine", {}, "messages") for _ in range(5)]
        assert texts == ["ok"] * 5
        assert "takes longer than 0.5 s (template_timeout_s)" in await endless
        assert await made.render("fine", {}, "messages") == "ok"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(9999) %}aaaaaaaaaa{% endfor %}", "more than 1000 bytes (max_rendered_bytes)"),
        ("{{ 'é' * 999 }}", "more than 1000 bytes (max_rendered_bytes)"),
        (DOUBLING, "MemoryError"),
    ],
)
async def test_a_template_that_grows_without_end_is_refused(
    template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_processes, "MEMORY_BYTES", 256 * 1024**2)
    async with processes(Budget(60.0, 1000), large=template, fine="ok") as made:
        assert said in await refusal(made, "large")
        assert await made.render("fine", {}, "messages") == "ok"


async def test_a_process_that_dies_is_replaced() -> None:
    async with processes(fine="ok", endless=ENDLESS) as made:
        assert await made.render("fine", {}, "messages") == "ok"
        running = asyncio.create_task(refusal(made, "endless"))
        await asyncio.sleep(0.1)
        (process,) = children()
        os.kill(process, 9)
        assert "ends its process" in await running
        assert await made.render("fine", {}, "messages") == "ok"


async def test_a_caller_who_leaves_takes_his_rendering_with_him() -> None:
    async with processes(fine="ok {{ x }}", endless=ENDLESS) as made:
        running = [asyncio.create_task(made.render("endless", {}, "messages")) for _ in range(2)]
        await asyncio.sleep(0.5)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        answers = await asyncio.gather(*(made.render("fine", {"x": n}, "messages") for n in range(6)))
        assert answers == [f"ok {n}" for n in range(6)]


async def test_where_no_process_can_be_had_the_call_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_processes.sys, "executable", "/nonexistent")
    async with processes(fine="ok") as made:
        made.warm()
        with pytest.raises(RequestError) as caught:
            await made.render("fine", {}, "messages")
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE and caught.value.reason == "TEMPLATE_PROCESS"


async def test_a_template_without_an_end_stalls_nobody_else(tmp_path: Path) -> None:
    template = f"{{% if messages[0].content == 'endless' %}}{ENDLESS}{{% endif %}}{{{{ messages[0].content }}}}"
    model = text_checkpoint(tmp_path / "m", chat_template=template)
    async with serving(model, scripted([50, EOS_ID]), template_timeout_s=2) as served:
        await chat(served.channel, Chat(messages=[user("warm")], options=greedy()))

        async def endless() -> grpc.aio.AioRpcError:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await chat(served.channel, Chat(messages=[user("endless")], options=greedy()))
            return caught.value

        running = asyncio.create_task(endless())
        slowest_s, count = 0.0, 0
        while not running.done():
            begun_s = time.monotonic()
            await generate(served.channel, by_text("x", greedy()))
            slowest_s, count = max(slowest_s, time.monotonic() - begun_s), count + 1
        error = await running
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == ["messages"]
        assert count > 5 and slowest_s < 1.0, "the loop went on while the template ran"
    assert children() == set()
