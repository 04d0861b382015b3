"""Options from the wire to our own: each value against its range, unset ones filled. Every refusal names its field."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from triptych.inference.v1 import generation_pb2, inference_pb2

from services.common.errors import invalid
from services.common.grammar import Choices, Grammar, GrammarError, from_proto
from services.common.sampling import LOGIT_BIAS, RANGES, Range, choice_fault
from services.frontend.request import Hold, Limits, Options, Sampling
from services.frontend.sizes import at_most

LABEL_BYTES = 128
PRIORITY = Range(-1000, 1000)
_LONGER = (
    "start the scheduler with a larger --max-model-len, or a larger KV pool (--num-kv-blocks, the executor's "
    "--kv-memory-bytes) where that is what bounds it"
)


def read_options(
    options: inference_pb2.Options,
    *,
    defaults: Sampling,
    limits: Limits,
    vocab_size: int,
    max_choices: int = 1,
    max_logprobs: int = 0,
    context_tokens: int | None = None,
    path: str = "options",
) -> Options:
    """Options in range, sampling and seed filled. Raises RequestError(INVALID_ARGUMENT).

    `max_choices`, `max_logprobs` and `context_tokens` are the engine's.
    """
    _check_counts(options, limits, path)
    _check_engines(options.n, max_choices, f"{path}.n")
    _check_engines(options.logprobs, max_logprobs, f"{path}.logprobs")
    _check_engines(options.prompt_logprobs, max_logprobs, f"{path}.prompt_logprobs")
    grammar = read_grammar(options, path)
    sampling = _read_sampling(options.sampling, defaults, limits, vocab_size, f"{path}.sampling")
    return Options(
        sampling=sampling,
        seed=options.seed if options.HasField("seed") else draw_seed(),
        n=options.n if options.HasField("n") else 1,
        best_of=_read_best_of(options, limits, max_choices, f"{path}.best_of"),
        max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
        min_tokens=options.min_tokens,
        stop=_read_stops(options, limits, f"{path}.stop"),
        stop_token_ids=_read_stop_ids(options, limits, vocab_size, f"{path}.stop_token_ids"),
        ignore_eos=options.ignore_eos,
        include_stop_string=options.include_stop_string,
        logprobs=options.logprobs if options.HasField("logprobs") else None,
        prompt_logprobs=options.prompt_logprobs if options.HasField("prompt_logprobs") else None,
        echo=options.echo,
        raw_bytes=options.raw_bytes,
        skip_special_tokens=options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        hold=_read_hold(options, limits, path),
        priority=_read_priority(options.priority, limits, f"{path}.priority"),
        cache_salt=_read_salt(options.cache_salt, limits, f"{path}.cache_salt"),
        label=_read_label(options.label, f"{path}.label"),
        grammar=grammar,
        truncate_prompt_tokens=_read_truncation(options, context_tokens, f"{path}.truncate_prompt_tokens"),
    )


def read_grammar(options: inference_pb2.Options, path: str) -> Grammar | None:
    """What the output is held to, None where nothing. Raises INVALID_ARGUMENT for what contradicts it."""
    if not options.HasField("grammar"):
        return None
    try:
        grammar = from_proto(options.grammar)
    except GrammarError as error:
        raise invalid(error.under(f"{path}.grammar"), error.description) from None
    if options.ignore_eos:
        raise invalid(f"{path}.ignore_eos", "is set beside a grammar, which says where the output ends; leave one out")
    for name in ("logprobs", "best_of"):
        if grammar.forced_tokens and options.HasField(name):
            said = f"appends ids that are not drawn, and so have no logprobs, which {name} needs; leave one out"
            raise invalid(f"{path}.grammar.forced_tokens", said)
    if isinstance(grammar.rule, Choices):
        longest = max(len(value.encode()) for value in grammar.rule.values)
        if options.min_tokens > longest:
            raise invalid(
                f"{path}.min_tokens",
                f"is {options.min_tokens}, the longest of the grammar's choices has {longest} bytes, and so no more "
                "tokens; lower it",
            )
    return grammar


def draw_seed() -> int:
    """64 random bits, for a request that names no seed."""
    return int.from_bytes(os.urandom(8), "little")


def check_ids(ids: tuple[int, ...], vocab_size: int, path: str) -> None:
    """Raises INVALID_ARGUMENT for the first id that is not below the vocabulary size."""
    if ids and max(ids) >= vocab_size:
        place = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise invalid(f"{path}[{place}]", f"is {ids[place]}; ids lie below the vocabulary size, {vocab_size}")


def output_length(
    options: Options, *, prompt_tokens: int, context_tokens: int, prompt_field: str, path: str = "options"
) -> int:
    """The effective max_tokens: prompt and output together fit the context.

    An unset max_tokens is what the context leaves, 0 for a prompt that fills it. Raises INVALID_ARGUMENT for an empty
    prompt, a prompt or a sum that is too long, and a min_tokens past max_tokens.
    """
    if prompt_tokens == 0:
        raise invalid(prompt_field, "the prompt has 0 tokens; one or more are needed", "EMPTY_PROMPT")
    check_fits(options, prompt_tokens=prompt_tokens, context_tokens=context_tokens, prompt_field=prompt_field)
    room = context_tokens - prompt_tokens
    max_tokens = room if options.max_tokens is None else options.max_tokens
    if max_tokens > room:
        raise invalid(
            f"{path}.max_tokens",
            f"is {max_tokens}; with the prompt's {prompt_tokens} tokens that is {prompt_tokens + max_tokens}, the "
            f"context holds {context_tokens}; ask for at most {room}, or {_LONGER}",
            "CONTEXT_EXCEEDED",
        )
    if options.min_tokens > max_tokens:
        raise invalid(f"{path}.min_tokens", f"is {options.min_tokens}, max_tokens is {max_tokens}; lower it")
    return max_tokens


def check_fits(options: Options, *, prompt_tokens: int, context_tokens: int, prompt_field: str) -> None:
    """Raises INVALID_ARGUMENT for a prompt that is longer than the context."""
    wanted = "unset" if options.max_tokens is None else str(options.max_tokens)
    if prompt_tokens > context_tokens:
        raise invalid(
            prompt_field,
            f"the prompt has {prompt_tokens} tokens (max_tokens {wanted}), the context holds {context_tokens}; "
            f"shorten it, or {_LONGER}",
            "PROMPT_TOO_LONG",
        )


def check_scored(options: Options, *, prompt_tokens: int, limits: Limits, path: str = "options") -> None:
    """Raises INVALID_ARGUMENT where logprobs of more prompt ids are asked for than a request may."""
    if options.prompt_logprobs is not None and prompt_tokens > limits.scored_tokens:
        raise invalid(
            f"{path}.prompt_logprobs",
            f"is for a prompt of at most {limits.scored_tokens} tokens (max_scored_tokens), this one has "
            f"{prompt_tokens}; score it in parts",
        )


def check_sampling(sampling: Sampling, path: str) -> None:
    """Raises INVALID_ARGUMENT for the first value out of the contract's range; NaN and infinities are out of range."""
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if name == "top_k" and value not in allowed:
            raise invalid(f"{path}.top_k", f"is {value}; -1 and 0 turn it off, else it is 1 or more")
        _within(value, allowed, f"{path}.{name}")


def _read_sampling(
    sampling: generation_pb2.Sampling, defaults: Sampling, limits: Limits, vocab_size: int, path: str
) -> Sampling:
    fields = {field.name for field, _ in sampling.ListFields()}
    given = {name: getattr(sampling, name) for name in RANGES if name in fields}
    resolved = replace(defaults, **given)
    check_sampling(resolved, path)
    if resolved.top_k <= 0 or resolved.top_k >= vocab_size:
        resolved = replace(resolved, top_k=-1)
    for name, limit in (
        ("allowed_token_ids", limits.allowed_token_ids),
        ("banned_token_ids", limits.banned_token_ids),
    ):
        at_most(len(getattr(sampling, name)), limit, "ids", f"{path}.{name}", f"max_{name}")
    resolved = replace(
        resolved,
        logit_bias=_read_bias(sampling, limits, vocab_size, f"{path}.logit_bias"),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
    )
    check_choice(resolved, vocab_size, path)
    return resolved


def check_choice(
    sampling: Sampling, vocab_size: int, path: str = "options.sampling", *, stop_ids: tuple[int, ...] = ()
) -> None:
    """Raises INVALID_ARGUMENT for a list of ids that is not one, or lists that leave no id to draw.

    `stop_ids` are those that min_tokens keeps from being drawn, empty without it.
    """
    fault = choice_fault(
        sampling.allowed_token_ids, sampling.banned_token_ids, sampling.logit_bias, vocab_size, stop_ids=stop_ids
    )
    if fault is not None:
        field, description = fault
        raise invalid(f"{path}.{field}", description)


def _read_bias(
    sampling: generation_pb2.Sampling, limits: Limits, vocab_size: int, path: str
) -> tuple[tuple[int, float], ...]:
    at_most(len(sampling.logit_bias), limits.logit_biases, "entries", path, "max_logit_biases")
    bias = tuple(sorted(sampling.logit_bias.items()))
    for token_id, value in bias:
        if token_id >= vocab_size:
            raise invalid(f"{path}[{token_id}]", f"ids lie below the vocabulary size, {vocab_size}")
        if value != -math.inf:
            _within(value, LOGIT_BIAS, f"{path}[{token_id}]", or_else=" or -inf")
    return bias


def _read_stops(options: inference_pb2.Options, limits: Limits, path: str) -> tuple[str, ...]:
    at_most(len(options.stop), limits.stop_strings, "strings", path, "max_stop_strings")
    for i, stop in enumerate(options.stop):
        if not stop:
            raise invalid(f"{path}[{i}]", "is empty; a stop string has one character or more")
        at_most(len(stop.encode()), limits.stop_string_bytes, "bytes", f"{path}[{i}]", "max_stop_string_bytes")
    return tuple(options.stop)


def _read_stop_ids(options: inference_pb2.Options, limits: Limits, vocab_size: int, path: str) -> tuple[int, ...]:
    at_most(len(options.stop_token_ids), limits.stop_token_ids, "ids", path, "max_stop_token_ids")
    ids = tuple(options.stop_token_ids)
    check_ids(ids, vocab_size, path)
    return ids


def _check_counts(options: inference_pb2.Options, limits: Limits, path: str) -> None:
    if options.HasField("n") and options.n == 0:
        raise invalid(f"{path}.n", "is 0; at least one choice is returned")
    if options.n > limits.choices:
        raise invalid(f"{path}.n", f"is {options.n}, at most {limits.choices} are taken (max_choices)")
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(options, name)) > limits.logprobs:
            raise invalid(f"{path}.{name}", f"is {wanted}, at most {limits.logprobs} are taken (max_logprobs)")


def _read_best_of(options: inference_pb2.Options, limits: Limits, max_choices: int, path: str) -> int | None:
    if not options.HasField("best_of"):
        return None
    n = options.n if options.HasField("n") else 1
    if options.best_of < n:
        raise invalid(path, f"is {options.best_of}, n is {n}; no more choices can be returned than are run")
    if options.best_of > limits.choices:
        raise invalid(path, f"is {options.best_of}, at most {limits.choices} are taken (max_choices)")
    _check_engines(options.best_of, max_choices, path)
    return options.best_of


def _check_engines(wanted: int, limit: int, path: str) -> None:
    if wanted > limit:
        raise invalid(path, f"is {wanted}, the engine takes at most {limit}")


def _read_truncation(options: inference_pb2.Options, context_tokens: int | None, path: str) -> int | None:
    if not options.HasField("truncate_prompt_tokens"):
        return None
    wanted = options.truncate_prompt_tokens
    if wanted == 0:
        raise invalid(path, "is 0; a prompt has one token or more")
    if context_tokens is not None and wanted > context_tokens:
        raise invalid(path, f"is {wanted}, the context holds {context_tokens}; ask for at most as many")
    return wanted


def _read_hold(options: inference_pb2.Options, limits: Limits, path: str) -> Hold:
    for name, limit in (
        ("min_delta_tokens", limits.min_delta_tokens),
        ("min_delta_interval_ms", limits.min_delta_interval_ms),
    ):
        if (value := getattr(options, name)) > limit:
            raise invalid(f"{path}.{name}", f"is {value}, at most {limit} is taken (max_{name})")
    return Hold(options.min_delta_tokens, options.min_delta_interval_ms / 1000)


def _read_priority(priority: int, limits: Limits, path: str) -> int:
    _within(priority, PRIORITY, path)
    if priority < limits.min_priority:
        raise invalid(path, f"is {priority}; callers of this frontend may ask for {limits.min_priority} or more")
    return priority


def _read_salt(salt: str, limits: Limits, path: str) -> str:
    at_most(len(salt.encode()), limits.cache_salt_bytes, "bytes", path, "max_cache_salt_bytes")
    return salt


def _read_label(label: str, path: str) -> str:
    if len(label.encode()) > LABEL_BYTES:
        raise invalid(path, f"has {len(label.encode())} bytes, at most {LABEL_BYTES} are kept")
    return label


def _within(value: float, allowed: Range, path: str, *, or_else: str = "") -> None:
    if value not in allowed:
        shown = str(value) if isinstance(value, int) else f"{value:g}"
        raise invalid(path, f"is {shown}; it must be in {allowed}{or_else}")
