"""Ranges, caps, defaults and the length rule, at their edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2

from services.common.errors import RequestError, StartError
from services.frontend.config import FrontendConfig
from services.frontend.defaults import sampling_defaults
from services.frontend.request import Hold, Limits, Options, Sampling
from services.frontend.validation import check_choice, output_length, read_options

ENGINE_CHOICES, ENGINE_LOGPROBS = 3, 4
LIMITS = FrontendConfig(
    max_choices=4,
    max_logprobs=5,
    max_stop_strings=2,
    max_stop_string_bytes=8,
    max_stop_token_ids=2,
    max_logit_biases=2,
    max_allowed_token_ids=4,
    max_banned_token_ids=4,
    max_cache_salt_bytes=4,
    max_min_delta_tokens=10,
    max_min_delta_interval_ms=1000,
).limits()
VOCAB = 100


def read(*, limits: Limits = LIMITS, **options: Any) -> Options:
    return read_options(
        inference_pb2.Options(**options),
        defaults=Sampling(),
        limits=limits,
        vocab_size=VOCAB,
        max_choices=ENGINE_CHOICES,
        max_logprobs=ENGINE_LOGPROBS,
    )


def sampled(**sampling: Any) -> Sampling:
    return read(sampling=generation_pb2.Sampling(**sampling)).sampling


def refusal(make: Any, **arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(**arguments)
    return caught.value


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 1e-12, 100], [-0.1, 100.5, math.nan, math.inf, -math.inf]),
        ("top_k", [-1, 0, 1, 2**31 - 1], [-2, -(2**31)]),
        ("top_p", [1e-6, 1], [0, -1, 1.01, math.nan, math.inf]),
        ("min_p", [0, 1], [-0.01, 1.01, math.nan]),
        ("repetition_penalty", [1e-3, 10], [0, -1, 10.5, math.nan, math.inf]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1, math.nan, -math.inf]),
    ],
)
def test_sampling_values_are_held_to_their_range(field: str, good: list[float], bad: list[float]) -> None:
    for value in good:
        sampled(**{field: value})
    for value in bad:
        error = refusal(sampled, **{field: value})
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.violations[0].field == f"options.sampling.{field}"
        assert (f"{value:g}" if field != "top_k" else str(value)) in error.message


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 9_999_999])
def test_every_top_k_that_keeps_all_is_off(top_k: int) -> None:
    assert sampled(top_k=top_k).top_k == -1


def test_logit_bias_takes_minus_infinity_and_its_range() -> None:
    assert sampled(logit_bias={3: -math.inf, 99: 100}).logit_bias == ((3, -math.inf), (99, 100.0))
    for bias in ({1: math.inf}, {1: math.nan}, {1: 100.5}, {1: -101}):
        assert refusal(sampled, logit_bias=bias).violations[0].field == "options.sampling.logit_bias[1]"


@pytest.mark.parametrize("token_id", [VOCAB, 2**31, 2**32 - 1])
def test_ids_outside_the_vocabulary_are_refused_in_every_field(token_id: int) -> None:
    assert str(VOCAB) in refusal(sampled, logit_bias={token_id: 1}).message
    error = refusal(read, stop_token_ids=[1, token_id])
    assert error.violations[0].field == "options.stop_token_ids[1]" and str(token_id) in error.message


def test_caps_name_the_count_the_limit_and_the_key() -> None:
    many = refusal(read, stop=["a", "b", "c"])
    assert many.message == "options.stop: has 3 strings, at most 2 are taken (max_stop_strings)"
    assert "max_stop_string_bytes" in refusal(read, stop=["é" * 5]).message
    assert "max_stop_token_ids" in refusal(read, stop_token_ids=[1, 2, 3]).message
    assert "max_logit_biases" in refusal(sampled, logit_bias={1: 1, 2: 1, 3: 1}).message


def test_counts_of_choices_and_alternatives() -> None:
    assert read(n=1, logprobs=0).logprobs == 0
    assert (read().n, read(n=3).n) == (1, 3)
    assert refusal(read, n=0).code is grpc.StatusCode.INVALID_ARGUMENT
    for options, code in (
        ({"n": 4}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"logprobs": 5}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"n": 5}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"logprobs": 6}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt_logprobs": 2**32 - 1}, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        error = refusal(read, **options)
        assert error.code is code
        assert error.violations[0].field == f"options.{next(iter(options))}"
    for name in ("logprobs", "prompt_logprobs"):
        assert getattr(read(**{name: 4}), name) == 4
        assert refusal(read, **{name: 5}).message == f"options.{name}: is 5, the engine takes at most 4"
        assert refusal(read, **{name: 6}).message == f"options.{name}: is 6, at most 5 are taken (max_logprobs)"


def test_lists_of_ids_name_each_once_below_the_vocabulary_within_their_caps() -> None:
    both = sampled(allowed_token_ids=[99, 0, 5], banned_token_ids=[5])
    assert (both.allowed_token_ids, both.banned_token_ids) == ((99, 0, 5), (5,))
    assert sampled().allowed_token_ids == sampled().banned_token_ids == ()
    for name in ("allowed_token_ids", "banned_token_ids"):
        for ids, at, says in (
            ([1, 100], "[1]", "is 100; ids lie below the vocabulary size, 100"),
            ([2**32 - 1], "[0]", "is 4294967295; ids lie"),
            ([7, 8, 7], "[2]", "is 7 once more; name each id once"),
        ):
            error = refusal(sampled, **{name: ids})
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.violations[0].field == f"options.sampling.{name}{at}" and says in error.message
        assert len(getattr(sampled(**{name: range(4)}), name)) == 4
        many = refusal(sampled, **{name: [1] * 5})  # their number is looked at before the ids
        assert many.message == f"options.sampling.{name}: has 5 ids, at most 4 are taken (max_{name})"


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"allowed_token_ids": [5, 6], "banned_token_ids": [6, 5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 6], "banned_token_ids": [6], "logit_bias": {5: -math.inf}}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "logit_bias": {5: -math.inf}}, "allowed_token_ids"),
    ],
)
def test_lists_that_leave_no_id_are_refused(sampling: dict[str, Any], field: str) -> None:
    error = refusal(sampled, **sampling)
    assert error.violations[0].field == f"options.sampling.{field}" and "leaves no id to draw" in error.message
    wide = {**sampling, "allowed_token_ids": [*sampling["allowed_token_ids"], 7]}
    assert sampled(**wide).allowed_token_ids[-1] == 7


def test_every_id_banned_is_refused_also_without_a_list_of_the_allowed() -> None:
    limits = replace(LIMITS, banned_token_ids=VOCAB, logit_biases=VOCAB)
    for sampling, field in (
        ({"banned_token_ids": range(VOCAB)}, "banned_token_ids"),
        ({"banned_token_ids": range(1, VOCAB), "logit_bias": {0: -math.inf}}, "banned_token_ids"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, "logit_bias"),
    ):
        error = refusal(read, limits=limits, sampling=generation_pb2.Sampling(**sampling))
        assert error.violations[0].field == f"options.sampling.{field}" and "leaves no id" in error.message
    most = generation_pb2.Sampling(banned_token_ids=range(1, VOCAB), logit_bias={0: -100})
    assert len(read(limits=limits, sampling=most).sampling.banned_token_ids) == VOCAB - 1


def test_stop_ids_that_min_tokens_keeps_back_must_leave_another() -> None:
    allowed = Sampling(allowed_token_ids=(2, 7))
    check_choice(allowed, VOCAB, stop_ids=(2,))
    with pytest.raises(RequestError, match=r"options.sampling.allowed_token_ids: leaves stop ids alone, which min_to"):
        check_choice(allowed, VOCAB, stop_ids=(2, 7))
    with pytest.raises(RequestError, match=r"banned_token_ids: leaves stop ids alone"):
        check_choice(Sampling(banned_token_ids=tuple(range(3, VOCAB))), VOCAB, stop_ids=(0, 1, 2))


def test_choices_are_bounded_by_the_configuration_and_by_the_engine() -> None:
    assert refusal(read, n=4).message == "options.n: is 4, the engine takes at most 3"
    assert refusal(read, n=5).message == "options.n: is 5, at most 4 are taken (max_choices)"


def test_priorities_salts_and_holds_have_their_ranges() -> None:
    assert [read(priority=p).priority for p in (-1000, 0, 1000)] == [-1000, 0, 1000]
    assert read(cache_salt="é" * 2).cache_salt == "é" * 2
    assert read(min_delta_tokens=10, min_delta_interval_ms=1000).hold == Hold(10, 1.0)
    for options in (
        {"priority": -1001},
        {"priority": 1001},
        {"cache_salt": "é" * 2 + "x"},
        {"min_delta_tokens": 11},
        {"min_delta_interval_ms": 1001},
    ):
        error = refusal(read, **options)
        (field,) = options
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.violations[0].field == f"options.{field}"
    assert "max_min_delta_tokens" in refusal(read, min_delta_tokens=11).message
    floor = replace(LIMITS, min_priority=0)
    assert read(limits=floor, priority=0).priority == 0
    assert "callers of this frontend may ask for 0 or more" in refusal(read, limits=floor, priority=-1).message
    assert "max_cache_salt_bytes" in refusal(read, cache_salt="12345").message


def test_a_label_has_128_bytes() -> None:
    assert read(label="é" * 64).label == "é" * 64
    assert refusal(read, label="é" * 64 + "x").violations[0].field == "options.label"


def test_a_seed_is_drawn_when_none_is_given() -> None:
    assert read(seed=0).seed == 0
    seeds = {read().seed for _ in range(64)}
    assert len(seeds) == 64 and max(seeds) > 2**32


def test_unset_fields_are_the_models_then_the_documented_ones() -> None:
    defaults = sampling_defaults({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 7})
    assert defaults == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    options = inference_pb2.Options(sampling=generation_pb2.Sampling(temperature=0, min_p=0.1))
    resolved = read_options(options, defaults=defaults, limits=LIMITS, vocab_size=VOCAB).sampling
    assert (resolved.temperature, resolved.top_k, resolved.min_p) == (0, 20, pytest.approx(0.1))
    assert sampling_defaults({}) == Sampling()


def test_a_model_that_does_not_sample_is_greedy() -> None:
    assert sampling_defaults({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert sampling_defaults({"do_sample": True, "temperature": 0.7}).temperature == 0.7


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": True}])
def test_a_generation_config_that_cannot_be_is_a_start_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(StartError, match=r"generation_config\.json"):
        sampling_defaults(wrong)


def length(prompt: int, max_tokens: int | None = None, min_tokens: int = 0) -> int:
    options = Options(Sampling(), seed=0, max_tokens=max_tokens, min_tokens=min_tokens)
    return output_length(options, prompt_tokens=prompt, context_tokens=10, prompt_field="text")


def test_prompt_and_output_fit_the_context_together() -> None:
    assert [length(p) for p in (1, 9, 10)] == [9, 1, 0]
    assert length(4, 6) == 6 and length(10, 0) == 0 and length(9, 1) == 1
    error = refusal(length, prompt=4, max_tokens=7)
    assert error.violations[0].field == "options.max_tokens"
    for part in ("is 7", "prompt's 4 tokens", "that is 11", "context holds 10", "at most 6", "--max-model-len"):
        assert part in error.message
    for max_tokens in (None, 0, 1):
        error = refusal(length, prompt=11, max_tokens=max_tokens)
        assert error.violations[0].field == "text"
        assert "11 tokens" in error.message and "holds 10" in error.message
    assert refusal(length, prompt=0).reason == "EMPTY_PROMPT"


def test_min_tokens_is_at_most_the_effective_max_tokens() -> None:
    assert length(4, 6, 6) == 6
    assert refusal(length, prompt=4, max_tokens=5, min_tokens=6).violations[0].field == "options.min_tokens"
    assert refusal(length, prompt=4, min_tokens=7).violations[0].field == "options.min_tokens"
