"""The compile gate: kernels compile for every architecture, spill nothing, and stay under their register ceilings."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from kernels import build, instances, nvrtc
from kernels.cubins import Code, Cubins, architecture_for
from kernels.instances import ARCHITECTURES, Instance
from kernels.params import Params, layouts
from tests.kernels import register_ceilings

CEILINGS: dict[str, dict[str, int]] = json.loads(register_ceilings.PATH.read_text())
"""Registers by compiler version, then "sm_NN name"."""
REGISTERS = 65_536
"""Of a multiprocessor; a block's threads share them, in portions of 8 (CUDA C++ Programming Guide)."""
MOST_SPILLED_BYTES = 64
"""Of heads of 256; all others spill nothing."""


def check(wanted: Iterable[Instance], capability: int) -> None:
    """Compiles, and compares with the ceilings and the architecture's limits."""
    wanted, ceilings = list(wanted), CEILINGS[nvrtc.version()]
    threads = {instance.name: instance.threads for instance in wanted}
    for instance in wanted:
        assert instance.shared_bytes <= ARCHITECTURES[capability].most_shared_bytes, instance
    for source, names in register_ceilings.by_source(wanted).items():
        for name, found in build.compile_cubin(source, names, capability).resources.items():
            allowed = MOST_SPILLED_BYTES if ", 256, " in name else 0
            assert max(found.stack_bytes, found.spill_bytes) <= allowed, f"sm_{capability} {name} spills: {found}"
            assert -(-found.registers // 8) * 8 * threads[name] <= REGISTERS, (
                f"sm_{capability} {name} cannot be launched"
            )
            assert found.registers <= ceilings.get(f"sm_{capability} {name}", 255), f"sm_{capability} {name}: {found}"


def test_one_instance_of_each_kernel_has_a_ceiling() -> None:
    kernels = {"attn_decode", "attn_decode_reduce", "attn_prefill", "attn_reference", "cache_rope", "sampling"}
    for capability in (*register_ceilings.PART, register_ceilings.WHOLE):
        gated = list(register_ceilings.of_each_kernel(capability))
        assert {instance.name.partition("<")[0] for instance in gated} == kernels
        assert {f"sm_{capability} {instance.name}" for instance in gated} <= set(CEILINGS[nvrtc.version()])


@pytest.mark.parametrize("capability", register_ceilings.PART)
def test_one_instance_of_each_kernel_compiles_without_spills(capability: int) -> None:
    check(register_ceilings.of_each_kernel(capability), capability)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=[] if each == register_ceilings.WHOLE else pytest.mark.slow) for each in ARCHITECTURES],
)
def test_every_instance_compiles_without_spills(capability: int) -> None:
    check(instances.every_instance(ARCHITECTURES[capability]), capability)


def test_the_compilers_of_both_cuda_versions_know_every_architecture() -> None:
    for major in nvrtc.MAJORS:
        assert set(ARCHITECTURES) <= set(nvrtc.architectures(toolkit_of(major)))


def toolkit_of(major: int) -> nvrtc.Toolkit:
    """Both are in the extra dev."""
    found = nvrtc.installed(major)
    assert found is not None, f"NVRTC for CUDA {major} is not installed: make install"
    assert nvrtc.version(found).startswith(f"{major}.")
    return found


@pytest.mark.parametrize(
    "capability", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_one_instance_of_each_kernel_compiles_without_spills_by_cuda_13(capability: int) -> None:
    """With its own headers: what it would find of the other version is not on its path."""
    wanted = list(register_ceilings.of_each_kernel(capability))
    assert len(wanted) == 6
    for source, names in register_ceilings.by_source(wanted).items():
        made = build.compile_cubin(source, names, capability, toolkit_of(13))
        for name, found in made.resources.items():
            assert max(found.stack_bytes, found.spill_bytes) == 0, f"sm_{capability} {name} spills: {found}"


def fake_package(folder: Path, name: str) -> None:
    """A distribution of which nothing but its name is installed."""
    info = folder / f"{name.replace('-', '_')}-14.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")


@pytest.mark.parametrize("major", nvrtc.MAJORS)
def test_what_compiles_is_of_the_cuda_version_that_cupy_is_for(
    major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(tmp_path, f"cupy-cuda{major}x")
    monkeypatch.syspath_prepend(tmp_path)
    assert nvrtc.major() == nvrtc.toolkit().major == major
    assert nvrtc.headers() == toolkit_of(major).headers and nvrtc.version().startswith(f"{major}.")


def test_without_cupy_the_lowest_version_compiles_which_any_driver_runs() -> None:
    assert nvrtc.cupy_major() is None and nvrtc.major() == 12


def test_a_compiler_or_its_headers_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "cupy-cuda13x")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nvrtc, "folder", lambda module: tmp_path)  # packages without a library, without headers
    with pytest.raises(
        nvrtc.CompilerMissingError, match=r"CUDA 13 is not installed: pip install nvidia-cuda-nvrtc nvidia"
    ):
        nvrtc.toolkit()


def test_code_of_one_cuda_version_is_not_taken_from_the_cache_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins = Cubins(ARCHITECTURES[90], tmp_path / "none", tmp_path / "cache")
    kept = cubins.find(SMALL)
    monkeypatch.setattr(nvrtc, "major", lambda: 13)
    monkeypatch.setattr(nvrtc, "toolkit", lambda: toolkit_of(13))
    assert cubins.find(SMALL).cubin != kept.cubin
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_source_that_does_not_compile_fails_with_the_compilers_log() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"wrong\.cu.*identifier \"nonsense\" is undefined"):
        nvrtc.compile_source("__global__ void f() { nonsense(); }", "wrong.cu", ["f"], ["-arch=sm_90"])


def test_parameter_structs_are_laid_out_as_the_compiler_does(tmp_path: Path) -> None:
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in layouts()]
    for name, layout in layouts().items():
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in layout.fields]
    source = tmp_path / "offsets.cpp"
    source.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{build.SOURCES}/params.cuh"\nint main() {{{"".join(lines)}}}'
    )
    subprocess.run(["g++", source, "-o", tmp_path / "offsets"], check=True)
    printed = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True).stdout
    expected = dict(line.split() for line in printed.splitlines())
    for name, layout in layouts().items():
        assert layout.bytes == int(expected[name]), name
        for field, (_, offset) in layout.fields.items():
            assert offset == int(expected[f"{name}.{field}"]), f"{name}.{field}"


def test_parameters_are_set_by_name() -> None:
    params = Params("DecodeParams")
    params.set(out=2**48 + 7, block_stride=2**40, heads=-3, scale=0.5)
    assert [params.get(name) for name in ("out", "block_stride", "heads", "scale")] == [2**48 + 7, 2**40, -3, 0.5]
    assert params.get("cap") == 0
    assert params.by_value.shape == (1,) and params.by_value.itemsize == layouts()["DecodeParams"].bytes
    assert params.by_value.tobytes() == params.buffer.tobytes()  # the same memory
    with pytest.raises(KeyError, match="sacle"):
        params.set(sacle=1.0)


SMALL = instances.decode_reduce("float16", 64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build.write_architecture(ARCHITECTURES[90], [SMALL], folder)
    return folder


def test_code_that_was_built_ahead_of_time_is_found(built: Path, tmp_path: Path) -> None:
    code = Cubins(ARCHITECTURES[90], built, tmp_path).find(SMALL)
    assert code.cubin == (built / "attn_decode.sm_90.cubin").read_bytes()
    assert code.cubin.startswith(b"\x7fELF") and code.lowered.encode() + b"\0" in code.cubin
    assert not list(tmp_path.iterdir())


def test_code_that_was_not_built_is_compiled_once_and_kept(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "stale"
    shutil.copytree(built, stale)
    manifest = stale / "manifest.sm_90.json"
    manifest.write_text(manifest.read_text().replace(build.fingerprint(), "0" * 64))
    compiled: Code = Cubins(ARCHITECTURES[90], stale, tmp_path / "cache").find(SMALL)

    def no_compiler(*_: object) -> None:
        raise nvrtc.CompilerMissingError("nvidia.cuda_nvrtc is not installed")

    monkeypatch.setattr(build, "compile_cubin", no_compiler)
    assert Cubins(ARCHITECTURES[90], stale, tmp_path / "cache").find(SMALL) == compiled
    with pytest.raises(nvrtc.CompilerMissingError, match="run `make kernels`"):
        Cubins(ARCHITECTURES[90], stale, tmp_path / "other").find(SMALL)


@pytest.mark.parametrize(("capability", "expected"), [(80, 80), (87, 86), (89, 89), (90, 90), (103, 100), (121, 120)])
def test_a_device_runs_code_of_its_own_or_a_lower_capability(capability: int, expected: int) -> None:
    assert architecture_for(capability).capability == expected


@pytest.mark.parametrize("capability", [75, 110])
def test_a_device_without_kernels_is_refused_by_name(capability: int) -> None:
    with pytest.raises(ValueError, match=f"compute capability {capability}"):
        architecture_for(capability)
