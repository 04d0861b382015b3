"""Bounds on the kernels' speed, counted from their machine code: what an H200's issue slots, tensor cores and shared
memory allow, beside the targets. Needs NVRTC and nvdisasm, not a GPU.

python -m kernels.sass [--markdown]

A kernel's main loop is the one with most tensor-core instructions (or the whole kernel, where it has no loop). Of the
ways through its body the one is counted that does all of its loads, copies and products in the fewest instructions: no
soft cap, no mask, no new largest score. An instruction whose predicate is false is issued all the same.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels import build, instances, nvrtc
from kernels.instances import ARCHITECTURES, FP8, Instance

# An H200, from its data sheet (989.4 TFLOP/s dense bfloat16, 4.8 TB/s) and the CUDA C++ Programming Guide (four
# schedulers a multiprocessor that issue one warp instruction a cycle each, 128 bytes of shared memory a cycle).
MULTIPROCESSORS, SCHEDULERS, SHARED_BYTES_A_CYCLE = 132, 4, 128
TENSOR_FLOP_A_CYCLE = 4096
"""Of a multiprocessor."""
FLOPS, BYTES_PER_S = 989.4e12, 4.8e12
HERTZ = FLOPS / (MULTIPROCESSORS * TENSOR_FLOP_A_CYCLE)
MMA_SHARE = 0.63
"""Of the tensor cores' peak, which mma reaches on this architecture (wgmma reaches it all): Luo et al. 2024,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture"."""
MMA_FLOP = 2 * 16 * 8 * 16
FLOAT64_A_CYCLE = 64
"""Results of a multiprocessor, at compute capability 9.0 (CUDA C++ Programming Guide, "Arithmetic Instructions")."""

_FLOAT64 = ("DFMA", "DMUL", "DADD", "DSETP")
_NEEDED = ("HMMA", "LDGSTS", "LDSM", "LDG", "STG", "LDS", "STS", *_FLOAT64)
_LINE = re.compile(r"\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<text>[^;]+?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class DisassemblerMissingError(RuntimeError):
    """nvdisasm is not installed."""


@dataclass(frozen=True)
class Instruction:
    """One of a kernel's."""

    text: str
    conditional: bool
    target: int | None = None
    """Index of the instruction it may go on to."""

    @property
    def opcode(self) -> str:
        """Without its modifiers."""
        return self.text.split()[0].partition(".")[0]

    @property
    def shared_bytes(self) -> int:
        """That a warp moves to or from shared memory."""
        wide = {"LDSM": 512, "LDGSTS": 512, "LDS": 128, "STS": 128}.get(self.opcode, 0)
        if self.opcode in ("LDS", "STS"):
            wide *= 4 if ".128" in self.text else 2 if ".64" in self.text else 1
        return wide


def nvdisasm() -> Path:
    """The program. Raises DisassemblerMissingError."""
    packaged = nvrtc.folder("nvidia.cu13")
    if packaged is not None and (packaged / "bin" / "nvdisasm").exists():
        return packaged / "bin" / "nvdisasm"
    if found := shutil.which("nvdisasm"):
        return Path(found)
    raise DisassemblerMissingError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm (the extra dev has it)")


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin that holds one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True)
    return parsed(done.stdout)


def parsed(listing: str) -> list[Instruction]:
    """Of nvdisasm's text."""
    found: list[tuple[str, bool]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _LINE.match(line):
            found.append((match["text"], match["predicate"] is not None))
    instructions = []
    for text, conditional in found:
        target = _TARGET.search(text) if text.startswith("BRA") else None
        two_conditions = bool(re.search(r"\bBRA(\.\w+)* !?U?P", text)) or ".DIV" in text
        instructions.append(Instruction(text, conditional or two_conditions, labels[target[1]] if target else None))
    return instructions


def main_loop(kernel: Sequence[Instruction]) -> tuple[int, int]:
    """First and last instruction of the innermost loop with most products, of matrices or of float64.

    Without one, of the kernel up to its first EXIT that is always taken.
    """
    loops = [(to, at) for at, one in enumerate(kernel) if (to := one.target) is not None and to < at]

    def products(loop: tuple[int, int]) -> int:
        return sum(one.opcode in ("HMMA", "DFMA") for one in kernel[loop[0] : loop[1] + 1])

    working = [loop for loop in loops if products(loop)]
    innermost = [a for a in working if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in working)]
    if innermost:
        return max(innermost, key=products)
    last = next(at for at, one in enumerate(kernel) if one.opcode == "EXIT" and not one.conditional)
    return 0, last


def shortest_turn(
    kernel: Sequence[Instruction], first: int, last: int, without: Sequence[str] = ()
) -> list[Instruction]:
    """Of the ways from `first` to `last`, the one with most needed instructions, and of those with the fewest others.

    Loops within are gone through once; `without` names instructions that are not met.
    """
    best: dict[int, tuple[int, int]] = {last: _worth(kernel[last])}
    after: dict[int, int] = {}
    for at in range(last - 1, first - 1, -1):
        one = kernel[at]
        ways = [at + 1] if one.conditional or (one.target is None and one.opcode != "EXIT") else []
        if one.target is not None and at < one.target <= last:
            ways.append(one.target)
        open_ways = [way for way in ways if way in best]
        if not open_ways or one.opcode in without:
            continue
        after[at] = max(open_ways, key=lambda way: best[way])
        needed, others = best[after[at]]
        own = _worth(one)
        best[at] = needed + own[0], others + own[1]
    turn, at = [kernel[first]], first
    while at != last:
        at = after[at]
        turn.append(kernel[at])
    return turn


def _worth(one: Instruction) -> tuple[int, int]:
    return (1, 0) if one.opcode in _NEEDED else (0, -1)


@dataclass(frozen=True)
class Work:
    """What a warp does in one turn of a kernel's main loop."""

    name: str
    instance: Instance
    moved_bytes: int = 0
    """To or from memory."""
    flop: int = 0
    target: str = ""
    without: tuple[str, ...] = ()
    """Instructions of parts that are not gone through."""


@dataclass(frozen=True)
class Bounds:
    """Of a kernel, in TB/s of memory traffic or in TFLOP/s."""

    work: Work
    issued: int
    mix: Counter[str]
    shared_bytes: int
    issue: float
    arithmetic: float | None
    """Of tensor cores, or of float64."""
    shared: float | None
    memory: float | None
    """What memory allows, in the same unit."""

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.work.flop else "TB/s"

    @property
    def least(self) -> float:
        """The bound that binds."""
        return min(bound for bound in (self.issue, self.arithmetic, self.shared, self.memory) if bound is not None)


def bounds(work: Work) -> Bounds:
    """Compiles for sm_90, disassembles and counts."""
    made = build.compile_cubin(work.instance.source, [work.instance.name], 90)
    kernel = disassemble(made.code)
    turn = shortest_turn(kernel, *main_loop(kernel), work.without)
    mix = Counter(one.opcode for one in turn)
    shared = sum(one.shared_bytes for one in turn)
    amount = (work.flop or work.moved_bytes) / 1e12
    a_second = MULTIPROCESSORS * HERTZ * amount  # of turns, one a cycle on every multiprocessor
    arithmetic_cycles = mix["HMMA"] * MMA_FLOP / (TENSOR_FLOP_A_CYCLE * MMA_SHARE)
    arithmetic_cycles += sum(mix[opcode] for opcode in _FLOAT64) * 32 / FLOAT64_A_CYCLE
    return Bounds(
        work,
        len(turn),
        mix,
        shared,
        issue=a_second * SCHEDULERS / len(turn),
        arithmetic=a_second / arithmetic_cycles if arithmetic_cycles else None,
        shared=a_second * SHARED_BYTES_A_CYCLE / shared if shared else None,
        memory=None if work.flop else BYTES_PER_S / 1e12,
    )


def works() -> Iterator[Work]:
    """The instances of the targets: heads of 128 in bfloat16."""
    h200, wide = ARCHITECTURES[90], 128
    for kv_dtype, item, target in (("bfloat16", 2, "3.6 TB/s (295 us)"), (FP8, 1, "3.1 TB/s (1.7 x bfloat16)")):
        decode = instances.decode(h200, "bfloat16", kv_dtype, wide)
        yield Work(f"attn_decode, KV {kv_dtype}", decode, moved_bytes=16 * wide * 2 * item, target=target)
    for kv_dtype, target in (("bfloat16", "330 TFLOP/s"), (FP8, "")):
        prefill = instances.prefill(h200, "bfloat16", kv_dtype, wide)
        keys, rows = int(prefill.name.split(", ")[3]), instances.prefill_rows(wide) // 4
        yield Work(f"attn_prefill, KV {kv_dtype}", prefill, flop=4 * rows * keys * wide, target=target)
    rope = instances.cache_rope("bfloat16", "bfloat16", wide)
    yield Work("cache_rope, angles from tables", rope, moved_bytes=2 * 2 * wide * 2, without=("SHFL", "FRND"))
    sampling = instances.sampling("bfloat16")
    yield Work("sampling, a pass that weighs all ids", sampling, moved_bytes=4 * 32 * 2)


HEADER = ("kernel", "instructions a turn", "of them", "issue", "mma or float64", "shared memory", "memory", "target")


def cells(found: Bounds) -> tuple[str, ...]:
    """A line of the table."""
    shown = ("HMMA", "DFMA", "LDSM", "LDGSTS", "MUFU", "SHFL")
    parts = ", ".join(f"{found.mix[opcode]} {opcode}" for opcode in shown if found.mix[opcode])
    numbers = []
    for value in (found.issue, found.arithmetic, found.shared, found.memory):
        text = "-" if value is None else f"{value:.1f}" if value < 20 else f"{value:.0f}"
        numbers.append(f"**{text} {found.unit}**" if value == found.least else text)
    return (found.work.name, str(found.issued), parts, *numbers, found.work.target or "-")


def markdown(rows: Sequence[Bounds]) -> str:
    """The table of docs/kernels.md."""
    lines = [HEADER, tuple("---" for _ in HEADER), *(cells(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = sys.stdout.write) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m kernels.sass", description=(__doc__ or "").splitlines()[0])
    parser.parse_args(arguments)
    write(f"NVRTC {nvrtc.version()}, sm_90; an H200 at {HERTZ / 1e9:.2f} GHz. The bound that binds is in bold.\n\n")
    write(markdown([bounds(work) for work in works()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
