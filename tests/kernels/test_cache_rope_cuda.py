"""cache_rope on the CPU: norm, rope and the write into the cache are those of float64 and of transformers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi
from transformers.models.qwen3 import modeling_qwen3

from kernels import instances
from kernels.cache_rope import CacheRope
from tests.kernels.cache_rope import EPSILON, UNTOUCHED, Batch, Shape, batch, check, run
from tests.kernels.hostshim.hostshim import HostDevice
from tests.kernels.memory import untouched
from tests.kernels.paged import loaded

ORDERS = [("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]
SHAPES = {
    "llama": Shape("bfloat16", head_dim=128),
    "llama, angles from frequencies": Shape("bfloat16", head_dim=128, from_frequencies=True, rope_factor=1.3),
    "qwen3, fp8 cache": Shape("bfloat16", "float8_e4m3", head_dim=128, norms=True, from_frequencies=True),
    "gemma3": Shape("bfloat16", head_dim=256, norms=True, norm_offset=1.0, heads=3, kv_heads=1),
    "phi": Shape("float16", head_dim=80, rotary_dim=32, heads=3, kv_heads=1),
    "gpt_neox": Shape("float16", head_dim=80, rotary_dim=24, from_frequencies=True, heads=3, kv_heads=3),
    "no rope": Shape("float32", rotary_dim=0, block_tokens=5),
    "float32, norms": Shape("float32", norms=True, from_frequencies=True, heads=7, kv_heads=1),
    "cache alone": Shape("float32", heads=0, kv_heads=3),
}
SOME = ["llama", "phi", "float32, norms"]
TOGETHER = tuple(
    dict.fromkeys(instances.cache_rope(shape.dtype, shape.cached, shape.head_dim) for shape in SHAPES.values())
)


def device(**options: Any) -> HostDevice:
    """With all that SHAPES need compiled in one go."""
    return HostDevice(together=TOGETHER, **options)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_is_float64_rounded_once(name: str) -> None:
    made = batch(SHAPES[name], tokens=11, skipped=(0, 4))
    written = run(device(), made)
    check(made, written)
    for order, seed in ORDERS:
        assert run(device(order=order, seed=seed), made).same_bits(written), (order, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(d, d) for d in ("float16", "bfloat16", "float32")] + [(d, instances.FP8) for d in ("float16", "bfloat16")],
)
def test_every_instance(dtype: str, kv_dtype: str) -> None:
    together = tuple(instances.cache_rope(dtype, kv_dtype, head_dim) for head_dim in instances.HEAD_DIMS)
    for head_dim, norms, rotary_dim in itertools.product(instances.HEAD_DIMS, (False, True), (None, 16, 0)):
        shape = Shape(dtype, kv_dtype, head_dim, rotary_dim=rotary_dim, norms=norms, from_frequencies=norms)
        made = batch(shape, tokens=9, skipped=(8,))
        written = run(HostDevice(together=together), made)
        check(made, written)
        assert run(HostDevice(together=together, order="random"), made).same_bits(written)


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_any_number_of_tokens(tokens: int) -> None:
    made = batch(SHAPES["phi"], tokens=tokens)
    check(made, run(device(), made))


def test_no_tokens_are_no_launch() -> None:
    made = batch(SHAPES["phi"], tokens=0)
    written = run(device(), made)
    assert (written.keys.view(np.uint8) == UNTOUCHED).all()


@pytest.mark.parametrize("name", SOME)
def test_one_buffer_for_all_three_and_queries_in_place(name: str) -> None:
    made = batch(SHAPES[name])
    apart = run(device(), made)
    assert run(device(), made, joined=True).same_bits(apart)
    for order in ("forward", "reverse", "random"):
        assert run(device(order=order), made, in_place=True).same_bits(apart)
        assert run(device(order=order), made, in_place=True, joined=True).same_bits(apart)


def test_a_token_without_a_place_is_not_cached_but_its_queries_are_turned() -> None:
    made = batch(SHAPES["llama"], skipped=range(7))
    written = run(device(), made)
    check(made, written)
    assert (written.keys.view(np.uint8) == UNTOUCHED).all() and (written.values.view(np.uint8) == UNTOUCHED).all()


def test_padding_is_written_to_the_null_block_or_nowhere() -> None:
    """Two rows that pad a captured step: one placed in block 0, one without a place."""
    made = batch(SHAPES["llama"], tokens=6)
    made.places[made.places < 16] += 16  # block 0 is the null block: no request has it
    made.places[:4] = [16, 40, 47, 20]
    made.places[4:] = [0, -1]
    written = run(device(), made)
    check(made, written)
    assert (written.keys[0, :, 1:].view(np.uint8) == UNTOUCHED).all(), "only the first place of the null block"


def test_not_a_number_stays_in_its_own_head() -> None:
    made = batch(SHAPES["float32, norms"])
    clean = run(device(), made)
    made.query[3, 2, 5] = made.key[1, 0, 63] = made.value[2, 0, 7] = np.nan
    written = run(device(), made)
    assert np.isnan(written.query[3, 2]).all(), "a norm is taken over the whole head"
    different = (written.query != clean.query).any(axis=-1)
    assert np.argwhere(different).tolist() == [[3, 2]]
    where = [(t, *np.divmod(made.places[t], made.shape.block_tokens)) for t in range(7)]
    assert [t for t, block, at in where if np.isnan(written.keys[block, 0, at]).any()] == [1]
    assert [int(np.isnan(written.values[block, 0, at]).sum()) for _, block, at in where] == [0, 0, 1, 0, 0, 0, 0]


def test_fp8_stops_at_its_largest_value() -> None:
    made = batch(replace(SHAPES["qwen3, fp8 cache"], norms=False))
    made.key_scales[:] = made.value_scales[:] = 1e-4  # values of 1 are 10000 scales
    written = run(device(), made)
    check(made, written)
    blocks, offsets = np.divmod(made.places, made.shape.block_tokens)
    assert np.abs(loaded(written.values[blocks, :, offsets], "float8_e4m3")).max() == 448


@pytest.mark.parametrize("position", [0, 1, 100_000, 1_048_575, (1 << 22) - 1])
def test_angles_of_far_positions(position: int) -> None:
    """The first frequency is 1: its angle is the position itself."""
    made = batch(Shape("float32", from_frequencies=True), positions=[position, position + 1] * 3, tokens=6)
    check(made, run(device(), made))


def test_X8_offsets_past_two_to_the_31_elements() -> None:
    check_far_offsets(device())


def check_far_offsets(host: HostDevice) -> None:
    """Blocks 2^31 elements apart, and tokens of queries, keys and values too."""
    head_dim, block_stride = 64, (1 << 31) + 64
    keys, values = (untouched(2 * block_stride + 4096, np.float32) for _ in range(2))
    whole = untouched(block_stride + 3 * head_dim, np.float32)
    rng = np.random.default_rng(0)
    tokens = [rng.standard_normal((3, head_dim)).astype(np.float32) for _ in range(2)]
    whole[: 3 * head_dim], whole[block_stride:] = tokens[0].ravel(), tokens[1].ravel()
    out, places = np.zeros((2, head_dim), np.float32), np.array([3, 2 * 16 + 5], np.int64)
    at = host.pointer(whole)
    call = CacheRope(host, dtype="float32", kv_dtype="float32", head_dim=head_dim)
    call.params.set(query=at, key=at + 4 * head_dim, value=at + 8 * head_dim, query_out=host.pointer(out))
    call.params.set(keys=host.pointer(keys), values=host.pointer(values), places=host.pointer(places))
    call.params.set(query_stride=block_stride, key_stride=block_stride, value_stride=block_stride)
    call.params.set(query_out_stride=head_dim, block_stride=block_stride, head_stride=16 * head_dim)
    call.params.set(tokens=2, heads=1, kv_heads=1, block_tokens=16)
    call()
    for token, offset in enumerate([3 * head_dim, 2 * block_stride + 5 * head_dim]):
        assert (out[token] == tokens[token][0]).all()
        assert (keys[offset : offset + head_dim] == tokens[token][1]).all()
        assert (values[offset : offset + head_dim] == tokens[token][2]).all()


FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama3 rope": (
        modeling_llama,
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        modeling_llama,
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3": (modeling_qwen3, "qwen3", {}),
    "gemma3": (modeling_gemma3, "gemma3_text", {}),
    "phi": (modeling_phi, "phi", {"partial_rotary_factor": 0.5}),
    "gpt_neox": (modeling_gpt_neox, "gpt_neox", {"rotary_pct": 0.25}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rotation_and_the_norms_are_those_of_transformers(name: str) -> None:
    """Its own rotary module, rotation and norm, on the same numbers; both make the angles from float32 frequencies."""
    modeling, model_type, settings = FAMILIES[name]
    config = AutoConfig.for_model(
        model_type, hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=4096, **settings
    )
    rotary_class = next(getattr(modeling, n) for n in dir(modeling) if n.endswith("RotaryEmbedding"))
    rotary = rotary_class(config)
    norm_class = {"qwen3": "Qwen3RMSNorm", "gemma3_text": "Gemma3RMSNorm"}.get(model_type)
    kind = ("full_attention",) if model_type == "gemma3_text" else ()
    inv_freq = rotary.full_attention_inv_freq if kind else rotary.inv_freq
    factor = rotary.full_attention_attention_scaling if kind else rotary.attention_scaling
    shape = Shape(
        rotary_dim=2 * len(inv_freq),
        from_frequencies=True,
        rope_factor=factor,
        norms=norm_class is not None,
        norm_offset=float(model_type == "gemma3_text"),
    )
    made = batch(shape, positions=[0, 1, 63, 64, 1000, 4095, 2])
    made.inv_freq = inv_freq.numpy()
    query, key = _by_transformers(made, modeling, rotary, norm_class, kind)
    written = run(device(), made)
    blocks, offsets = np.divmod(made.places, shape.block_tokens)
    np.testing.assert_allclose(written.query, query, atol=3e-6, rtol=3e-6)
    np.testing.assert_allclose(written.keys[blocks, :, offsets], key, atol=3e-6, rtol=3e-6)


def _by_transformers(
    made: Batch, modeling: Any, rotary: Any, norm_class: str | None, kind: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys as an attention layer turns them, [tokens, heads, head_dim]."""
    states = [torch.from_numpy(part)[None] for part in (made.query, made.key)]
    if norm_class is not None:
        for i, gain in enumerate((made.query_norm, made.key_norm)):
            norm = getattr(modeling, norm_class)(made.shape.head_dim, eps=EPSILON)
            norm.weight.data = torch.from_numpy(gain)
            states[i] = norm(states[i]).detach()
    cos, sin = rotary(states[0], torch.from_numpy(made.positions)[None], *kind)
    if cos.shape[-1] < made.shape.head_dim:  # some families hand over what is turned alone
        turned = [x[..., : cos.shape[-1]] for x in states]
        rest = [x[..., cos.shape[-1] :] for x in states]
        done = modeling_llama.apply_rotary_pos_emb(*turned, cos, sin, unsqueeze_dim=2)
        states = [torch.cat(parts, dim=-1) for parts in zip(done, rest, strict=True)]
    else:
        states = list(modeling.apply_rotary_pos_emb(*states, cos, sin, unsqueeze_dim=2))
    return states[0][0].numpy(), states[1][0].numpy()


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """Buffers of exact size; a head of 80 is no power of two, and the last block has lanes to spare."""
    made = batch(SHAPES["phi"], tokens=3, skipped=(1,))
    check(made, run(HostDevice(sanitizer=sanitizer), made))


def test_what_the_launcher_refuses() -> None:
    with pytest.raises(ValueError, match="no kernel for float64 heads of 64"):
        CacheRope(device(), dtype="float64", kv_dtype="float64", head_dim=64)
    with pytest.raises(ValueError, match="no kernel for float16 heads of 72"):
        CacheRope(device(), dtype="float16", kv_dtype="float16", head_dim=72)
    with pytest.raises(ValueError, match="no kernel writes float32 into a cache in float8_e4m3"):
        CacheRope(device(), dtype="float32", kv_dtype="float8_e4m3", head_dim=64)
    with pytest.raises(ValueError, match="fp8 KV needs compute capability 89, the device has 80"):
        old = HostDevice(instances.ARCHITECTURES[80])
        CacheRope(old, dtype="float16", kv_dtype="float8_e4m3", head_dim=64)
    good = {"rotary_dim": 64, "inv_freq": 1 << 20, "tokens": 1, "heads": 1}
    for field, value, text in (
        ("rotary_dim", 12, "rotary_dim is 12: a multiple of 8"),
        ("rotary_dim", 72, "rotary_dim is 72: a multiple of 8 up to head_dim 64"),
        ("inv_freq", 0, "give inv_freq, or cos and sin"),
        ("key_stride", 12, "key_stride is 12 elements"),
        ("angle_stride", 6, "angle_stride is 6: a multiple of 4"),
        ("keys", 24, "keys lies at 0x18: at a multiple of 16 bytes"),
    ):
        call = CacheRope(device(), dtype="float16", kv_dtype="float16", head_dim=64)
        call.params.set(**(good | {"kv_heads": 1} | {field: value}))
        with pytest.raises(ValueError, match=text):
            call()
