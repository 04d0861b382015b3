"""The tests of cache_rope and sampling see faults: each of these is planted into the source, and must be caught.

Beside each stands what catches it: the numbers, the order of threads, or a sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels.sampling import Row
from tests.kernels import cache_rope, sampling
from tests.kernels.cache_rope import Shape
from tests.kernels.faults_page import confirm
from tests.kernels.hostshim.hostshim import Fault, HostDevice, ShimError
from tests.kernels.sampling import check, mixed_logits, mixed_rows
from tests.kernels.test_cache_rope_cuda import check_far_offsets
from tests.kernels.test_sampling_cuda import check_neighbouring_floats, check_weights

pytestmark = pytest.mark.slow

Layer = Callable[[Fault], None]

PHI = Shape("float16", head_dim=80, heads=3, kv_heads=1, rotary_dim=32, norms=True, norm_offset=1.0)
FLOAT32 = Shape("float32", norms=True, from_frequencies=True, block_tokens=5)
FP8 = Shape("bfloat16", "float8_e4m3", head_dim=128)


def rope_numbers(shape: Shape, sanitizer: str | None = None, **batch: object) -> Layer:
    def run(fault: Fault) -> None:
        made = cache_rope.batch(shape, tokens=7, skipped=(2,), **batch)  # type: ignore[arg-type]
        cache_rope.check(made, cache_rope.run(HostDevice(fault=fault, sanitizer=sanitizer), made))

    return run


def rope_orders(fault: Fault) -> None:
    made = cache_rope.batch(PHI, tokens=7)
    for order in ("forward", "reverse", "random"):
        cache_rope.check(made, cache_rope.run(HostDevice(fault=fault, order=order), made))


ROPE: dict[str, tuple[str, str, Layer]] = {
    "turned the other way": ("low ? -across : across", "low ? across : -across", rope_numbers(PHI)),
    "the partner is itself": ("(low ? pair + half : pair)", "pair", rope_numbers(PHI)),
    "what is past rotary_dim is turned": ("if (first >= p.rotary_dim) continue;", "", rope_numbers(PHI)),
    "no barrier after staging": ("  __syncwarp();\n", "", rope_orders),
    "no barrier, seen as a race": ("  __syncwarp();\n", "", rope_numbers(PHI, "thread")),
    "two heads stage in one place": ("+ group_of_block * HEAD_DIM", "+ warp * HEAD_DIM", rope_numbers(PHI)),
    "a norm over half a head": ("other = D::LANES / 2", "other = D::LANES / 4", rope_numbers(PHI)),
    "a norm of weights around 0": ("gain[r][i] + p.norm_offset", "gain[r][i]", rope_numbers(PHI)),
    "keys normed with the queries' weights": (
        "head.part == KEY ? p.key_norm : nullptr",
        "head.part == KEY ? p.query_norm : nullptr",
        rope_numbers(PHI),
    ),
    "values are normed": ("head.part == KEY ? p.key_norm : nullptr", "p.key_norm", rope_numbers(PHI)),
    "read past a head's end": (
        "wanted && (D::CHUNKS % D::LANES == 0 || chunk < D::CHUNKS)",
        "wanted",
        rope_numbers(PHI, "address"),
    ),
    "heads past the last are done": (
        "wanted = head < p.heads + 2 * p.kv_heads && place >= 0;",
        "wanted = place >= 0;",
        rope_numbers(PHI, "address"),
    ),
    "negative places are written": (" && place >= 0;", ";", rope_numbers(PHI, "address")),
    "a block of 16 tokens is assumed": ("place % p.block_tokens", "place % 16", rope_numbers(FLOAT32)),
    "sines in the wrong quarter": ("sin = quarter & 2", "sin = (quarter + 1) & 2", rope_numbers(FLOAT32)),
    "pi/2 in one part": (
        "fmaf(-quarters, -4.37113883e-8f, fmaf(-quarters, 1.57079637f, angle))",
        "fmaf(-quarters, 1.57079637f, angle)",
        rope_numbers(FLOAT32, positions=[100_000] * 7),
    ),
    "fp8 scales the wrong way": ("1.f / scales[head.number]", "scales[head.number]", rope_numbers(FP8)),
    "every head has the first one's scale": ("1.f / scales[head.number]", "1.f / scales[0]", rope_numbers(FP8)),
    "blocks at 32-bit offsets": (
        "block * p.block_stride",
        "block * static_cast<u32>(p.block_stride)",
        lambda fault: check_far_offsets(HostDevice(fault=fault)),
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_faults_in_cache_rope_are_caught(name: str) -> None:
    old, new, layer = ROPE[name]
    confirm("cache_rope.cu", name, caught(Fault("cache_rope.cu", old, new), layer))


def draws(fault: Fault) -> None:
    """Filters, ids, masks and failures of mixed rows."""
    device = HostDevice(fault=fault)
    logits, rows = mixed_logits(60, 1009), mixed_rows(60, 1009)
    masks = np.random.default_rng(4).random((1, 1009)) < 0.5
    masks[:, 0] = True
    rows[::5] = [Row(1.0, top_k=40, top_p=0.9, mask_row=0, seed=i) for i in range(12)]
    check(logits, rows, sampling.draw(device, logits, rows, masks=masks), masks)
    logits[0, 1008] = np.nan
    assert sampling.draw(device, logits[:1], [Row(1.0)]).failed[0]


def ties(fault: Fault) -> None:
    logits = np.zeros((2, 700), np.float32)
    logits[:, ::3] = -0.0
    rows = [Row(1.0, top_k=20), Row(1.0, top_p=10.5 / 700)]
    kept = sampling.draw(HostDevice(fault=fault), logits, rows).kept
    assert [np.flatnonzero(row).tolist() for row in kept] == [list(range(20)), list(range(11))]


def thread_orders(fault: Fault) -> None:
    for order in ("forward", "reverse", "random"):
        logits, rows = mixed_logits(12, 1009), mixed_rows(12, 1009)
        check(logits, rows, sampling.draw(HostDevice(fault=fault, order=order), logits, rows))


def races(fault: Fault) -> None:
    logits, rows = mixed_logits(1, 300), [Row(1.0, top_k=100, top_p=0.9)]
    sampling.draw(HostDevice(fault=fault, sanitizer="thread"), logits, rows)


def neighbours(fault: Fault) -> None:
    check_neighbouring_floats(HostDevice(fault=fault))


def weights(fault: Fault) -> None:
    check_weights(HostDevice(fault=fault))


SAMPLING: dict[str, tuple[str, str, Layer]] = {
    "among equals the higher id": ("other_id <= id", "other_id >= id", ties),
    "-0 below +0": ("score == 0 ? 0.f : score", "score", ties),
    "one id less of equals": ("(goal - bracket.above + size - 1) / size", "(goal - bracket.above) / size", ties),
    "half of the numbers": ("<< 37 |", "<< 36 |", draws),
    "another generator": ("key0 += 0x9E3779B9u", "key0 += 0x9E3779B1u", draws),
    "positions of 32 bits": ("static_cast<u32>(position >> 32)", "0", draws),
    "NaN is drawn from": ("!(logit <= -LOWEST)", "logit > -LOWEST", draws),
    "the mask is a bit off": ("(mask[id / 32] >> (id % 32) & 1)", "(mask[id / 32] >> (id % 31) & 1)", draws),
    "top-p of what top-k cut off too": ("if (cut.keeps(key, id)) left[0]", "left[0]", draws),
    "min-p leaves out its own border": ("row.log2_share(score) >= how", "row.log2_share(score) > how", draws),
    "another curve": ("0.055504108664821576", "0.055504108", weights),
    "unlikely ids weigh nothing": ("-WEIGHT_BITS - 2", "-WEIGHT_BITS / 6", draws),
    "the last id of a range is not looked at": ("lowest), weightless) - 1;", "lowest), weightless);", ties),
    "a range is cut off below its pivot": ("bracket.low = pivots[i];", "bracket.low = pivots[i] + 1;", neighbours),
    "ids above a range are forgotten": ("u64 sum = bracket.above;", "u64 sum = 0;", draws),
    "ids past the vocabulary": ("if (first + i * 32 < end) use", "use", draws),
    "no barrier between reading sums and writing more": (
        "    __syncthreads();  // everybody has read the sums\n",
        "",
        races,
    ),
    "no barrier after gathering": (
        "  });\n  __syncthreads();\n  const int mine",
        "  });\n  const int mine",
        thread_orders,
    ),
    "no barrier before the sums are added up": ("  __syncthreads();\n  if (warp == 0) {", "  if (warp == 0) {", races),
    "a block gathers more ids than it has threads": (
        "while (bracket.inside > THREADS &&",
        "while (bracket.inside > 2 * THREADS &&",
        neighbours,
    ),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_faults_in_sampling_are_caught(name: str) -> None:
    old, new, layer = SAMPLING[name]
    confirm("sampling.cu", name, caught(Fault("sampling.cu", old, new), layer))


def caught(fault: Fault, layer: Layer) -> str:
    """What the layer says. Fails where it says nothing, or the fault does not compile."""
    try:
        layer(fault)
    except (AssertionError, ShimError) as error:
        assert "error:" not in str(error) or "runtime error:" in str(error), f"the fault does not compile: {error}"
        if isinstance(error, ShimError):
            return str(error)
        return f"wrong values{' in some order' if layer in (rope_orders, thread_orders) else ''}: {error}"
    pytest.fail(f"not caught: {fault}")
