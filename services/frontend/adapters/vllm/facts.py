"""What the adapter tells of the model and of this server."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from smg_grpc_proto import vllm_engine_pb2 as pb

from services.common import checkpoint
from services.frontend.request import EngineFacts, Sampling
from services.frontend.served_model import ServedModel

SERVER_TYPE = "vllm-grpc"
"""The contract's name for who serves it."""

_TOLD_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelFacts:
    """What the checkpoint says, read once. Raises StartError where it cannot be read."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        config = checkpoint.read_config(model.folder)
        # The folder is told: a gateway on the same machine reads the tokenizer there, any other one asks GetTokenizer.
        self._told = pb.GetModelInfoResponse(
            model_path=str(model.folder),
            tokenizer_path=str(model.folder),
            is_generation=True,
            served_model_name=model.name,
            model_type=config.model_type,
            architectures=config.architectures,
            eos_token_ids=sorted(model.eos_ids),
            pad_token_id=config.pad_token_id or 0,
            bos_token_id=config.bos_token_id or 0,
            default_sampling_params_json=_defaults(model.defaults),
        )

    def info(self, facts: EngineFacts) -> pb.GetModelInfoResponse:
        """With what the engine says."""
        told = pb.GetModelInfoResponse(
            max_context_length=facts.context_tokens,
            max_req_input_len=facts.context_tokens,
            vocab_size=self._model.vocab_size(facts),
        )
        told.MergeFrom(self._told)
        return told


def _defaults(defaults: Sampling) -> str:
    """Those of the checkpoint that are not what 0 or unset means anyway; "" where there are none."""
    neutral = asdict(Sampling())
    told = {
        name: value for name, value in asdict(defaults).items() if name in _TOLD_DEFAULTS and value != neutral[name]
    }
    return json.dumps(told, separators=(",", ":")) if told else ""


class ServerFacts:
    """Since when this server runs, and when it last heard of a request."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._received_unix_s = 0.0

    def received(self) -> None:
        """A Generate has come."""
        self._received_unix_s = time.time()

    def info(self, *, active_requests: int, facts: EngineFacts | None) -> pb.GetServerInfoResponse:
        """As it is now. What no frontend knows of an engine (its dtypes, its backend, its limits) is left unset."""
        return pb.GetServerInfoResponse(
            active_requests=active_requests,
            last_receive_timestamp=self._received_unix_s,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            block_size=facts.block_tokens if facts else 0,
            constrained_decoding_start="first_token",
        )
