"""Machine code beside numba's: the same bits at every width of vectors, kept, and never run damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding as llvm

from kernels.cpu import linear, objects, paged_attention, tile

SEVEN = 'define i64 @triptych_test_seven() "target-cpu"="generic" { ret i64 7 }'

NARROW = """
import sys
import numpy as np
import kernels.cpu
from kernels.cpu import linear, objects, tile
assert objects.LANES == 8 and max(tile.PANELS_BESIDE[6:]) == 1, (objects.LANES, tile.PANELS_BESIDE)
rng = np.random.default_rng(0)
weights = linear.pack((rng.standard_normal((100, 400), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16))
for rows in (1, 2, 3, 6, 16, 40):
    out = np.empty((rows, 100), np.float32)
    linear.multiply(rng.standard_normal((rows, 400), dtype=np.float32), weights, None, out, 1)
    sys.stdout.buffer.write(out.tobytes())
"""


def products() -> bytes:
    rng = np.random.default_rng(0)
    weights = linear.pack((rng.standard_normal((100, 400), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16))
    found = b""
    for rows in (1, 2, 3, 6, 16, 40):
        out = np.empty((rows, 100), np.float32)
        x = rng.standard_normal((rows, 400), dtype=np.float32)
        linear.multiply(x, weights, None, out, paged_attention.get_num_threads())
        found += out.tobytes()
    return found


@pytest.mark.skipif(objects.LANES != 16, reason="this machine has no wider vectors to leave out")
def test_a_machine_with_narrower_vectors_computes_the_same_bits() -> None:
    narrow = ",".join("-" + one[1:] if one[1:].startswith("avx512") else one for one in objects.FEATURES.split(","))
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": narrow}
    run = subprocess.run([sys.executable, "-c", NARROW], env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout == products()


def test_registers_hold_the_sums_of_a_tile_its_weights_and_an_input() -> None:
    """By hand: 6 rows of 4 panels are 24 sums, 4 weights and an input, 29 of AVX-512's 32 registers; 6 rows of one are
    12, 2 and 1 of AVX2's 16."""
    by_lanes = {16: (0, 4, 4, 4, 4, 4, 4), 8: (0, 3, 2, 1, 1, 1, 1)}
    assert objects.LANES not in by_lanes or by_lanes[objects.LANES] == tile.PANELS_BESIDE


def kept(folder: Path) -> Path:
    (file,) = folder.glob("seven-*.o")
    return file


def test_code_is_compiled_once_and_compiled_anew_when_what_was_kept_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a" / "b"))
    compiled: list[str] = []
    compile_it = objects._compiled

    def counting(text: str, machine: object) -> bytes:
        compiled.append(text)
        return compile_it(text, machine)

    monkeypatch.setattr(objects, "_compiled", counting)
    objects.provide("seven", lambda: SEVEN, ["triptych_test_seven"])
    objects.provide("seven", lambda: SEVEN, ["triptych_test_seven"])
    assert len(compiled) == 1 and llvm.address_of_symbol("triptych_test_seven")
    file = kept(tmp_path / "a" / "b")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    objects.provide("seven", lambda: SEVEN, ["triptych_test_seven"])
    assert len(compiled) == 2 and file.read_bytes() == whole


def test_code_is_made_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    objects.provide("seven", lambda: SEVEN, ["triptych_test_seven"])
    assert llvm.address_of_symbol("triptych_test_seven")
