"""Small tokenizers of the kinds that mark word starts, trained on the spot, with the control tokens <s> and </s>."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.frontend.tokenizer import TextTokenizer

TEXT = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun all day long",
    "once upon a time there was a small town near the sea and in the town there lived a painter",
]
_SPECIAL = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]


def llama2_like(*, adds_bos: bool = False) -> str:
    """tokenizer.json of a sentencepiece BPE as Llama 2's is converted: byte fallback, a space stripped at the start."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=_SPECIAL, show_progress=False))
    pieces = dict(sorted(trained.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]))
    vocab = {token: i for i, token in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [tuple(merge) for merge in _merges(trained)]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.add_special_tokens(_SPECIAL)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return made.to_str()


def metaspace_unigram() -> str:
    """tokenizer.json of a Unigram model with the Metaspace pre-tokenizer and decoder, first word alone prefixed."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=_SPECIAL,
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=["<", ">", "/"],
    )
    made.train_from_iterator(TEXT, trainer)
    return made.to_str()


def metaspace_bpe() -> str:
    """tokenizer.json of a BPE with the Metaspace pre-tokenizer and decoder, every split prefixed."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=_SPECIAL, show_progress=False))
    return made.to_str()


WORD_STARTS = {"llama2_like": llama2_like, "metaspace_unigram": metaspace_unigram, "metaspace_bpe": metaspace_bpe}


def loaded(name: str) -> TextTokenizer:
    """One of WORD_STARTS as the frontend loads it."""
    return TextTokenizer(WORD_STARTS[name]())


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    import json

    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges
