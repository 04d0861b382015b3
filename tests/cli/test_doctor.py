"""`triptych doctor`: what it finds is what the services would find, and it reads no weight."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import compact, objects
from services.cli.doctor import cuda, machine
from services.cli.doctor.findings import Finding, Report, Section
from services.cli.main import main
from services.common import cuda_versions
from services.common.checkpoint import find
from services.executor import loader, memory
from services.executor.attention import selection
from services.executor.config import ExecutorConfig
from tests.support.checkpoints import tiny_llama
from tests.support.hub import ask_here, serving

HOST_CPUS = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("doctor") / "tiny-doctor")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def _examine(capsys: pytest.CaptureFixture[str], model: Path | str, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", "--port", "0", "--model", str(model), *arguments])
    told = capsys.readouterr()
    assert told.err == ""
    report = json.loads(told.out)
    assert report["servable"] == (not report["reasons"]) == (code == 0)
    return code, report


def _reason(capsys: pytest.CaptureFixture[str], model: Path | str, *arguments: str) -> str:
    """The one reason why the model cannot be served."""
    code, report = _examine(capsys, model, *arguments)
    assert code == 1
    (reason,) = report["reasons"]
    return str(reason)


def test_a_model_that_can_be_served_is_told_in_80_columns(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "0", "--model", str(tiny)]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "The model can be served here."
    for title in ("CPU", "Limits", "Packages", "CUDA", "Ports", "Model", "Attention"):
        assert title in lines
    text = " ".join(told.out.split())
    assert "KV 0.001 MB a token" in text
    assert "cpu-numba is used" in text
    assert f"{memory.compute_threads(None).count} threads, since " in text and "eager: the model's own code" in text
    bits = 12 if compact.IS_SERVED else 16
    assert f"weights of bfloat16 are held in {bits} bits each" in text
    assert f"outputs, vectors of {32 * objects.LANES} bits" in text


def _elements(file: Path) -> int:
    """Of all tensors, by the header: 8 bytes of its length, then JSON (the safetensors format)."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")


def test_the_memory_arithmetic_is_that_of_a_hand(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv_bytes = 10 * 16 * 512  # ten blocks of 16 tokens
    _, report = _examine(capsys, tiny, "--executor.kv-memory-bytes", str(kv_bytes))
    memory, pool = report["sections"]["Model"]["memory"], report["sections"]["Model"]["pool"]
    assert memory["weight_bytes"] == 4 * _elements(tiny / "model.safetensors")
    assert memory["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # K and V, 2 layers, 2 kv heads, head_dim 16, float32
    assert memory["kv_bytes"] == kv_bytes
    assert memory["fitting_tokens"] == 9 * 16  # block 0 holds nothing
    assert (pool["pool_tokens"], pool["context_tokens"]) == (144, 144)
    assert pool["level"] == "note"
    for kv_dtype, vector_bytes in (("bfloat16", 2 * 16), ("int8", 16 + 4)):
        _, report = _examine(capsys, tiny, "--scheduler.kv-dtype", kv_dtype)
        memory = report["sections"]["Model"]["memory"]
        assert (memory["kv_dtype"], memory["kv_bytes_per_token"]) == (kv_dtype, 2 * 2 * 2 * vector_bytes)
    assert "the context is lowered to 144 from 1024 tokens" in pool["text"]


def test_kv_gets_half_of_what_the_weights_leave_by_default(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = _examine(capsys, tiny)
    memory, pool = report["sections"]["Model"]["memory"], report["sections"]["Model"]["pool"]
    assert memory["kv_bytes"] == (memory["available_bytes"] - memory["weight_bytes"]) // 2
    assert pool["pool_tokens"] == 64 * 1024  # what 64 requests of 1,024 tokens can use, if that fits
    assert pool["context_tokens"] == 1024


def test_of_ranks_each_has_half_of_all_but_the_norms(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = _examine(capsys, tiny, "--tp", "2")
    memory, ranks = report["sections"]["Model"]["memory"], report["sections"]["Model"]["ranks"]
    whole = 5 * 64
    of_rank = 4 * (whole + (_elements(tiny / "model.safetensors") - whole) // 2)
    assert memory["rank_weight_bytes"] == [of_rank, of_rank] and memory["weight_bytes"] == 2 * of_rank
    assert memory["kv_bytes_per_token"] == 2 * 2 * 1 * 16 * 4  # 1 of 2 kv heads
    assert memory["kv_bytes"] == (memory["available_bytes"] - 2 * of_rank) // 2 // 2
    assert ranks["whole"] == [] and ranks["text"].startswith("2 processes hold ")
    assert "--tp-size 2" in _reason(capsys, tiny, "--tp", "2", "--scheduler.tp-size", "3")
    assert "cannot be divided over 64 ranks" in _reason(capsys, tiny, "--tp", "64")


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_as_the_loader_counts_them(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_llama(tmp_path / "m", tie_word_embeddings=tied, dtype="bfloat16", shards=2, lm_head=True)
    told: list[loader.Progress] = []
    loader.load(path, torch.float32, told.append)
    (total,) = {progress.total_bytes for progress in told if progress.stage == "weights"}
    _, report = _examine(capsys, path)
    assert report["sections"]["Model"]["memory"]["weight_bytes"] == total


def _enlarge(path: Path, vocab_size: int) -> int:
    """Makes the embedding and the head of a checkpoint as large as that, in a file without content; returns bytes."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    file = path / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, end = {}, 0
    for name, one in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            rows = vocab_size if name in ("model.embed_tokens.weight", "lm_head.weight") else one["shape"][0]
            shape = [rows, *one["shape"][1:]]
            begin, end = end, end + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
    return end


def test_a_model_too_large_is_refused_by_its_headers_alone(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = _enlarge(copy, 2**33)  # 4 TB of zeros that are on no disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reason = _reason(capsys, copy)
    assert f"the weights of copy take {size} bytes to be served in float32" in reason
    assert "raise the memory limit or serve a smaller model" in reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def _another_layer(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def _another_kind(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_another_kind, "executor: .*model_type 'bert'"),
        (_another_layer, r"executor: .*missing: model\.layers\.2\."),
        (lambda path: (path / "model.safetensors").unlink(), "executor: .*has neither model.safetensors nor"),
        (lambda path: (path / "model.safetensors").write_bytes(b"pickle"), "executor: cannot read"),
    ],
)
def test_what_the_executor_refuses_is_a_reason(
    spoil: Any, says: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(copy)
    reason = _reason(capsys, copy)
    assert re.search(says, reason), reason


def test_each_service_has_its_say(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "tokenizer.json").unlink()
    code, report = _examine(capsys, copy)
    assert code == 1
    assert [reason.partition(":")[0] for reason in report["reasons"]] == ["frontend", "scheduler", "executor"]
    assert "has no tokenizer.json" in report["reasons"][1]
    assert report["reasons"][2] == "executor: not examined, since the scheduler does not take the model"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scheduler.dtype", "float64"], "config: scheduler: dtype (from flag)"),
        (
            ["--scheduler.dtype", "bfloat16"],
            "executor: the executor refuses it: config.dtype BFLOAT16 is not served on",
        ),
        (["--executor.device", "gpu"], "config: executor: device (from flag)"),
        (["--executor.device", "cuda"], "executor: --device cuda: torch"),
        (["--executor.cuda-graph-sizes", "1,x"], "config: executor: cuda_graph_sizes (from flag)"),
        (["--executor.attention-backend", "none"], "choice: none, as --executor.attention-backend says"),
        (["--executor.threads", str(HOST_CPUS + 1)], f"executor: --threads is {HOST_CPUS + 1}, this process may run"),
        (["--executor.kv-memory-bytes", str(2**60)], f"executor: --kv-memory-bytes is {2**60}, but"),
        (["--executor.kv-memory-bytes", "9000"], "pool: the executor has 9000 bytes for KV, a block takes 8192"),
        (["--scheduler.max-model-len", "4096"], "scheduler: --max-model-len is 4096"),
        (["--scheduler.block-size", "0"], "config: scheduler: block_size"),
        (["--scheduler.executor", "h:1"], "config: scheduler.executor (from flag)"),
    ],
)
def test_an_option_that_up_would_fail_by_is_a_reason(
    arguments: Sequence[str], says: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = _examine(capsys, tiny, *arguments)
    assert report["reasons"][0].startswith(says), report["reasons"]


def test_a_model_that_is_not_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = _examine(capsys, "/no/such")
    assert report["reasons"][0].startswith("frontend: no model at '/no/such'")
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    _, report = _examine(capsys, "SmolLM2-135M-Instruct")
    assert "is not fetched yet" in report["reasons"][0]
    assert "`triptych model fetch` brings it" in report["reasons"][0]


def test_a_hubs_model_is_examined_in_the_cache_and_nothing_is_fetched(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as hub:
        ask_here(monkeypatch, hub, tmp_path / "cache")
        hub.repo("org/tiny").add(tiny)
        _, report = _examine(capsys, "org/tiny")
        assert "`triptych model fetch org/tiny`" in report["reasons"][0] and hub.asked == []
        find("org/tiny", weights=True)
        hub.asked.clear()
        code, report = _examine(capsys, "org/tiny", "--revision", "main")
        assert (code, report["reasons"], hub.asked) == (0, [], [])


def test_a_port_in_use_is_a_reason_where_up_needs_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "Address already in use; choose another with --port" in _reason(capsys, tiny, "--port", port)
        reason = _reason(capsys, tiny, "--scheduler.port", port)
        assert f"the scheduler cannot listen on 127.0.0.1:{port}" in reason


def test_an_inner_port_in_use_is_only_a_note_where_up_chooses(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(ExecutorConfig.model_fields["port"], "default", taken.getsockname()[1])
        ExecutorConfig.model_rebuild(force=True)
        code, report = _examine(capsys, tiny)
    monkeypatch.undo()
    ExecutorConfig.model_rebuild(force=True)
    assert code == 0
    found = report["sections"]["Ports"]["executor"]
    assert (found["level"], found["free"]) == ("note", False)
    assert "`triptych up` takes a free one" in found["text"]


class _Refusing:
    name = "picky"

    def refusals(self, needs: Any) -> list[str]:
        return [f"no heads of {needs.head_dim}"]


def test_attention_backends_are_told_with_their_reasons(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selection, "BACKENDS", (_Refusing(), *selection.BACKENDS))
    _, report = _examine(capsys, tiny)
    found = report["sections"]["Attention"]
    assert found["picky"]["text"] == "cannot serve this model: no heads of 16"
    assert found["picky"]["level"] == "note"
    assert found["cpu-numba"]["text"] == "is used"
    monkeypatch.setattr(selection, "BACKENDS", (_Refusing(),))
    assert _reason(capsys, tiny) == "picky: cannot serve this model: no heads of 16"


def test_extras_that_are_not_installed_are_told_and_the_rest_examined(tiny: Path) -> None:
    arguments = ["doctor", "--json", "--port", "0", "--model", str(tiny)]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['tokenizers'] = None; "
        f"from services.cli.main import main; sys.exit(main({arguments}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1, ended.stderr
    report = json.loads(ended.stdout)
    assert report["reasons"] == [
        "frontend: the frontend needs its extra: pip install 'triptych[frontend]' (tokenizers is not installed)",
        "executor: the executor needs its extra: pip install 'triptych[executor]' (torch is not installed)",
    ]
    assert report["sections"]["Model"]["scheduler"]["level"] == "ok"
    assert report["sections"]["CUDA"]["torch"]["text"].startswith("cannot be imported")


def test_a_package_that_an_extra_names_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['here; extra == "executor"', "not-there>=2; extra == 'executor'", 'other; extra == "dev"', "always"]
    monkeypatch.setattr(machine, "requires", lambda _: lines)
    real = machine.version
    monkeypatch.setattr(machine, "version", lambda name: "1.0" if name == "here" else real(name))
    found = {one.name: one for one in machine.packages().findings}
    assert found["executor"].level == "fault"
    assert found["executor"].text == "not-there not installed; pip install 'triptych[executor]'"


@pytest.mark.parametrize(
    ("built", "cupy", "driver", "says"),
    [
        (None, [], None, []),
        (12, [12], 12, []),
        (12, [12], 13, []),
        (12, [], 12, []),
        (13, [], 12, ["torch is built for CUDA 13, the driver serves up to 12; update the driver"]),
        (12, [13], 13, ["torch is built for CUDA 12, CuPy for 13; install cupy-cuda12x in its place"]),
        (None, [13], 12, ["CuPy is built for CUDA 13", "torch is built without CUDA"]),
        (12, [12, 13], 13, ["CuPy is installed for CUDA 12 and 13", "CuPy for 13"]),
        (12, [12], None, []),
    ],
)
def test_cuda_versions_that_do_not_go_together(
    built: int | None, cupy: list[int], driver: int | None, says: list[str]
) -> None:
    found = cuda_versions.misfits(built, cupy, driver)
    assert len(found) == len(says)
    assert all(part in line for part, line in zip(says, found, strict=True))


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build", "560.35.03"),
    ],
)
def test_the_driver_is_asked_without_starting_a_device(
    line: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:  # of a device that this machine has not
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, into: Any) -> int:
            into._obj.value = 12040
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    file = tmp_path / "version"
    file.write_text(line + "\n")
    assert cuda_versions.find_driver(file=file) == cuda_versions.Driver(version, (12, 4))
    assert cuda_versions.find_driver(file=tmp_path / "none") == cuda_versions.Driver(None, (12, 4))


def test_no_driver_is_said_plainly() -> None:
    assert cuda_versions.find_driver("libno-such-driver.so") is None
    assert cuda._driver_finding(None).text == "no NVIDIA driver"


_X86 = "processor\t: 0\nmodel name\t: Made Up 9000\nflags\t\t: fpu sse avx avx2 fma f16c avx512f avx512_vnni\n\n"
_ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp sve\n\n"


@pytest.mark.parametrize(
    ("text", "kind", "model", "features"),
    [
        (_X86 * 2, "x86_64", "Made Up 9000, x86_64", "AVX2, FMA, F16C, AVX-512, AVX-512 VNNI; not AVX-512 BF16, AMX"),
        (_ARM, "aarch64", "unnamed, aarch64", "NEON, DOT, SVE; not FP16, BF16, I8MM"),
        (_X86, "riscv64", "Made Up 9000, riscv64", "none that is known here"),
    ],
)
def test_cpu_features_are_the_kernels(text: str, kind: str, model: str, features: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    found = machine.cpu(tmp_path / "cpuinfo", kind).findings
    assert [one.text for one in found] == [model, features]


@pytest.mark.parametrize(("left", "level"), [(None, "ok"), (52, "ok"), (51, "fault")])
def test_too_few_threads_for_the_processes_are_a_reason(left: int | None, level: str) -> None:
    assert machine.threads_needed(cpus=2, compute_threads=2) == 52
    assert machine._threads(left, 52).level == level


def test_reasons_come_last_and_long_words_are_broken() -> None:
    report = Report((Section("One", (Finding("here", "x" * 200, "fault"), Finding("there", "fine"))),))
    lines = report.as_text().splitlines()
    assert max(map(len, lines)) == 80
    assert "The model cannot be served here:" in lines
    assert lines[1].startswith("  FAULT here   xxx")
