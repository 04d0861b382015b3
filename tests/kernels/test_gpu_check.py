"""The check on a card, run without one: what the shim can do of it, and how it tells what is wrong."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels import build, instances, nvrtc
from kernels.instances import ARCHITECTURES
from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check import checks, roofline
from tests.gpu_check.card import Card
from tests.kernels.cuda_calls import decode
from tests.kernels.hostshim.hostshim import Fault, HostDevice
from tests.kernels.paged import batch
from tests.kernels.test_cuda_build import fake_package


@pytest.mark.timeout(300)
def test_a_dry_run_finds_nothing_wrong_and_says_what_it_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    stages = ["wrappers", "cases", "graphs", "roofline", "sanitizer"]
    assert gpu_check.main(["--dry", "--only", *stages, "--json", str(record)]) == 0
    printed = capsys.readouterr().out
    assert "skipped a replayed step equals the eager one: a CPU captures no CUDA graph" in printed
    assert "skipped compute-sanitizer racecheck: it watches a card" in printed
    outcomes = json.loads(record.read_text())["outcomes"]
    passed = {stage: sum(one["passed"] is True for one in outcomes if one["stage"] == stage) for stage in stages}
    assert passed == {"wrappers": 12, "cases": 15, "graphs": 1, "roofline": 0, "sanitizer": 0}
    kernels = {instance.name.partition("<")[0] for instance in instances.every_instance(ARCHITECTURES[90])}
    checked = {one["name"].partition(",")[0] for one in outcomes if one["stage"] == "cases"}
    probed = {kernel for kernel in kernels if kernel.startswith("probe")}
    assert kernels - probed - {"attn_decode_reduce"} <= checked, "a kernel has no case"  # decode runs its reduce


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dry_run_serves_a_model_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry", "--only", "engine"]) == 0
    assert "ok      random Llama of 4 layers, float32: 6 prompts twice" in capsys.readouterr().out


WINDOW = "p.window > 0 ? max(0, context - p.window)"
FAULTS = [
    ("wrappers", Fault("probes.cu", "fast_exp2(a[i])", "fast_exp2(a[i] * 1.0001f)"), "FAILED  ex2.approx"),
    ("cases", Fault("attn_decode.cu", WINDOW, "max(0, context - 63)"), "FAILED  attn_decode, float16"),
    ("graphs", Fault("sampling.cu", "if (how.kind == IDLE) return;", ""), "padding was drawn"),
]


@pytest.mark.parametrize(
    ("stage", "fault", "told"), [FAULTS[0], *(pytest.param(*f, marks=pytest.mark.slow) for f in FAULTS[1:])]
)
def test_what_is_wrong_is_told_and_ends_in_status_1(
    stage: str, fault: Fault, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "HostDevice", partial(HostDevice, fault=fault))
    monkeypatch.setattr("tests.gpu_check.cases.SHIM_KEYS", ("float16 float16 64",))
    assert gpu_check.main(["--dry", "--only", stage]) == 1
    printed = capsys.readouterr().out
    assert told in printed and "something is WRONG" in printed


def test_probes_compile_with_the_headers_of_cuda_13_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_package(tmp_path, "cupy-cuda13x")
    monkeypatch.syspath_prepend(tmp_path)
    assert nvrtc.headers().parent.name == "cu13"
    assert gpu_check.main(["--dry", "--only", "wrappers"]) == 0
    assert capsys.readouterr().out.count("  ok ") == 12


def test_what_the_services_need_and_is_not_there_is_named_and_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tests.support.checkpoints", None)
    monkeypatch.setitem(sys.modules, "tests.executor.shim_device", None)
    assert gpu_check.main(["--dry", "--only", "engine"]) == 0
    assert "skipped random Llama of 4 layers, float32: tests.support.checkpoints is not installed here" in (
        capsys.readouterr().out
    )


def test_no_check_begins_when_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry", "--only", "wrappers", "--budget-s", "0"]) == 0
    assert capsys.readouterr().out.count("the time is up") == 12


def test_without_a_card_it_says_what_is_missing_and_ends_in_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "install the extra executor-cuda" in capsys.readouterr().err


def test_cubins_that_are_missing_stale_or_incomplete_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gpu_check.NothingToCheckError, match=r"manifest\.sm_90\.json is missing: run `make kernels`"):
        gpu_check.compiler_of(tmp_path, 90)
    manifest = build.write_architecture(ARCHITECTURES[90], [instances.decode_reduce("float16", 64)], tmp_path)
    with pytest.raises(gpu_check.NothingToCheckError, match=r"lacks .* more: run `make kernels` again"):
        gpu_check.compiler_of(tmp_path, 90)
    manifest.write_text(manifest.read_text().replace(build.fingerprint(), "0" * 64))
    with pytest.raises(gpu_check.NothingToCheckError, match="of other kernel sources"):
        gpu_check.compiler_of(tmp_path, 90)


def a_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], driver: int) -> None:
    """What torch and CuPy say where there is one."""
    facts = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    runtime = SimpleNamespace(driverGetVersion=lambda: driver)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


@pytest.mark.parametrize(
    ("capability", "driver", "nvrtc_version", "told"),
    [
        ((9, 0), 13010, "13.0", None),
        ((9, 0), 13010, "12.9", None),
        ((9, 0), 12080, "13.0", "the cubins are CUDA 13.0's, the driver runs CUDA 12's and older"),
        ((7, 5), 13010, "12.9", "no kernels for compute capability 75"),
    ],
)
def test_a_card_and_what_drives_it_are_named_or_refused(
    capability: tuple[int, int], driver: int, nvrtc_version: str, told: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    a_card(monkeypatch, capability, driver)
    kernels = [{"name": instance.name} for instance in instances.every_instance(ARCHITECTURES[90])]
    manifest = {"sources": build.fingerprint(), "nvrtc": nvrtc_version, "kernels": kernels}
    (tmp_path / "manifest.sm_90.json").write_text(json.dumps(manifest))
    status = gpu_check.main(["--cubins", str(tmp_path), "--only", "wrappers", "--budget-s", "0"])
    printed = capsys.readouterr()
    if told:
        assert status == 2 and told in printed.err
    else:
        assert status == 0 and "NVIDIA H200, 132 multiprocessors, 141 GiB, compute capability 9.0" in printed.out
        assert f"driver for CUDA 13.1; torch {torch.__version__}" in printed.out
        assert f"cubins by NVRTC {nvrtc_version} for sm_90" in printed.out


def test_a_card_computes_on_copies_and_carries_back_what_was_written() -> None:
    given = batch([(33, 1), (70, 1)])
    card, before = Card(HostDevice(), "cpu"), given.keys.copy()
    right = decode(HostDevice(), given, splits=2)
    assert np.array_equal(decode(card, given, splits=2), right)  # type: ignore[arg-type]
    assert given.keys.tobytes() == before.tobytes()


def test_the_tables_columns_are_bound_target_measured_and_share() -> None:
    assert roofline.Measured("x", 224.0, 295.0, 280.0).cells() == ("x", "224.0", "295.0", "280.0", "80%")
    assert roofline.Measured("x", None, None, 280.0).cells() == ("x", "-", "-", "280.0", "-")
