"""The core and an executor in one process, and other engines as libraries: the same load, the same outcomes."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadtest import alone, peer_offline, vllm_offline, workload
from loadtest.alone import Alone
from loadtest.executor_load import Bench
from loadtest.serve_load import LoadError
from loadtest.workload import Planned
from services.common.errors import StartError
from tests.support.checkpoints import reference_ids, tiny_llama


def burst(*requests: tuple[int, int]) -> workload.Plan:
    """(prompt tokens, ids to make) of each."""
    return workload.Plan(tuple(Planned(0.0, tuple(range(5, 5 + n)), output) for n, output in requests), 0.0, 0.0)


# -- ours


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("alone") / "m")


@pytest.fixture(scope="module")
def tiny_bench(tiny: Path) -> Bench:
    return Bench(tiny, threads=1, most_rows=3, most_decodes=1, most_tokens=400)


async def test_every_request_of_a_burst_has_its_ids_one_after_the_other(tiny_bench: Bench) -> None:
    engine = Alone(tiny_bench.executor, tiny_bench.limits)
    for _ in range(2):  # the second finds an empty batch again
        outcomes = await engine.run(burst((300, 4), (5, 7), (40, 1)))
        assert [(one.prompt_tokens, len(one.token_s)) for one in outcomes] == [(300, 4), (5, 7), (40, 1)]
        for one in outcomes:
            assert list(one.token_s) == sorted(one.token_s) and 0 < one.token_s[0] <= one.end_s == one.token_s[-1]
            assert one.failure is None
        assert outcomes[0].token_s[0] > outcomes[1].token_s[0]  # 300 tokens do not fit beside it in the first step


async def test_what_it_computes_are_the_models_ids(
    tiny_bench: Bench, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: dict[int, list[int]] = {}
    apply = alone.Scheduler.apply

    def kept(core: Any, result: Any, now_ns: int) -> Any:
        updates = apply(core, result, now_ns)
        for key, token_id in zip(updates.keys, updates.token_ids, strict=True):
            ids.setdefault(key.request_id, []).append(token_id)
        return updates

    monkeypatch.setattr(alone.Scheduler, "apply", kept)
    plan = burst((9, 6), (30, 6))
    await Alone(tiny_bench.executor, tiny_bench.limits).run(plan)
    prompts = [list(request.prompt_ids) for request in plan.requests]
    assert [ids[0], ids[1]] == reference_ids(tiny, prompts, 6, ignore_eos=True)


async def test_a_request_that_does_not_fit_voids_the_load(tiny_bench: Bench) -> None:
    with pytest.raises(LoadError, match=r"executor alone: .*400"):
        await Alone(tiny_bench.executor, tiny_bench.limits).run(burst((399, 64)))


def test_outcomes_are_refused_where_ids_are_missing() -> None:
    with pytest.raises(LoadError, match="1 ids came of a request for 2"):
        alone.outcomes(burst((3, 2)), [[0.1]])


# -- peers


SCRIPT = """
import json, sys
if "fail" in sys.argv:
    sys.exit("no such library")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    requests = json.loads(line)["requests"]
    if len(requests) == 3:
        sys.exit("out of memory")
    times = [[0.5 * (i + 1) for i in range(one["output_tokens"])] for one in requests]
    print(json.dumps({"token_s": times}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "library.py"
    file.write_text(SCRIPT)
    return file


async def test_a_library_is_given_bursts_and_tells_when_each_id_came(script: Path) -> None:
    async with peer_offline.running("lib", Path(sys.executable), script, [], {}) as run:
        for _ in range(2):
            outcomes = await run(burst((7, 2), (5, 3)))
            assert [one.token_s for one in outcomes] == [(0.5, 1.0), (0.5, 1.0, 1.5)]
            assert [one.end_s for one in outcomes] == [1.0, 1.5]
        with pytest.raises(LoadError, match="lib did not answer; its last lines:\nout of memory"):
            await run(burst((1, 1), (1, 1), (1, 1)))


async def test_a_library_that_cannot_start_says_why(script: Path) -> None:
    with pytest.raises(StartError, match="lib has not started; its last lines:\nno such library"):
        async with peer_offline.running("lib", Path(sys.executable), script, ["fail"], {}):
            raise AssertionError("it started")


class VllmEngine:
    """As far as it is used: two requests at once, one id a step for each; outputs hold all ids so far."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.had: dict[str, int] = {}

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        self.asked[name], self.had[name] = (prompt, params), 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.had)

    def step(self) -> list[Any]:
        told = []
        for name in list(self.had)[:2]:
            self.had[name] += 1
            told.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7] * self.had[name])]))
            if self.had[name] == self.asked[name][1].max_tokens:
                del self.had[name]
        return told


def test_vllms_steps_are_counted_by_the_ids_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("vllm")
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    engine = VllmEngine()
    requests = [{"prompt_ids": [5, 6], "output_tokens": n} for n in (2, 3, 1)]
    token_s = vllm_offline._burst(engine, requests)
    assert [len(times_s) for times_s in token_s] == [2, 3, 1]
    assert token_s[2][0] > token_s[0][1] >= token_s[0][0] > 0
    assert engine.asked["1"][0] == {"prompt_token_ids": [5, 6]}
    params = engine.asked["1"][1]
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0, 3, True)


class Llama:
    """As far as it is used of llama_cpp: each row that samples has its own position + 1 as its best id."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int, int, bool]]] = []
        self.batch = SimpleNamespace(
            n_tokens=0,
            **{name: [0] * 512 for name in ("token", "pos", "n_seq_id", "logits")},
            seq_id=[[0] for _ in range(512)],
        )

    def module(self) -> types.ModuleType:
        module = types.ModuleType("llama_cpp")
        functions = {
            "llama_log_callback": lambda function: function,
            "llama_model_default_params": SimpleNamespace,
            "llama_context_default_params": SimpleNamespace,
            "llama_vocab_n_tokens": lambda vocab: 4096,
            "llama_batch_init": lambda *sizes: self.batch,
            "llama_decode": self.decode,
            "llama_get_logits_ith": self.logits,
        }
        for name in (
            *("llama_backend_init", "llama_log_set", "llama_model_load_from_file", "llama_init_from_model"),
            *("llama_model_get_vocab", "llama_memory_clear", "llama_get_memory"),
        ):
            functions[name] = lambda *given: "handle"
        vars(module).update(functions)
        return module

    def decode(self, context: object, batch: Any) -> int:
        rows = range(batch.n_tokens)
        self.batches.append([(batch.seq_id[i][0], batch.pos[i], batch.token[i], bool(batch.logits[i])) for i in rows])
        return 0

    def logits(self, context: object, row: int) -> Any:
        logits = np.zeros(4096, np.float32)
        logits[self.batches[-1][row][1] + 1] = 1
        return np.ctypeslib.as_ctypes(logits)


def test_llama_cpp_is_given_whole_batches_of_prompts_and_then_a_token_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llama = Llama()
    monkeypatch.setitem(sys.modules, "llama_cpp", llama.module())
    monkeypatch.delitem(sys.modules, "loadtest.llamacpp_offline", raising=False)
    offline = importlib.import_module("loadtest.llamacpp_offline")
    monkeypatch.delitem(sys.modules, "loadtest.llamacpp_offline")
    requests = [{"prompt_ids": list(range(600)), "output_tokens": 2}, {"prompt_ids": [9, 8, 7], "output_tokens": 4}]
    token_s = offline.Batched(Path("m.gguf"), 1).burst(requests)
    assert [len(times_s) for times_s in token_s] == [2, 4]
    assert [len(rows) for rows in llama.batches] == [512, 91, 2, 1, 1]
    assert [row for rows in llama.batches[:2] for row in rows if row[3]] == [(0, 599, 599, True), (1, 2, 7, True)]
    assert llama.batches[2:] == [  # each feeds what was sampled at the position before
        [(0, 600, 600, True), (1, 3, 3, True)],
        [(1, 4, 4, True)],
        [(1, 5, 5, True)],
    ]


def test_the_scripts_need_nothing_of_ours() -> None:
    for file in (peer_offline.VLLM_SCRIPT, peer_offline.LLAMACPP_SCRIPT):
        lines: Sequence[str] = file.read_text().splitlines()
        assert not [line for line in lines if line.lstrip().startswith(("from loadtest", "from services"))]
