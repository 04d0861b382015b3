"""What was found, as data; and as text of 80 columns, or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

COLUMNS = 80

Level = Literal["ok", "note", "fault"]
"""A note is worth knowing; a fault is a reason why the model cannot be served here."""


@dataclass(frozen=True)
class Finding:
    """One line. `facts` are its figures for programs, units in the keys."""

    name: str
    text: str
    level: Level = "ok"
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Findings under one heading."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """All of it."""

    sections: tuple[Section, ...]

    @property
    def reasons(self) -> list[str]:
        """Why the model cannot be served here; none where it can."""
        return [
            f"{one.name}: {one.text}" for section in self.sections for one in section.findings if one.level == "fault"
        ]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "servable": not self.reasons,
            "reasons": self.reasons,
            "sections": {
                section.title: {
                    one.name: {"level": one.level, "text": one.text, **one.facts} for one in section.findings
                }
                for section in self.sections
            },
        }

    def as_text(self) -> str:
        """For people."""
        width = max(len(one.name) for section in self.sections for one in section.findings)
        lines: list[str] = []
        for section in self.sections:
            lines += [section.title, *(line for one in section.findings for line in _lines(one, width)), ""]
        if not self.reasons:
            return "\n".join([*lines, "The model can be served here."])
        lines.append("The model cannot be served here:")
        return "\n".join([*lines, *(line for reason in self.reasons for line in _wrapped(reason, "  - "))])


def _lines(finding: Finding, width: int) -> list[str]:
    mark = {"ok": "", "note": "note", "fault": "FAULT"}[finding.level]
    return _wrapped(finding.text, f"  {mark:<5} {finding.name:<{width}}  ")


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    ) or [head.rstrip()]
