"""A process that renders chat templates: a template is a program, and one that does not end is ended from outside.

Messages are JSON behind its length, 4 bytes big-endian. The first, {"templates": {name: source}, "memory_bytes": n}, is
answered by {}; then {"template": name, "variables": {...}, "characters": n} by one of {"text": ...}, {"refused": what
the template said}, {"failed": the exception's name} and {"too_large": true}.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from services.common.dying import die_with
from services.frontend.chat_template import ChatTemplate, RefusalError, TooLargeError

LENGTH = struct.Struct(">I")


def main(parent_pid: int) -> None:
    """Serves its standard input until that ends."""
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the frontend, which ends this
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = _read(source)
    if first is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    templates = {name: ChatTemplate(text) for name, text in first["templates"].items()}
    _write(sink, {})
    while (job := _read(source)) is not None:
        _write(sink, _answer(templates[job["template"]], job))


def _answer(template: ChatTemplate, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": template.render(job["variables"], job["characters"])}
    except TooLargeError:
        return {"too_large": True}
    except RefusalError as error:
        return {"refused": template.own_words(str(error))}
    except Exception as error:  # whatever a template raises is its answer to these messages
        return {"failed": type(error).__name__}


def _read(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(source.read(*LENGTH.unpack(head)))
    return message


def _write(sink: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    sink.write(LENGTH.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
