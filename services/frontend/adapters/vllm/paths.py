"""Names of fields: an error of our own door names our field, and is told with the one that the caller knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from smg_grpc_proto import vllm_engine_pb2

from services.common.errors import RequestError, Violation

PARAMS = "sampling_params"

# The first that matches wins; what follows the match stays.
_NAMES = (
    (r"token_ids(\.ids)?", "tokenized.input_ids"),
    (r"options\.sampling", PARAMS),
    (r"options\.grammar\.choices(\.values)?", f"{PARAMS}.choice.choices"),
    (r"options\.grammar(\.\w+)?", f"{PARAMS}.{{constraint}}"),
    (r"options\.include_stop_string", f"{PARAMS}.include_stop_str_in_output"),
    (r"options\.label", "request_id"),
    (r"options", PARAMS),
)
_PATTERNS = tuple((re.compile(rf"{ours}(?=[.\[]|$)"), theirs) for ours, theirs in _NAMES)


def theirs(path: str, constraint: str = "grammar") -> str:
    """The adapter's name of a field of our own API; any other name stays. `constraint` is what the request has."""
    for pattern, name in _PATTERNS:
        if found := pattern.match(path):
            return name.format(constraint=constraint) + path[found.end() :]
    return path


@contextmanager
def named_as_theirs(request: vllm_engine_pb2.GenerateRequest) -> Iterator[None]:
    """Around what may raise a RequestError about a request of the adapter's."""
    try:
        yield
    except RequestError as error:
        constraint = request.sampling_params.WhichOneof("constraint")
        raise _renamed(error, constraint or "constraint") from error


def _renamed(error: RequestError, constraint: str) -> RequestError:
    violations = tuple(Violation(theirs(each.field, constraint), each.description) for each in error.violations)
    message = error.message
    for old, new in zip(error.violations, violations, strict=True):
        if message.startswith(old.field):  # as `invalid` and `unserved` write it
            message = new.field + message.removeprefix(old.field)
            break
    return RequestError(error.code, error.reason, message, violations=violations, retry_after_s=error.retry_after_s)
