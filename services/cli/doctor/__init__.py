"""`triptych doctor`: whether a model can be served on this machine, and if not, why."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.cli import up_plan
from services.cli.doctor import cuda, machine, model, ports
from services.cli.doctor.findings import Report
from services.common.config import SERVICES
from services.common.errors import StartError

_EPILOG = """Takes the options of `triptych up`, --scheduler.block-size 32 for example, and checks what that would
start. Exit code 0: the model can be served here; 1: it cannot, and the reasons are printed."""


def run(argv: Sequence[str]) -> int:
    """Prints the report to standard output."""
    parser = argparse.ArgumentParser(prog="triptych doctor", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
    up_plan.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; units are in its keys")
    own, passed = up_plan.split(argv)
    options = parser.parse_args(own)
    with _quiet():
        report = _examine({name: up_plan.flags_of(name, options, passed) for name in SERVICES})
    print(json.dumps(report.as_json(), indent=2) if options.json else report.as_text())
    return 1 if report.reasons else 0


def _examine(flags: dict[str, list[str]]) -> Report:
    try:
        resolved, reason = up_plan.resolve_all(flags), ""
    except StartError as error:  # of a config, or an extra without which it cannot even be read
        resolved, reason = {}, str(error)
    ranks = resolved["executor"].config.model_dump()["tp_size"] if resolved else 1
    sections = [machine.cpu(), machine.limits(ranks), machine.packages(), cuda.section()]
    if reason:
        return Report((*sections, model.unread(reason)))
    return Report((*sections, ports.section(resolved), *model.sections(resolved)))


@contextmanager
def _quiet() -> Iterator[None]:
    """The report says what the services would log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
