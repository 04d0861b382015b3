"""Doors of the contracts: what a message holds beyond what is served is refused with UNIMPLEMENTED, never ignored."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.common.errors import unserved

PROTOCOL_VERSION = 1
"""The version of the two internal contracts that this code speaks; the hellos carry a range."""

GRAMMAR = "grammar"
"""A feature of the hellos: between frontend and scheduler Submit.grammar, between scheduler and executor masks and
forced ids."""
TRACE_CONTEXT = "trace-context"
"""Feature of an engine: Submit's traceparent and tracestate; of an executor: StepPlan's traceparent and
clock_offset_ns."""
UNCOUNTED = "uncounted"
"""Feature of an executor: StepPlan's uncounted_slots."""
LOG_LEVEL = "log-level"
"""Feature of an executor: Utility.set_log_level."""
CLOCK_OFFSET = "clock-offset"
"""Feature of an engine: Submit's clock_offset_ns."""
RESUME = "resume"
"""Feature of an engine: Submit.resumed."""

SAMPLING = "triptych.inference.v1.Sampling"
SERVED_SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "banned_token_ids",
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    }
)
"""Fields of Sampling served; the same at all three doors, since it travels through them unread."""


SERVED_GRAMMAR = {
    "triptych.inference.v1.Grammar": frozenset(
        {"json_schema", "regex", "lark", "choices", "structural_tags", "forced_tokens"}
    ),
    "triptych.inference.v1.Grammar.Choices": frozenset({"values"}),
    "triptych.inference.v1.Grammar.StructuralTags": frozenset({"tags", "required", "single", "text_until"}),
    "triptych.inference.v1.Grammar.Tag": frozenset({"begin", "json_schema", "end", "trigger"}),
}
"""Messages of a grammar and their fields served, at the frontend's door and the scheduler's."""


class Door:
    """The fields served, by message type; every other field that is set is refused by its path.

    `served` maps a message's full name ("triptych.inference.v1.Options") to its served field names. A message type that
    is not named serves no field, so a field added to a contract is refused until it is served here.
    """

    def __init__(self, served: Mapping[str, frozenset[str]]) -> None:
        self._served = served

    def serves(self, message: str, field: str) -> bool:
        """Whether a field is let through; `message` is the full name of its type."""
        return field in self._served.get(message, ())

    def check(self, message: Message, path: str = "") -> None:
        """Raises RequestError(UNIMPLEMENTED) naming the first field that is set and not served, or not known."""
        known = self._served.get(message.DESCRIPTOR.full_name, frozenset())
        for field, value in message.ListFields():
            where = f"{path}.{field.name}" if path else field.name
            if field.name not in known:
                raise unserved(where)
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                for i, item in enumerate(value):
                    self.check(item, f"{where}[{i}]")
            else:
                self.check(value, where)
        self._refuse_unknown(message, path)

    @staticmethod
    def _refuse_unknown(message: Message, path: str) -> None:
        unknown = UnknownFieldSet(message)
        if len(unknown):
            number = unknown[0].field_number
            where = f"{path}.{number}" if path else str(number)
            raise unserved(where, f"is a field number that {message.DESCRIPTOR.full_name} does not have here")
