"""Writes the generated pages of docs: `python -m services.cli.docs`.

docs/configuration.md from the config schemas, docs/metrics.md from the names, docs/api/*.md from the contracts.
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from services.cli import api_docs, metric_docs
from services.cli.parts import config_type
from services.common.config import HOST_PORT, SERVICES

PATH = Path(__file__).parents[2] / "docs" / "configuration.md"

_INTRO = """# Configuration

Generated from the schemas by `python -m services.cli.docs`; do not edit.

Each service has one frozen config object. Its values come from four places; later ones win:

1. the defaults below;
2. a YAML file, `--config FILE`, with one section a service;
3. the environment: `TRIPTYCH_`, the service, two underscores, the key, in capitals;
4. flags: the key with hyphens.

So the scheduler's `block_size` is `block_size:` under `scheduler:` in the file, `TRIPTYCH_SCHEDULER__BLOCK_SIZE` in the
environment, `--block-size` on the command line of `triptych scheduler` and `--scheduler.block-size` on that of
`triptych up`. A key that does not exist is an error in all four, and so is a value out of range. `--print-config`
prints every value with the place it came from, and ends.

```yaml
frontend:
  port: 50051
scheduler:
  max_num_seqs: 32
executor:
  threads: 4
```

`TRIPTYCH_CACHE` names the folder for the embedded model and compiled kernels; by default `triptych` under the user's
cache folder (`$XDG_CACHE_HOME`, else `~/.cache`). Models of a hub lie in the cache of the hub's client (`HF_HUB_CACHE`,
else `hub` under `HF_HOME`).
"""


def render() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *(section for name in SERVICES for section in _section(name))])


def _section(service: str) -> list[str]:
    lines = [f"## {service}", "", "| key | value | default | what it is |", "|---|---|---|---|"]
    for key, field in config_type(service).model_fields.items():
        lines.append(f"| `{key}` | {_value(field)} | {_default(field)} | {field.description} |")
    return [*lines, ""]


def _value(field: FieldInfo) -> str:
    limits = []
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            limits.append(f"from {limit.ge}")
        elif isinstance(limit, annotated_types.Gt):
            limits.append(f"over {limit.gt}")
        elif isinstance(limit, annotated_types.Le):
            limits.append(f"to {limit.le}")
        elif isinstance(limit, annotated_types.MinLen):
            limits.append("not empty")
        elif limit is HOST_PORT:
            limits.append("as HOST:PORT")
        else:
            raise TypeError(f"do not know how to put {limit!r} into words")
    return " ".join([_type(field.annotation), *limits])


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(_type(part) for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Annotated:
        part, *limits = typing.get_args(annotation)
        return f"{_type(part)}{' as HOST:PORT' * (HOST_PORT in limits)}"
    if typing.get_origin(annotation) is tuple:
        return f"list of {_type(typing.get_args(annotation)[0])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}[annotation]


def _default(field: FieldInfo) -> str:
    return "unset" if field.default is None else "none" if field.default == () else f"`{field.default}`"


def main() -> int:
    """Rewrites the pages."""
    pages = {PATH: render(), metric_docs.PATH: metric_docs.render()}
    pages |= {api_docs.path(name): api_docs.render(name) for name in api_docs.PAGES}
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
