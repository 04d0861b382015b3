"""The kinds of fault that have broken serving engines, each with an id. A row that is served has tests named after it.

`later` holds the rows of capabilities that are not built yet; moving a row out of it makes its tests due.
"""

from __future__ import annotations

ROWS: dict[str, str] = {
    "T1": "a prompt that ends inside a UTF-8 character",
    "T2": "characters split over several tokens",
    "T3": "an id outside the vocabulary from the executor",
    "T4": "tokenizers that mark word starts",
    "T5": "a tokenizer that raises in the middle of a stream",
    "T6": "a stop string that starts or ends inside a token, or spans many",
    "T7": "text held back as a possible stop at EOS, length, cancel",
    "T8": "an empty stop string",
    "T9": "user text that spells a control token",
    "T10": "no chat template, or one that refuses",
    "T11": "BOS from both template and tokenizer",
    "T12": "a 20 MB prompt beside other requests",
    "S1": "id-valued fields out of range",
    "S2": "tiny temperatures",
    "S3": "top_k at its edges",
    "S4": "penalties with prompts of different lengths",
    "S5": "seeds alone, in a batch, after a preemption",
    "S6": "max_tokens and prompts at their edges",
    "S7": "prompts at the context limit",
    "S8": "huge n, logprobs, stops, biases",
    "K1": "a prompt larger than the KV pool",
    "K2": "prompts around a block boundary, twice",
    "K3": "a stream preempted twice or more",
    "K4": "one huge prompt before small ones",
    "K5": "2,000 requests that finish, abort and fail at random",
    "K6": "random events never leave an idle engine with work it could do",
    "K7": "salts, adapters and tenants never share blocks",
    "C1": "a cancel in every phase",
    "C2": "client ids used twice, aborts of anything",
    "C3": "deadlines near the median latency",
    "G1": "exactly one end of a stream, however it ends",
    "G2": "usage equals the ids, however they were cut",
    "G3": "a full queue",
    "G4": "pings and silence",
    "G5": "a handler that waits when an abort or a shutdown comes",
    "G6": "message limits",
    "G7": "servers that come and go behind one channel",
    "X1": "schemas that do not compile",
    "X2": "an exception in a step, out of memory",
    "X3": "an executor frozen or killed in a step",
    "X4": "several EOS ids; ignore_eos",
    "X5": "tied embeddings with and without the head in the file",
    "X6": "head_dim apart from hidden/heads; heads that do not divide",
    "X7": "no pad token",
    "X8": "offsets past 2^31 elements",
    "P1": "frozen services and the frontend's health",
    "P2": "SIGTERM with a long stream running",
    "P3": "tensor parallelism on Kubernetes without /dev/shm",
    "P4": "trace context through three services",
    "P5": "no pickle, no open listeners",
    "P6": "read-only roots and mismatched CUDA",
}

_LATER = ""
LATER: frozenset[str] = frozenset(_LATER.split())
