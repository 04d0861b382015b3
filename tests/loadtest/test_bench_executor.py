"""The executor's benchmark: its arithmetic by hand, and the whole of it on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels.cpu import compact
from loadtest import bench_executor, serve_load
from loadtest.alone import outcomes
from loadtest.executor_load import Bench
from loadtest.open_loop import Outcome
from loadtest.serve_load import Measured, Repetition
from loadtest.summary import Summary, summarize
from loadtest.workload import Plan, Planned
from tests.support.checkpoints import tiny_llama


def test_rates_and_shares_are_those_of_a_hand() -> None:
    figures = bench_executor.Figures(
        prefill_s=[0.5, 0.25],  # 256 tokens in 0.25 s
        decode_16_s=[0.1, 0.08],
        decode_1_s=[0.04, 0.02],
        matrix_flops_per_s=100e9,
        read_bytes_per_s=10e9,
        prefill_flops=20_000_000_000,  # 80 GFLOP/s
        decode_1_bytes=100_000_000,  # 5 GB/s
    )
    found = bench_executor.values(figures)
    assert found["prefill_tokens_per_s"] == pytest.approx(1024)
    assert found["decode_16_tokens_per_s"] == pytest.approx(200)
    assert found["decode_1_tokens_per_s"] == pytest.approx(50)
    assert found["prefill_share_of_gemm"] == pytest.approx(0.8)
    assert found["decode_share_of_bandwidth"] == pytest.approx(0.5)


def repetition(many_s: float, first_s: float, step_s: float) -> Repetition:
    """16 streams of 100 tokens and 10 out that take `many_s`; one of them alone, by its first id and its steps."""

    def summary(streams: int, token_s: list[float]) -> Summary:
        requests = tuple(Planned(0.0, (5,) * 100, 10) for _ in range(streams))
        return summarize(Plan(requests, 0.0, 0.0), outcomes(Plan(requests, 0.0, 0.0), [token_s] * streams))

    return Repetition(summary(16, [many_s] * 10), summary(1, [first_s + step_s * i for i in range(10)]))


def test_the_load_is_compared_by_its_total_rate_and_one_stream_by_its_decode() -> None:
    found = bench_executor.load_values(
        [
            Measured("alone", [repetition(1.0, 0.5, 0.125), repetition(4.0, 0.5, 0.125), repetition(2.0, 0.5, 0.125)]),
            Measured("stack", [repetition(2.5, 0.5, 0.25)]),
            Measured("vllm", [repetition(4.0, 1.0, 0.5)]),
        ]
    )
    assert found["alone_total_tokens_per_s"] == pytest.approx(16 * 110 / 2.0)
    assert found["alone_out_tokens_per_s"] == pytest.approx(16 * 10 / 2.0)
    assert found["alone_single_decode_tokens_per_s"] == pytest.approx(8)
    assert found["alone_single_stream_tokens_per_s"] == pytest.approx(10 / (0.5 + 9 * 0.125))
    assert found["share_of_executor_alone"] == pytest.approx(2.0 / 2.5)
    assert found["ratio_vs_vllm"] == pytest.approx(4.0 / 2.0)
    assert found["ratio_vs_vllm_single"] == pytest.approx(0.5 / 0.125)
    assert found["ratio_vs_llamacpp"] is None and found["ratio_vs_transformers"] is None


def test_work_is_counted_by_the_weights_and_the_keys_and_values(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", dtype="bfloat16")
    bench = Bench(path, threads=1, most_rows=2, most_decodes=1)
    if compact.IS_SERVED:  # a panel of 16 outputs is 64 bytes and 24 for each of its depths
        layer, head = (128 + 64 + 256) // 16 * (64 + 24 * 64) + 64 // 16 * (64 + 24 * 128), 512 // 16 * (64 + 24 * 64)
    else:
        layer, head = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128), 2 * 512 * 64
    assert bench.weight_bytes() == 2 * layer + head
    assert bench.kv_token_bytes() == 2 * 2 * 2 * 16 * 4  # K and V, 2 layers, 2 kv heads, head_dim 16, float32
    shapes = sorted((one.weights.outputs, one.weights.depth) for one in bench.linears())
    of_a_layer = [(128, 64), (64, 64), (256, 64), (64, 128)]  # queries, keys and values are one, as are gate and up
    assert shapes == sorted([(512, 64), *of_a_layer, *of_a_layer])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_of_it_on_a_tiny_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in bench_executor.PEERS:
        monkeypatch.delenv(f"TRIPTYCH_PEER_{name}", raising=False)
    path = tiny_llama(tmp_path / "m")
    assert bench_executor.main(["--quick", "--model", str(path), "--threads", "1"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("left out: vllm (set TRIPTYCH_PEER_VLLM), transformers") for line in shown)
    found = json.loads(last)
    rates = ("prefill_tokens_per_s", "decode_16_tokens_per_s", "decode_1_tokens_per_s")
    assert all(found[key] > 0 for key in (*rates, "prefill_share_of_gemm", "decode_share_of_bandwidth"))
    assert found["ratio_vs_vllm"] is None and found["ratio_vs_vllm_single"] is None
    assert found["share_of_executor_alone"] > 0 and found["stack_total_tokens_per_s"] > 0
    assert found["benchmark"] == "bench_executor"


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_executor.main(["--model", str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err.startswith("loadtest.bench_executor: error: no model at")


async def test_a_quick_run_gives_slow_peers_the_same_load_in_half_the_tokens() -> None:
    asked: list[Plan] = []

    async def run(plan: Plan) -> list[Outcome]:
        asked.append(plan)
        return outcomes(plan, [[0.1 * (i + 1) for i in range(one.output_tokens)] for one in plan.requests])

    for quick in (False, True):
        lengths = bench_executor.lengths_for("LLAMACPP", quick)
        assert bench_executor.lengths_for("VLLM", quick) == serve_load.WHOLE
        await bench_executor.compare({"llamacpp": run}, 1000, 1, lengths)
    _, whole, whole_single, _, half, half_single = asked
    assert len(half.requests) == len(whole.requests) == 16
    assert {one.output_tokens for one in half.requests} == {32} and {one.output_tokens for one in whole.requests} == {
        64
    }
    assert all(25 <= len(one.prompt_ids) <= 275 for one in half.requests)
    assert [len(plan.requests[0].prompt_ids) for plan in (whole_single, half_single)] == [300, 150]
