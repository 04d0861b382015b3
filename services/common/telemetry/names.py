"""All names that telemetry tells: of spans, their attributes, metrics and their labels.

They follow the OpenTelemetry conventions (GenAI, RPC) where these have a name, and else vLLM's words under our prefix.
Times are in seconds.
"""

from __future__ import annotations

# -- spans and their attributes

# -- metrics and their labels
