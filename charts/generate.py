"""Writes charts/triptych/values.schema.json and README.md of values.yaml and of the services' own configuration.

python -m charts.generate

A key of values.yaml has its description above it, in a comment that begins with `# --`. What a default does not say of
a value (its range, its choices) stands in RULES below; keys below `config` are those of services/*/config.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from services.cli.parts import config_type

CHART = Path(__file__).parent / "triptych"

OWNED = {
    "host": "listen.host",
    "port": "the chart",
    "model": "model",
    "revision": "model.hub.revision",
    "offline": "model.hub",
    "drain_s": "drainSeconds",
    "engine": "the chart",
    "more_engines": "engine.replicas",
    "executor": "the chart",
    "workers": "frontend.workers",
    "served_model_name": "model.servedName",
    "served_model_alias": "model.aliases",
    "tp_size": "engine.tpSize",
    "tp_rank": "the chart",
    "tp_rendezvous": "the chart",
    "device": "executor.device",
    "log_format": "logs.format",
    "log_level": "logs.level",
    "metrics_port": "metrics.enabled",
    "metrics_host": "listen.host",
    "otlp_endpoint": "tracing.otlpEndpoint",
    "tls_cert": "tls",
    "tls_key": "tls",
    "tls_client_ca": "tls",
    "tls_client_names": "tls.internal",
    "peer_ca": "tls.internal",
    "peer_cert": "tls.internal",
    "peer_key": "tls.internal",
    "peer_server_name": "tls.internal",
    "health_port": "tls",
    "auth": "auth.method",
    "auth_tokens": "auth.tokensSecret",
    "auth_names": "auth.namesSecret",
    "jwt_issuer": "auth.jwt.issuer",
    "jwt_audience": "auth.jwt.audience",
    "jwt_keys": "auth.jwt.keys",
}
"""Keys of a service's configuration that a value of the chart decides, and which one."""

WHOLE = {"type": "integer", "minimum": 1}
COUNT = {"type": "integer", "minimum": 0}
SECONDS = {"type": "integer", "minimum": 0, "maximum": 86400}
GRACE = {"type": ["integer", "null"], "minimum": 1}
NAME = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}
TAG = {"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$", "not": {"const": "latest"}}
DIGEST = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
ENVIRONMENT = {"type": "array", "items": {"type": "object", "required": ["name"]}}
OBJECTS = {"type": "array", "items": {"type": "object"}}
TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
FREE = {"type": "object"}

RULES: dict[str, dict[str, Any]] = {
    "imagePullSecrets": TEXTS,
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "*.tag": TAG,
    "*.digest": DIGEST,
    "*.repository": {"type": "string", "minLength": 1, "pattern": "^[a-z0-9]+([._/-][a-z0-9]+)*$"},
    "model.aliases": TEXTS,
    "model.volume.path": {"type": "string", "not": {"pattern": "(^|/)\\.\\.(/|$)"}},
    "model.volume.hostPath": {"type": "string", "pattern": "^(/.*)?$"},
    "model.volume.claim.sizeGi": WHOLE,
    "model.volume.claim.accessModes": {
        "type": "array",
        "minItems": 1,
        "items": {"enum": ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]},
    },
    "model.hub.id": {"type": "string", "pattern": "^([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)?$"},
    "frontend.workers": {"type": "integer", "minimum": 1, "maximum": 256},
    "*.drainSeconds": SECONDS,
    "*.preStopSeconds": {"type": "integer", "minimum": 1, "maximum": 3600},
    "*.terminationGracePeriodSeconds": GRACE,
    "*.startupSeconds": {"type": "integer", "minimum": 5, "maximum": 86400},
    "frontend.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "frontend.service.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "frontend.autoscaling.targetCPUUtilizationPercentage": {"type": "integer", "minimum": 1, "maximum": 100},
    "*.maxUnavailable": WHOLE,
    "*.minReplicas": WHOLE,
    "*.maxReplicas": WHOLE,
    "*.replicas": WHOLE,
    "*.extraEnv": ENVIRONMENT,
    "*.tolerations": OBJECTS,
    "*.topologySpreadConstraints": OBJECTS,
    "*.podAnnotations": LABELS,
    "*.podLabels": LABELS,
    "*.annotations": LABELS,
    "*.labels": LABELS,
    "commonLabels": LABELS,
    "commonAnnotations": LABELS,
    "*.nodeSelector": LABELS,
    "*.affinity": FREE,
    "podSecurityContext": FREE,
    "engine.tpSize": {"type": "integer", "minimum": 1, "maximum": 64},
    "engine.ranksIn": {"enum": ["pod", "pods"]},
    "engine.autoscaling.waitingRequests": WHOLE,
    "engine.autoscaling.cooldownSeconds": SECONDS,
    "scheduler.cpus": WHOLE,
    "executor.device": {"enum": ["cpu", "cuda"]},
    "executor.gpus": {"type": "integer", "minimum": 0, "maximum": 64},
    "executor.cpusPerRank": WHOLE,
    "*.memoryMi": {"type": "integer", "minimum": 64},
    "executor.shmMi": {"type": "integer", "minimum": 64},
    "*.cacheMi": {"type": "integer", "minimum": 64},
    "listen.host": {"type": "string", "pattern": "^[0-9a-fA-F:.]+$"},
    "logs.format": {"enum": ["json", "text"]},
    "logs.level": {"enum": ["debug", "info", "warning", "error"]},
    "metrics.serviceMonitor.intervalSeconds": WHOLE,
    "auth.method": {"enum": ["", "tokens", "jwt", "mtls"]},
    "auth.jwt.keys": {"type": "string", "pattern": "^(https://.+)?$"},
    "tls.public.certificate.dnsNames": TEXTS,
    "tls.issuer.kind": {"enum": ["Issuer", "ClusterIssuer"]},
    "tls.issuer.durationHours": {"type": "integer", "minimum": 2},
    "networkPolicy.clients": OBJECTS,
    "networkPolicy.monitoring": OBJECTS,
    "test.timeoutSeconds": WHOLE,
}
"""By path, or by `*.` and a path's last part."""

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):")

_HEAD = """# Triptych's Helm chart

Written by `python -m charts.generate`; do not edit. How to install it, and what it makes, is told in
[docs/deploy.md](../../docs/deploy.md); whole examples are in [examples](examples).

    helm install chat charts/triptych -f charts/triptych/examples/one-cpu-node.yaml
    helm test chat --logs

A value that does not exist, or is out of range, is refused by the schema, and values that do not go together by the
chart, with what to set instead.

| value | default | what it is |
|---|---|---|
"""


def schema() -> dict[str, Any]:
    """Of values.yaml, draft 7; every key is known."""
    root = _object(_values(), "")
    root["properties"]["global"] = {"type": "object"}  # Helm hands it to every chart
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart triptych", **root}


def readme() -> str:
    """A row for each value that can be set."""
    told = _descriptions()
    rows = [
        f"| `{path}` | `{json.dumps(value)}` | {told[path]} |"
        for path, value in _leaves(_values(), told)
        if path in told
    ]
    return _HEAD + "\n".join(rows) + "\n"


def paths() -> list[str]:
    """Of every value that can be set."""
    return [path for path, _ in _leaves(_values(), _descriptions())]


def write() -> None:
    """Both files."""
    (CHART / "values.schema.json").write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    (CHART / "README.md").write_text(readme(), encoding="utf-8")


def _values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return loaded


def _object(values: dict[str, Any], path: str) -> dict[str, Any]:
    properties = {key: _schema_of(value, f"{path}.{key}".lstrip(".")) for key, value in values.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema_of(value: Any, path: str) -> dict[str, Any]:
    service, _, key = path.partition(".")
    if key == "config":
        return _config(service)
    last = path.rpartition(".")[2]
    if (rule := RULES.get(path) or RULES.get(f"*.{last}")) is not None:
        return rule
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, str):
        return (
            NAME
            if last in ("name", "secretName", "clientSecretName", "existingClaim", "cacheClaim", "priorityClassName")
            else {"type": "string"}
        )
    if isinstance(value, dict) and value:
        return _object(value, path)
    raise ValueError(f"{path}: its default, {value!r}, does not tell its type; add it to RULES")


def _config(service: str) -> dict[str, Any]:
    described = config_type(service).model_json_schema()
    properties = {}
    for key, field in described["properties"].items():
        if key in OWNED:
            continue
        kept = {name: part for name, part in field.items() if name not in ("default", "title", "format")}
        # null takes away what values.yaml sets.
        properties[key] = kept if "anyOf" in kept else {"anyOf": [kept, {"type": "null"}]}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _leaves(values: dict[str, Any], told: dict[str, str], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value and here not in told:
            found += _leaves(value, told, here)
        else:
            found.append((here, value))
    return found


def _descriptions() -> dict[str, str]:
    """By path: the comment above a key."""
    told: dict[str, str] = {}
    path: list[str] = []
    comment = ""
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("# --"):
            comment = line.strip().removeprefix("# --").strip().replace("|", "\\|")
        elif (match := _KEY.match(line)) is not None:
            path[len(match["indent"]) // 2 :] = [match["key"]]
            if comment:
                told[".".join(path)] = comment
            comment = ""
    return told


if __name__ == "__main__":
    write()
