"""A request of the adapter's contract as one of our own API, whose door then decides.

The contract has no unset for most numbers: 0 is it, and means what vLLM makes of it, "off". The checkpoint's own
defaults are told in GetModelInfo, for the gateway to fill in.
"""

from __future__ import annotations

from collections.abc import Callable

from smg_grpc_proto import vllm_engine_pb2
from triptych.inference.v1 import generation_pb2, inference_pb2

from services.common.errors import invalid
from services.frontend.adapters.vllm import ebnf, structural_tag
from services.frontend.adapters.vllm.paths import PARAMS

_MAX_TOP_K = 2**31 - 1
_SEEDS = 2**64
_IDS = range(2**32)

ANY_OBJECT = '{"type": "object"}'


def generate_request(request: vllm_engine_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Raises RequestError(INVALID_ARGUMENT) for what our own API has no way to say."""
    read = inference_pb2.GenerateRequest(options=_options(request.sampling_params))
    if request.request_id:
        read.options.label = request.request_id
    kind = request.WhichOneof("input")
    if kind == "text":
        read.text = request.text
    elif kind == "tokenized":
        read.token_ids.ids.extend(request.tokenized.input_ids)
    else:
        raise invalid("input", "is missing; tokenized or text is needed")
    return read


def _options(params: vllm_engine_pb2.SamplingParams) -> inference_pb2.Options:
    options = inference_pb2.Options(
        sampling=_sampling(params),
        n=params.n or 1,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_string=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
    if params.HasField("max_tokens"):
        options.max_tokens = params.max_tokens
    if params.HasField("seed"):
        options.seed = params.seed % _SEEDS  # a negative one is as good as any
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            setattr(options, name, _count(getattr(params, name), f"{PARAMS}.{name}"))
    if params.HasField("truncate_prompt_tokens"):
        options.truncate_prompt_tokens = _kept(params.truncate_prompt_tokens, f"{PARAMS}.truncate_prompt_tokens")
    if (kind := params.WhichOneof("constraint")) is not None:
        options.grammar.CopyFrom(_GRAMMARS[kind](params))
    return options


def _sampling(params: vllm_engine_pb2.SamplingParams) -> generation_pb2.Sampling:
    for token_id in params.logit_bias:
        if token_id not in _IDS:
            raise invalid(f"{PARAMS}.logit_bias[{token_id}]", "an id is 0 or more")
    return generation_pb2.Sampling(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=min(params.top_k, _MAX_TOP_K),  # far past any vocabulary: off
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=dict(params.logit_bias),
    )


def _count(value: int, path: str) -> int:
    if value < 0:
        raise invalid(path, f"is {value}; say how many alternatives, 0 for the id's own alone: all are never told")
    return value


def _kept(value: int, path: str) -> int:
    if value < 1:
        raise invalid(path, f"is {value}; say how many of the prompt's last tokens are kept, 1 or more")
    return value


def _json_object(params: vllm_engine_pb2.SamplingParams) -> generation_pb2.Grammar:
    if not params.json_object:
        raise invalid(f"{PARAMS}.json_object", "is false; leave it out, or set it to true")
    return generation_pb2.Grammar(json_schema=ANY_OBJECT)


_GRAMMARS: dict[str, Callable[[vllm_engine_pb2.SamplingParams], generation_pb2.Grammar]] = {
    "json_schema": lambda params: generation_pb2.Grammar(json_schema=params.json_schema),
    "regex": lambda params: generation_pb2.Grammar(regex=params.regex),
    "grammar": lambda params: generation_pb2.Grammar(lark=ebnf.to_lark(params.grammar, f"{PARAMS}.grammar")),
    "structural_tag": lambda params: structural_tag.grammar(params.structural_tag, f"{PARAMS}.structural_tag"),
    "json_object": _json_object,
    "choice": lambda params: generation_pb2.Grammar(
        choices=generation_pb2.Grammar.Choices(values=params.choice.choices)
    ),
}
