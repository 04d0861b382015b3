"""The Python client's streams when their frontend is killed: what comes is what an undisturbed stream brings."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from loadtest.stub_engine import StubEngine
from tests.frontend.harness import scripted, text_checkpoint
from tests.frontend.test_process import SERVING, process, watched
from tests.support.checkpoints import EOS_ID
from triptych_client import Client, Delta, Retry, SyncClient, TriptychError, results

TEXT = "tea for two, 猫と🦊 and an é, again and again"
PROMPT = [10, 11, 12]
OPTIONS: dict[str, dict[str, Any]] = {
    "drawn seed": {},
    "three choices": {"n": 3, "max_tokens": 40, "seed": 5},
    "logprobs and a stop string": {"logprobs": 2, "stop": ["again and"], "seed": 5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny-text")


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[StubEngine]:
    from services.frontend import tokenizer

    text = tokenizer.load(tokenizer.load_definition(model), model)
    script = [*text.encode(TEXT, add_special_tokens=False), EOS_ID]
    async with scripted(script, step_s=0.02) as stub:
        yield stub


class Frontends:
    """Two processes; a client that knows both takes the first that is there."""

    def __init__(self, engine: StubEngine, model: Path) -> None:
        self._flags = ("--engine", engine.address, "--model", str(model), "--log-level", "info")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Frontends:
        started = [await self._stack.enter_async_context(process(*self._flags)) for _ in range(2)]
        self.processes = [child for child, _ in started]
        for _, address in started:
            async with grpc.aio.insecure_channel(address) as channel:
                await watched(channel, "generate", SERVING, 20)
        self.address = "ipv4:" + ",".join(address for _, address in started)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    def kill_first(self) -> None:
        self.processes[0].kill()


def joined(deltas: list[Delta]) -> tuple[Any, ...]:
    """All that came, as one; sums of logprobs as far as float64 keeps them in another order."""
    assert deltas[-1].usage is not None
    return (
        [
            (one.index, one.text, one.token_ids, one.logprobs, one.finish, pytest.approx(one.cumulative_logprob))
            for one in results.join(deltas)
        ],
        (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens),
    )


async def undisturbed(address: str, options: dict[str, Any]) -> list[Delta]:
    async with Client(address, retry=None) as client:
        return [delta async for delta in client.generate(PROMPT, **options)]


@pytest.mark.parametrize("way", OPTIONS)
async def test_a_killed_frontend_is_a_pause(model: Path, engine: StubEngine, way: str) -> None:
    async with Frontends(engine, model) as frontends, Client(frontends.address) as client:
        expected = await undisturbed(frontends.address, OPTIONS[way])
        stream = client.generate(PROMPT, **OPTIONS[way])
        seen = []
        async for delta in stream:
            seen.append(delta)
            if len(seen) == 3:
                frontends.kill_first()
        assert joined(seen) == joined(expected)
        assert [len(submit.resumed) > 0 for submit in engine.submits] == [False, False, True]
        assert len({submit.seed for submit in engine.submits[1:]}) == 1
        assert engine.num_running == 0


async def test_a_killed_frontend_is_a_pause_for_a_client_that_blocks(model: Path, engine: StubEngine) -> None:
    async with Frontends(engine, model) as frontends:
        expected = await undisturbed(frontends.address, {"seed": 5})

        def run() -> list[Delta]:
            seen = []
            with SyncClient(frontends.address) as client:
                for delta in client.generate(PROMPT, seed=5):
                    seen.append(delta)
                    if len(seen) == 3:
                        frontends.kill_first()
            return seen

        assert joined(await asyncio.to_thread(run)) == joined(expected)


async def test_an_engine_that_breaks_off_is_a_pause(model: Path, engine: StubEngine) -> None:
    async with Frontends(engine, model) as frontends, Client(frontends.address) as client:
        expected = await undisturbed(frontends.address, {"seed": 5})
        seen = []
        async for delta in client.generate(PROMPT, seed=5):
            seen.append(delta)
            if len(seen) == 3:
                await engine.stop()
                await engine.start()
        assert joined(seen) == joined(expected)


async def test_tries_end_when_nobody_comes_back(model: Path, engine: StubEngine) -> None:
    retry = Retry(attempts=3, first_wait_s=0.05, most_wait_s=0.05)
    async with Frontends(engine, model) as frontends, Client(frontends.address, retry=retry) as client:
        seen = 0
        with pytest.raises(TriptychError) as caught:
            async for _ in client.generate(PROMPT):
                seen += 1
                if seen == 3:
                    for child in frontends.processes:
                        child.kill()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_the_client_needs_grpcio_protobuf_and_the_stubs_alone() -> None:
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith(('google.rpc', 'grpc_status', 'services', 'numpy', 'yaml', 'pydantic')):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import triptych_client\n"
        "from triptych_client import Client, SyncClient\n"
        "from triptych_client.errors import from_rpc\n"
        "assert 'google.rpc' not in sys.modules\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, told = await child.communicate()
    assert child.returncode == 0, told.decode()
