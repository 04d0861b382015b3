"""The process that compiles grammars for a frontend: what one of them costs or breaks ends here, and can be ended.

    python -m services.frontend.grammar_worker FOLDER EOS_ID,EOS_ID MEMORY_BYTES

It reads messages Grammar from its standard input, each behind its length (4 bytes, little-endian), and answers each
with a line of JSON: null for one that compiles, else [field, description]. Its first line, before any, is null once it
is ready, else what is wrong with the tokenizer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from triptych.inference.v1 import generation_pb2

from services.common.dying import die_with
from services.common.errors import StartError
from services.common.grammar import GrammarError, from_proto
from services.common.grammar_compiler import Compiler

LENGTH_BYTES = 4


def main(folder: str, eos_ids: str, memory_bytes: str) -> None:
    """Serves until its input ends: the frontend has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the frontend decides
    if sys.platform == "linux":
        die_with(os.getppid())
    pipe_in, pipe_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        compiler = Compiler(Path(folder), [int(i) for i in eos_ids.split(",") if i])
    except StartError as error:
        print(json.dumps(["", str(error)]), file=pipe_out, flush=True)
        return
    _limit_memory(int(memory_bytes))
    print("null", file=pipe_out, flush=True)
    while (message := _read(pipe_in)) is not None:
        print(json.dumps(_verdict(compiler, message)), file=pipe_out, flush=True)


def _read(pipe: BinaryIO) -> bytes | None:
    head = pipe.read(LENGTH_BYTES)
    return pipe.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else None


def _verdict(compiler: Compiler, message: bytes) -> list[str] | None:
    try:
        grammar = from_proto(generation_pb2.Grammar.FromString(message))
        compiler.probe(grammar, compiler.compile(grammar))
    except GrammarError as error:
        return [error.field, error.description]
    return None


def _limit_memory(more_bytes: int) -> None:
    """Beyond what it has now; past it an allocation fails, and the process with it."""
    status = Path("/proc/self/status")
    if not status.is_file():  # no Linux: time alone is bounded
        return
    has_kib = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData:"))
    limit = 1024 * has_kib + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main(*sys.argv[1:4])
