"""What a NewRequest says about sampling, and the ranges that are checked again here."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from triptych.executor.v1 import executor_pb2
from triptych.inference.v1 import generation_pb2

from services.executor.sampling_params import SamplingParams


def test_every_field_is_taken_from_the_request() -> None:
    request = executor_pb2.NewRequest(
        sampling=generation_pb2.Sampling(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={9: -100.0, 3: -math.inf},
        ),
        seed=2**64 - 1,
        min_tokens=4,
        stop_ids=np.array([2, 300], dtype="<u4").tobytes(),
        logprobs=0,
    )
    assert SamplingParams.from_proto(request) == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((3, -math.inf), (9, -100.0)),
        seed=2**64 - 1,
        min_tokens=4,
        stop_ids=(2, 300),
        logprobs=0,
    )


def test_a_temperature_of_zero_is_not_an_unset_one() -> None:
    zero = executor_pb2.NewRequest(sampling=generation_pb2.Sampling(temperature=0))
    assert SamplingParams.from_proto(zero).temperature == 0
    unset = SamplingParams.from_proto(executor_pb2.NewRequest())
    assert unset == SamplingParams() and unset.temperature == 1 and not unset.logprobs


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", -0.1, "temperature is -0.1"),
        ("temperature", 100.5, "temperature is 100.5"),
        ("temperature", math.nan, "temperature is nan"),
        ("top_p", 0.0, "top_p is 0"),
        ("top_p", 1.1, "top_p is 1.1"),
        ("top_p", math.nan, "top_p is nan"),
        ("min_p", -0.1, "min_p is -0.1"),
        ("min_p", 1.1, "min_p is 1.1"),
        ("top_k", -2, "top_k is -2"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0"),
        ("repetition_penalty", 10.5, "repetition_penalty is 10.5"),
        ("repetition_penalty", math.inf, "repetition_penalty is inf"),
        ("presence_penalty", 2.5, "presence_penalty is 2.5"),
        ("frequency_penalty", -2.5, "frequency_penalty is -2.5"),
        ("frequency_penalty", math.nan, "frequency_penalty is nan"),
        ("logit_bias", ((100, 1.0),), "logit_bias[100] ids lie below the vocabulary size, 100"),
        ("logit_bias", ((2**32 - 1, 1.0),), "logit_bias[4294967295] ids lie below"),
        ("logit_bias", ((1, 101.0),), "logit_bias[1] is 101, not in"),
        ("logit_bias", ((1, math.inf),), "logit_bias[1] is inf, not in"),
        ("logit_bias", ((1, math.nan),), "logit_bias[1] is nan, not in"),
        ("stop_ids", (5, 100), "stop_ids holds id 100"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        SamplingParams(**{field: value}).check(vocab_size=100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_p", 1.0),
        ("min_p", 1.0),
        ("top_k", -1),
        ("top_k", 2**31 - 1),
        ("repetition_penalty", 10.0),
        ("presence_penalty", -2.0),
        ("logit_bias", ((99, 100.0), (98, -100.0), (0, -math.inf))),
        ("stop_ids", (0, 99)),
    ],
)
def test_the_ends_of_a_range_belong_to_it(field: str, value: Any) -> None:
    SamplingParams(**{field: value}).check(vocab_size=100)
