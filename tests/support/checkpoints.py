"""Tiny checkpoints made on the spot, and what transformers says the right ids of a checkpoint are.

torch and transformers are imported where they are needed: a test of the frontend can make a tokenizer without them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2, as in the embedded model."""
BOS_ID, EOS_ID, PAD_ID = 1, 2, 2
NEAR_TIE = 1e-3
"""A first difference between ids passes only where the float64 model's two likeliest logits are closer than this."""
STREAMS_A_NEAR_TIE = 200
_REFERENCE_BATCH = 8

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "The quick brown fox jumps over the lazy dog. A triptych is a work of art in three panels, hinged together and "
    "folded shut. Three services make one engine: the frontend holds the text, the scheduler holds the requests and "
    "the blocks, the executor holds the weights and the tensors. What is the capital of France? The capital of France "
    "is Paris. Write a short story about a little robot that learns to paint. Once upon a time there was a small town "
    "near the sea, and in the town there lived a painter who could not see the colour blue. user assistant system\n"
)


def tiny_tokenizer(path: Path, *, vocab_size: int = 512, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes tokenizer.json (byte-level BPE, at most `vocab_size` ids; any text round-trips) and its config file."""
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size {vocab_size} does not hold 256 bytes and {len(SPECIAL_TOKENS)} special tokens")
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    # The text runs out of pairs to merge before the vocabulary is full: as many ids as asked for, all the same.
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(missing)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    _write(path / "tokenizer_config.json", config)
    return path


def tiny_llama(
    path: Path,
    *,
    vocab_size: int = 512,
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 1024,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    dtype: str = "float32",
    lm_head: bool | None = None,
    drop: Sequence[str] = (),
    extra: Mapping[str, torch.Tensor] | None = None,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a random Llama's checkpoint folder and returns it.

    Weights are wide (standard deviation 0.3), so greedy ids vary and near ties are rare. `lm_head` says whether the
    file holds lm_head.weight (None: only when it is not tied); `drop` and `extra` take tensors out of the file and put
    others in; `config` and `generation_config` are laid over the files of that name, a None in them removes the key.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        state = LlamaForCausalLM(settings).to(getattr(torch, dtype)).state_dict()
    tensors = {name: tensor.clone().contiguous() for name, tensor in state.items() if name not in drop}
    if not (not tie_word_embeddings if lm_head is None else lm_head):
        tensors.pop("lm_head.weight", None)
    tiny_tokenizer(path, vocab_size=min(vocab_size, 512))
    _save_weights(path, tensors | dict(extra or {}), shards)
    written = settings.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": dtype}
    _write(path / "config.json", _laid_over(written, config))
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write(path / "generation_config.json", _laid_over(tokens, generation_config))
    return path


def tiny_model(path: Path, model_type: str, *, seed: int = 0, dtype: str = "float32", **settings: Any) -> Path:
    """Writes a random checkpoint folder of any family, saved by transformers under the names it publishes.

    Four layers, 64 wide; `settings` are laid over those below. Weights are wide, and vectors (norms, biases), which
    transformers starts at 0 or 1, are random too: one that is not read would show.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "initializer_range": 0.3,
    }
    config = AutoConfig.for_model(model_type, **(tiny | settings))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    tiny_tokenizer(path)
    model.save_pretrained(path)
    return path


def _save_weights(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    from safetensors.torch import save_file

    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(where.values())):
        save_file(
            {name: tensors[name] for name in where if where[name] == file}, path / file, metadata={"format": "pt"}
        )
    _write(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def _laid_over(below: dict[str, Any], above: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        key: value
        for key, value in (below | dict(above or {})).items()
        if key not in (above or {}) or value is not None
    }


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")


@functools.lru_cache(maxsize=8)
def _model(path: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # Of the ways to multiply experts, only the plain one knows float64.
    experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **experts).eval()


@functools.lru_cache(maxsize=64)
def _generated(
    path: Path, prompts: tuple[tuple[int, ...], ...], max_new_tokens: int, ignore_eos: bool
) -> list[list[int]]:
    """Of one left-padded batch; the mask keeps the padding out."""
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), PAD_ID)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = torch.tensor(prompt), 1
    stop = {"eos_token_id": None} if ignore_eos else {}
    model = _model(path, "float32")
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=PAD_ID, **stop
        )
    eos = model.generation_config.eos_token_id
    ends = set() if ignore_eos or eos is None else {eos} if isinstance(eos, int) else set(eos)
    return [_until(row, ends) for row in out[:, width:].tolist()]


def _until(ids: list[int], ends: set[int]) -> list[int]:
    """Up to the first of `ends`, included; a batch goes on until its last row has ended."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


def reference_ids(
    path: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, ignore_eos: bool = False
) -> list[list[int]]:
    """What transformers' generate appends to each prompt, greedy, float32; EOS ends it, included.

    Prompts of like length go through it together, so that many of them take little more time than one.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), _REFERENCE_BATCH):
        batch = order[start : start + _REFERENCE_BATCH]
        key = tuple(tuple(prompts[i]) for i in batch)
        for i, answer in zip(batch, _generated(path.resolve(), key, max_new_tokens, ignore_eos), strict=True):
            answers[i] = answer
    return answers


def float64_logits(path: Path, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[vocab] float64: the model's logits for the id that follows `ids`, computed in float64."""
    import torch

    with torch.inference_mode():
        logits = _model(path.resolve(), "float64")(torch.tensor([list(ids)]), logits_to_keep=1).logits[0, -1]
    return logits.double().numpy()


def float64_gap(path: Path, ids: Sequence[int]) -> float:
    """How much the likeliest id after `ids` leads the second, in float64 logits."""
    second, first = np.sort(float64_logits(path, ids))[-2:]
    return float(first - second)


def check_same_ids(
    path: Path, prompts: Sequence[Sequence[int]], got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> None:
    """Asserts that greedy streams are the reference's, stream by stream.

    A first difference passes only where the float64 model cannot tell the two ids apart either (both within NEAR_TIE
    of the likeliest); it is printed, and at most one stream in STREAMS_A_NEAR_TIE (one, of fewer) may have it.
    """
    assert len(prompts) == len(got) == len(expected), f"{len(prompts)} prompts, {len(got)} streams, {len(expected)}"
    near_ties = 0
    for i, (prompt, ours, theirs) in enumerate(zip(prompts, got, expected, strict=True)):
        at = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            assert len(ours) == len(theirs), f"stream {i}: {len(ours)} ids, expected {len(theirs)}; the rest is equal"
            continue
        logits = float64_logits(path, [*prompt, *theirs[:at]])
        behind = float(logits.max() - logits[ours[at]])
        gap = float64_gap(path, [*prompt, *theirs[:at]])
        told = f"stream {i} at {at}: {ours[at]} instead of {theirs[at]}, float64 top-2 gap {gap:.2e}, ours {behind:.2e}"
        assert gap < NEAR_TIE and behind < NEAR_TIE, told
        print(f"near tie: {told}")
        near_ties += 1
    assert near_ties <= max(1, len(prompts) // STREAMS_A_NEAR_TIE), f"{near_ties} near ties in {len(prompts)} streams"


def check_scores(path: Path, prompts: Sequence[Sequence[int]], got: Sequence[Sequence[tuple[float, int]]]) -> None:
    """Asserts that (logprob, rank) of each prompt's ids from position 1 on are the float64 model's.

    The executor computes in float32, so logprobs agree to 1e-3 and a rank may count another id on either side whose
    logit is that close to the id's own.
    """
    import torch

    for prompt, told in zip(prompts, got, strict=True):
        assert len(told) == len(prompt) - 1
        if not told:
            continue
        with torch.inference_mode():
            logits = _model(path.resolve(), "float64")(torch.tensor([list(prompt)])).logits[0, :-1]
        own = logits.gather(-1, torch.tensor(prompt[1:])[:, None])
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        np.testing.assert_allclose([logprob for logprob, _ in told], logprobs.numpy(), atol=NEAR_TIE, rtol=0)
        ranks = torch.tensor([rank for _, rank in told])
        assert (ranks >= 1 + (logits > own + NEAR_TIE).sum(-1)).all()
        assert (ranks <= (logits > own - NEAR_TIE).sum(-1)).all()


def check_tops(
    path: Path, ids: Sequence[int], first: int, tops: Sequence[Sequence[tuple[int, float]]], count: int
) -> None:
    """Asserts that (id, logprob) of the `count` likeliest ids at positions from `first` on are the float64 model's.

    Likeliest first; where two are closer than float32 can tell, either may stand before the other.
    """
    import torch

    with torch.inference_mode():
        logits = _model(path.resolve(), "float64")(torch.tensor([list(ids)])).logits[0]
    exact = logits[first - 1 : first - 1 + len(tops)].log_softmax(-1)
    for position, told in zip(exact, tops, strict=True):
        token_ids, logprobs = [token_id for token_id, _ in told], [logprob for _, logprob in told]
        assert len(set(token_ids)) == count and logprobs == sorted(logprobs, reverse=True)
        np.testing.assert_allclose(logprobs, position[token_ids].numpy(), atol=NEAR_TIE, rtol=0)
        np.testing.assert_allclose(logprobs, position.topk(count).values.numpy(), atol=NEAR_TIE, rtol=0)
