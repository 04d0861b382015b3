"""Where a choice stands in its grammar: masks to the model's vocabulary, bans, forced ids, ids that it comes with."""

from __future__ import annotations

import numpy as np
import pytest
from triptych.inference.v1 import generation_pb2

from services.common.grammar import Choices, Grammar, Regex, Rule
from services.common.grammar_compiler import Compiler
from services.scheduler.grammar_state import Bans, ContradictedError, GrammarFailedError, GrammarState, words_of
from tests.support.checkpoints import EOS_ID, tiny_tokenizer

VOCAB = 512
NO_BANS = Bans()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tiny_tokenizer(tmp_path_factory.mktemp("state") / "tiny"), [EOS_ID])


def state(
    compiler: Compiler, rule: Rule, *, vocab_size: int = VOCAB, bans: Bans = NO_BANS, forces: bool = False
) -> GrammarState:
    return GrammarState(compiler.compile(Grammar(rule)).deep_copy(), vocab_size, bans, forces=forces)


def allowed(of: GrammarState) -> list[int]:
    words = of.mask()
    assert words is not None
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def ids(compiler: Compiler, text: str) -> list[int]:
    return list(compiler.tokenizer.tokenize_str(text))


def test_masks_have_the_models_width_whatever_the_tokenizers(compiler: Compiler) -> None:
    whole = allowed(state(compiler, Regex("[a-z]+")))
    for vocab_size in (VOCAB + 100, VOCAB, 100):
        own = state(compiler, Regex("[a-z]+"), vocab_size=vocab_size)
        words = own.mask()
        assert words is not None and len(words) == -(-vocab_size // 32) and words.dtype == np.uint32
        assert allowed(own) == [i for i in whole if i < 32 * len(words)]


def test_ids_go_in_and_the_end_is_known_without_eos(compiler: Compiler) -> None:
    own = state(compiler, Choices(("abc", "abd")))
    (*most, last) = ids(compiler, "abd")
    own.take(most)
    assert not own.ended and last in allowed(own)
    own.take([last])
    assert own.ended and own.mask() is None
    own.take([5, 6])  # sampled by a step that was under way
    assert own.mask() is None


def test_a_state_goes_on_where_the_ids_it_comes_with_end(compiler: Compiler) -> None:
    begun, resumed = state(compiler, Regex("[ab]{4}c")), state(compiler, Regex("[ab]{4}c"))
    for token_id in ids(compiler, "abab"):
        begun.take([token_id])
        begun.mask()
    resumed.take(ids(compiler, "abab"))
    assert allowed(begun) == allowed(resumed)


def test_an_id_that_is_not_allowed_fails_the_state_for_good(compiler: Compiler) -> None:
    own = state(compiler, Regex("[ab]+"))
    with pytest.raises(GrammarFailedError, match=r"satisfy|allowed"):
        own.take(ids(compiler, "x"))
    with pytest.raises(GrammarFailedError):
        own.mask()


def test_bans_are_taken_out_and_stop_ids_up_to_min_tokens(compiler: Compiler) -> None:
    a, b = ids(compiler, "a") + ids(compiler, "b")
    sampling = generation_pb2.Sampling(banned_token_ids=[a], logit_bias={b: -np.inf, EOS_ID: 2})
    assert {a, b}.isdisjoint(allowed(state(compiler, Regex("[a-c]+"), bans=Bans.of(sampling, (), 0, VOCAB))))
    only = Bans.of(generation_pb2.Sampling(allowed_token_ids=[a, EOS_ID]), (), 0, VOCAB)
    assert allowed(state(compiler, Regex("[a-c]+"), bans=only)) == [a]
    held = state(compiler, Regex("a*"), bans=Bans.of(generation_pb2.Sampling(), [EOS_ID], 2, VOCAB))
    for position in range(4):
        assert (EOS_ID in allowed(held)) == (position >= 2)
        held.take([a])


def test_where_bans_leave_nothing_it_is_said_and_where_only_a_banned_stop_is_left_it_ends(compiler: Compiler) -> None:
    (c,) = ids(compiler, "c")
    bans = Bans.of(generation_pb2.Sampling(allowed_token_ids=ids(compiler, "a")), (), 0, VOCAB)
    own = state(compiler, Regex("c+"), bans=bans)
    with pytest.raises(ContradictedError):
        own.mask()
    out = [i for i in range(VOCAB) if i not in (c, EOS_ID)]
    bans = Bans.of(generation_pb2.Sampling(banned_token_ids=out), [EOS_ID], 9, VOCAB)
    own = state(compiler, Regex("cd*"), bans=bans)
    assert allowed(own) == [c]
    own.take([c])
    assert own.mask() is None and own.ended


def test_forced_ids_are_those_without_an_alternative(compiler: Compiler) -> None:
    own = state(compiler, Choices(("xylophone", "yes")), forces=True)
    first = ids(compiler, "x")
    own.take(first)
    forced = own.force()
    assert compiler.tokenizer.decode_str([*first, *forced]) == "xylophone" and own.ended
    assert own.force() == []
    plain = state(compiler, Choices(("xylophone", "yes")))
    plain.take(first)
    assert plain.force() == []


def test_forced_ids_end_before_one_that_is_banned_and_a_stop_id_before_min_tokens(compiler: Compiler) -> None:
    whole = state(compiler, Choices(("xylophone", "yes")), forces=True)
    first = ids(compiler, "x")
    whole.take(first)
    forced = whole.force()
    assert len(forced) > 3
    sampling = generation_pb2.Sampling
    for at, banned in enumerate(forced):
        for asked in (
            sampling(banned_token_ids=[banned]),
            sampling(logit_bias={banned: -np.inf}),
            sampling(allowed_token_ids=[i for i in range(VOCAB) if i != banned]),
        ):
            own = state(compiler, Choices(("xylophone", "yes")), bans=Bans.of(asked, (), 0, VOCAB), forces=True)
            own.take(first)
            assert own.force() == forced[: forced.index(banned)]
            with pytest.raises(ContradictedError):
                own.mask()
        for min_tokens in (at + 1, at + 2):  # forced[at] is output id at + 1, which min_tokens may reach or not
            held = Bans.of(sampling(), [banned], min_tokens, VOCAB)
            own = state(compiler, Choices(("xylophone", "yes")), bans=held, forces=True)
            own.take(first)
            assert (own.force() == forced) == (forced.index(banned) + 1 >= min_tokens)


def test_words_hold_a_bit_an_id() -> None:
    assert words_of([0, 33], 40).tolist() == [1, 2]
    assert words_of([], 33).tolist() == [0, 0]
