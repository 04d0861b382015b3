"""Values that do not fit are refused, with the value, and what to set."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.combinations import CERT_MANAGER, KEDA
from tests.support import helm

MODEL = {"volume": {"existingClaim": "checkpoints", "path": "small"}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": {}}, "no model: set model.hub.id"),
    "two models": ({"model": {**MODEL, "hub": {"id": "a/b"}}}, "set one of them"),
    "no volume": ({"model": {"volume": {"path": "a"}}}, "with 0 volumes"),
    "two volumes": (
        {"model": {"volume": {"path": "a", "hostPath": "/srv", "existingClaim": "b"}}},
        "with 2 volumes (existingClaim, hostPath)",
    ),
    "a hub and a volume": ({"model": {"hub": {"id": "a/b"}, "volume": {"hostPath": "/srv"}}}, "leave it out"),
    "gpus for a cpu": ({"executor": {"gpus": 1}}, "executor.gpus is 1, but executor.device is cpu"),
    "too few gpus": (
        {"executor": {"device": "cuda", "gpus": 1}, "engine": {"tpSize": 2}},
        "executor.gpus is 1, but a pod has 2 ranks (engine.tpSize 2, engine.ranksIn pod); each takes one GPU, set 2",
    ),
    "one rank in pods": ({"engine": {"ranksIn": "pods"}}, "set ranksIn to pod"),
    "engines that scale unseen": (
        {"engine": {"autoscaling": {"enabled": True}}},
        "needs metrics.enabled",
    ),
    "ranks that scale apart": (
        {
            "engine": {"autoscaling": {"enabled": True}, "ranksIn": "pods", "tpSize": 2},
            "metrics": {"enabled": True},
        },
        "needs a cluster with LeaderWorkerSet",
    ),
    "fewest over most": (
        {"frontend": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 3}}},
        "minReplicas is 5, over maxReplicas, 3",
    ),
    "a monitor of nothing": ({"metrics": {"serviceMonitor": {"enabled": True}}}, "needs metrics.enabled"),
    "tls without a secret": ({"tls": {"internal": {"enabled": True}}}, "tls.internal.secretNames.executor is empty"),
    "client certificates over plain text": (
        {"tls": {"public": {"clientCertificates": True}}},
        "needs a certificate of the frontend's own",
    ),
    "tokens of nowhere": ({"auth": {"method": "tokens"}}, "auth.tokensSecret.name is empty"),
    "tokens of nobody": ({"auth": {"tokensSecret": {"name": "a"}}}, "set it to tokens"),
    "half a jwt": (
        {"auth": {"method": "jwt", "jwt": {"issuer": "a", "keys": "https://a"}}},
        "auth.jwt.audience is empty",
    ),
    "names without certificates": ({"auth": {"method": "mtls"}}, "tls.public.clientCertificates is false"),
    "certificates of nobody": (
        {"tls": {"public": {"certificate": {"create": True}}, "issuer": {"name": "ca"}}},
        "does not serve cert-manager.io/v1",
    ),
}

SCHEMA: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"frontends": {}}, "frontends"),
    "an unknown key of a service": ({"scheduler": {"config": {"max_sequences": 4}}}, "max_sequences"),
    "a key that the chart owns": ({"frontend": {"config": {"port": 4}}}, "port"),
    "a key out of range": ({"scheduler": {"config": {"block_size": 0}}}, "block_size"),
    "latest": ({"image": {"tag": "latest"}}, "tag"),
    "half a digest": ({"executor": {"image": {"digest": "sha256:abc"}}}, "digest"),
    "half a scheduler's cpu": ({"scheduler": {"cpus": 0.5}}, "cpus"),
    "no preStop": ({"frontend": {"preStopSeconds": 0}}, "preStopSeconds"),
    "a way out of the volume": ({"model": {"volume": {"path": "../../etc", "existingClaim": "a"}}}, "path"),
    "keys over plain http": ({"auth": {"jwt": {"keys": "http://a"}}}, "keys"),
    "too many ranks": ({"engine": {"tpSize": 65}}, "tpSize"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_do_not_go_together_are_refused(name: str) -> None:
    values, reason = REFUSED[name]
    with pytest.raises(helm.Refused) as refused:
        helm.render({"model": MODEL} | values)
    assert reason in str(refused.value)


@pytest.mark.parametrize("name", SCHEMA)
def test_values_out_of_range_are_refused_by_the_schema(name: str) -> None:
    values, named = SCHEMA[name]
    with pytest.raises(helm.Refused) as refused:
        helm.render({"model": MODEL} | values)
    assert "schema" in str(refused.value)
    assert named in str(refused.value)


def test_an_old_cluster_is_refused() -> None:
    with pytest.raises(helm.Refused, match=r"1\.28"):
        helm.render({"model": MODEL}, helm.Cluster("1.28.0"))


def test_an_issuer_is_asked_for_where_certificates_are_made() -> None:
    values = {"model": MODEL, "tls": {"public": {"certificate": {"create": True}}}}
    with pytest.raises(helm.Refused, match=r"tls\.issuer\.name is empty"):
        helm.render(values, helm.Cluster("1.33.0", (CERT_MANAGER, KEDA)))
