"""The `triptych` command: looks up the subcommand, hands it the rest of the line, and turns errors into one line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from services.cli.parts import config_type, missing, part
from services.common import collector, logs, writable
from services.common.config import SERVICES, resolve
from services.common.errors import StartError

COMMANDS = {
    "up": "start frontend, scheduler and executor on this machine",
    "frontend": "run the frontend: text in, text out",
    "scheduler": "run the scheduler: requests and KV blocks",
    "executor": "run the executor: weights and tensors",
    "chat": "talk to a model",
    "generate": "continue a raw prompt",
    "gateway": "serve HTTP: run the SMG gateway before a frontend",
    "top": "watch engines: requests, KV, steps, latencies, live",
    "log-level": "set how much running services log",
    "replay": "run the scheduler's core over what --record wrote",
    "model": "fetch, list and verify models",
    "doctor": "say whether a model can be served on this machine, and why not",
}

_WITHOUT_ALGEBRA = ("frontend", "scheduler")
"""These use numpy for columns of ids, and need no thread a CPU, which its OpenBLAS makes as it is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 1 where it could not serve, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except StartError as error:
        logs.fatal(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # who reads our output has left; keeps the interpreter's flush at exit quiet
        return 1


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(f"triptych {version('triptych')}")
        return 0
    if name in SERVICES:
        return _serve(name, rest)
    if name in COMMANDS:
        result: int = importlib.import_module(f"services.cli.{name.replace('-', '_')}").run(rest)
        return result
    return _unknown(name)


def _serve(name: str, arguments: Sequence[str]) -> int:
    resolve(config_type(name), arguments)  # --help and wrong flags are answered before torch is imported
    collector.hold()
    if name == "executor":
        writable.require()  # numba, which it imports, needs a folder
    if name in _WITHOUT_ALGEBRA:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    module = part(f"services.{name}.main", extra=name, what=f"the {name}")
    try:
        result: int = module.main(arguments)
    except ModuleNotFoundError as error:  # of what the service itself imports late
        raise missing(error, extra=name, what=f"the {name}") from error
    return result


def _help() -> str:
    lines = ["usage: triptych COMMAND [OPTIONS]", "", "An LLM serving engine in three gRPC services.", ""]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [*lines, "", "`triptych COMMAND --help` tells a command's options; `triptych --version` the version."]
    )


def _unknown(name: str) -> int:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; commands: {', '.join(COMMANDS)}"
    print(f"triptych: error: unknown command {name!r}{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
