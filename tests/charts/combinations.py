"""Values that operators combine, each with the cluster it is for. The first FEW cover every template."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.helm import CHART, Cluster

KEDA = "keda.sh/v1alpha1"
PROMETHEUS = "monitoring.coreos.com/v1"
LEADER_WORKER_SET = "leaderworkerset.x-k8s.io/v1"
CERT_MANAGER = "cert-manager.io/v1"

HUB = {"hub": {"id": "org/model"}}
CLAIM = {"volume": {"existingClaim": "checkpoints", "path": "small"}}


@dataclass(frozen=True)
class Combination:
    """Values, and a cluster."""

    values: dict[str, Any]
    cluster: Cluster = field(default_factory=Cluster)


def _example(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(Path(CHART / "examples" / name).read_text())
    return loaded


def _of(*, on: str = "1.33.0", serves: tuple[str, ...] = (), **values: Any) -> Combination:
    return Combination({"model": CLAIM, **values}, Cluster(on, serves))


CUDA = {"device": "cuda", "gpus": 1}
ALL_METRICS: dict[str, Any] = {
    "enabled": True,
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
}

COMBINATIONS: dict[str, Combination] = {
    "example-one-cpu-node": Combination(_example("one-cpu-node.yaml")),
    "example-eight-gpu-node": Combination(_example("eight-gpu-node.yaml")),
    "example-fleet": Combination(_example("fleet.yaml"), Cluster("1.33.0", (KEDA, PROMETHEUS))),
    "ranks-in-pods-of-statefulsets": _of(engine={"ranksIn": "pods", "tpSize": 2, "replicas": 2}, on="1.29.0"),
    "ranks-in-pods-of-leaderworkerset": _of(
        engine={"ranksIn": "pods", "tpSize": 4, "replicas": 2, "topologyKey": "topology.kubernetes.io/zone"},
        executor=CUDA,
        metrics={"enabled": True},
        serves=(LEADER_WORKER_SET,),
        on="1.37.0",
    ),
    "scaled-frontends": _of(
        engine={"replicas": 2},
        frontend={"autoscaling": {"enabled": True}},
        tracing={"otlpEndpoint": "http://otel:4317"},
    ),
    # -- the rest is for the slow tier
    "hub": Combination({"model": HUB}),
    "hub-revision": Combination({"model": {"hub": {"id": "org/model", "revision": "0123abc"}}}),
    "hub-token": Combination({"model": {"hub": {"id": "org/model", "tokenSecret": {"name": "hub", "key": "t"}}}}),
    "hub-mirror": Combination({"model": {"hub": {"id": "org/model", "endpoint": "https://hub.example.com"}}}),
    "hub-cache-claim": Combination({"model": {"hub": {"id": "org/model", "cacheClaim": "cache"}}}),
    "hub-ranks": Combination({"model": HUB, "engine": {"ranksIn": "pods", "tpSize": 2}}),
    "claim": _of(),
    "host-path": Combination({"model": {"volume": {"hostPath": "/srv/models", "path": "a/b"}}}),
    "own-claim": Combination({"model": {"volume": {"claim": {"create": True, "storageClass": "nfs"}, "path": "m"}}}),
    "oldest-cluster": _of(on="1.29.0"),
    "cluster-1.30": _of(on="1.30.0", frontend={"preStopSeconds": 30}),
    "newest-cluster": _of(on="1.37.0"),
    "three-engines": _of(engine={"replicas": 3}),
    "cpu-ranks": _of(engine={"tpSize": 2}, executor={"cpusPerRank": 4, "shmMi": 256}),
    "one-gpu": _of(executor=CUDA),
    "other-gpus": _of(executor={**CUDA, "gpuResource": "amd.com/gpu"}),
    "runtime-class": _of(executor=CUDA, engine={"runtimeClassName": "nvidia", "priorityClassName": "high"}),
    "workers": _of(frontend={"workers": 4}),
    "gpu-ranks": _of(engine={"tpSize": 4}, executor={"device": "cuda", "gpus": 4}),
    "ranks-in-pods-of-one-engine": _of(engine={"ranksIn": "pods", "tpSize": 2}),
    "keda-absent": _of(engine={"autoscaling": {"enabled": True}}, metrics={"enabled": True}),
    "keda-query": _of(
        engine={"autoscaling": {"enabled": True, "query": "sum(x)", "maxReplicas": 9}},
        metrics={"enabled": True},
        serves=(KEDA,),
    ),
    "keda-leaderworkerset": _of(
        engine={"ranksIn": "pods", "tpSize": 2, "autoscaling": {"enabled": True}},
        metrics={"enabled": True},
        serves=(KEDA, LEADER_WORKER_SET),
    ),
    "leaderworkerset-left": _of(
        engine={"ranksIn": "pods", "tpSize": 2, "leaderWorkerSet": False, "topologyKey": "zone"},
        serves=(LEADER_WORKER_SET,),
    ),
    "metrics": _of(metrics={"enabled": True}),
    "metrics-all": _of(metrics=ALL_METRICS, serves=(PROMETHEUS,)),
    "metrics-without-operator": _of(metrics=ALL_METRICS),
    "metrics-ranks": _of(
        metrics=ALL_METRICS, engine={"ranksIn": "pods", "tpSize": 2}, serves=(PROMETHEUS,), on="1.31.0"
    ),
    "tls-public": _of(tls={"public": {"secretName": "front"}}),
    "tls-clients": _of(tls={"public": {"secretName": "front", "clientCertificates": True}}, metrics={"enabled": True}),
    "tls-internal": _of(
        tls={"internal": {"enabled": True, "secretNames": {"frontend": "f", "scheduler": "s", "executor": "e"}}}
    ),
    "tls-cert-manager": _of(
        tls={
            "public": {"certificate": {"create": True, "dnsNames": ["llm.example.com"]}},
            "internal": {"enabled": True, "certificates": {"create": True}},
            "issuer": {"name": "internal-ca", "kind": "ClusterIssuer"},
        },
        engine={"ranksIn": "pods", "tpSize": 2},
        serves=(CERT_MANAGER,),
    ),
    "tls-everywhere": _of(
        tls={
            "public": {"secretName": "front"},
            "internal": {"enabled": True, "secretNames": {"frontend": "f", "scheduler": "s", "executor": "e"}},
        },
    ),
    "auth-tokens": _of(
        auth={"method": "tokens", "tokensSecret": {"name": "hashes"}}, test={"tokenSecret": {"name": "token"}}
    ),
    "auth-jwt": _of(
        auth={
            "method": "jwt",
            "jwt": {"issuer": "https://id", "audience": "llm", "keys": "https://id.example.com/jwks"},
        },
        frontend={"config": {"jwt_tenant_claim": "org", "tenant_requests_per_s": 5}},
    ),
    "auth-mtls": _of(
        auth={"method": "mtls", "namesSecret": {"name": "names"}},
        tls={"public": {"secretName": "front", "clientCertificates": True}},
        test={"clientSecretName": "client"},
    ),
    "no-network-policy": _of(networkPolicy={"enabled": False}),
    "network-policy": _of(
        networkPolicy={
            "clients": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
            "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
        metrics={"enabled": True},
    ),
    "node-port": _of(frontend={"service": {"type": "NodePort", "port": 443, "annotations": {"a": "b"}}}),
    "digests": _of(
        frontend={"image": {"digest": "sha256:" + "a" * 64}},
        scheduler={"image": {"tag": "1.2.3"}},
        image={"registry": "registry.example.com/llm", "pullPolicy": "Always"},
        imagePullSecrets=["one", "two"],
    ),
    "names": _of(
        fullnameOverride="an-exceedingly-long-name-for-any-release-of-a-chart",
        commonLabels={"team": "llm"},
        commonAnnotations={"owner": "platform"},
        serviceAccount={"create": False, "name": "existing"},
    ),
    "configured": _of(
        frontend={
            "config": {"max_prompt_bytes": 10485760, "max_message_bytes": 16777216, "max_connection_age_s": None},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [],
        },
        scheduler={"config": {"prefix_cache": False, "kv_dtype": "int8", "max_waiting_tokens": 40000000}},
        executor={"config": {"kv_memory_bytes": 8589934592, "threads": 2}, "extraEnv": [{"name": "A", "value": "b"}]},
    ),
    "openshift": _of(
        podSecurityContext={"runAsUser": None, "runAsGroup": None, "fsGroup": None, "fsGroupChangePolicy": None}
    ),
    "logs": _of(logs={"format": "text", "level": "debug"}),
    "ipv6": _of(listen={"host": "::"}),
    "drains": _of(
        frontend={"drainSeconds": 600, "terminationGracePeriodSeconds": 900},
        scheduler={"drainSeconds": 300},
        engine={"terminationGracePeriodSeconds": 400, "podDisruptionBudget": {"enabled": False}, "replicas": 2},
    ),
}

FEW = list(COMBINATIONS)[:6]
