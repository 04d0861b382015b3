"""What is counted in machine code, and the table of it in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import sass
from kernels.sass import main_loop, parsed, shortest_turn

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
LISTING = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R0] ;
        /*0020*/                   BRA.DIV UR4, `(.L_x_9) ;
        /*0030*/               @P2 BRA `(.L_x_2) ;
        /*0040*/                   LDGSTS.E.BYPASS.128.ZFILL [R9], desc[UR6][R2.64], P5 ;
.L_x_2:
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4.reuse, R12, R8 ;
        /*0060*/              @!P0 BRA `(.L_x_3) ;
        /*0070*/                   FMUL R8, R8, R3 ;
        /*0080*/                   FMUL R9, R9, R3 ;
.L_x_3:
        /*0090*/               @P1 BRA `(.L_x_1) ;
        /*00a0*/              @!P3 EXIT ;
        /*00b0*/                   STS.64 [R0], R8 ;
        /*00c0*/                   EXIT ;
.L_x_9:
        /*00d0*/                   BRA `(.L_x_2) ;
"""


def test_a_turn_does_all_its_loads_and_products_in_the_fewest_instructions() -> None:
    kernel = parsed(LISTING)
    assert main_loop(kernel) == (1, 9)
    turn = shortest_turn(kernel, *main_loop(kernel))
    opcodes = [one.opcode for one in turn]
    assert opcodes == ["LDSM", "BRA", "BRA", "LDGSTS", "HMMA", "BRA", "BRA"], (
        "the copy is gone through, the FMULs are not"
    )
    assert [one.shared_bytes for one in turn] == [512, 0, 0, 512, 0, 0, 0]


def test_a_kernel_without_a_loop_ends_where_it_always_ends() -> None:
    kernel = parsed(LISTING.replace("HMMA", "FFMA"))
    assert main_loop(kernel) == (0, 12)
    without = shortest_turn(kernel, *main_loop(kernel), without=("LDGSTS",))
    assert [one.opcode for one in without][:5] == ["S2R", "LDSM", "BRA", "BRA", "FFMA"]


def test_bounds_are_those_of_the_card() -> None:
    """By hand: 989.4 TFLOP/s are 132 multiprocessors at 4096 a cycle, so 1.83 GHz; a warp instruction a cycle, four."""
    assert pytest.approx(1.83e9, rel=1e-3) == sass.HERTZ
    found = sass.bounds(next(work for work in sass.works() if work.name == "attn_decode, KV bfloat16"))
    turns_a_second = 132 * 4 * sass.HERTZ / found.issued
    assert found.issue == pytest.approx(turns_a_second * 16 * 128 * 2 * 2 / 1e12)
    assert found.mix["HMMA"] == 2 * (128 // 16) * 2 and found.mix["LDGSTS"] == 16, "two products of 16 x 16 x 128"
    assert found.memory == 4.8 == found.least, "the memory is what binds decode"


@pytest.mark.slow
def test_the_docs_hold_the_table_of_todays_kernels() -> None:
    printed: list[str] = []
    sass.main([], printed.append)
    table = printed[-1]
    assert table in PAGE.read_text(), f"python -m kernels.sass, and put this into {PAGE.name}:\n{table}"


@pytest.mark.slow
def test_the_kernels_can_reach_their_targets() -> None:
    """Bounds of the target column, which a card may miss and no code can pass."""
    targets = {"attn_decode, KV bfloat16": 3.6, "attn_decode, KV float8_e4m3": 3.1, "attn_prefill, KV bfloat16": 330}
    found = {row.work.name: row.least for row in map(sass.bounds, sass.works())}
    assert all(found[name] > 1.25 * target for name, target in targets.items()), found
