"""P rows: what an installation must hold to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.combinations import Combination
from tests.charts.documents import container, flags, render
from tests.support import helm

MODEL = {"volume": {"existingClaim": "checkpoints", "path": "small"}}


def test_P2_a_pod_is_given_longer_than_its_preStop_and_drains_take() -> None:
    documents = render(Combination({"model": MODEL, "frontend": {"drainSeconds": 600, "preStopSeconds": 20}}))
    for kind, name in (("Deployment", "-frontend"), ("StatefulSet", "-engine")):
        spec = documents.one(kind, name)["spec"]["template"]["spec"]
        services = [*(one for one in spec.get("initContainers", []) if "restartPolicy" in one), *spec["containers"]]
        drains_s = sum(int(flags(one)["drain-s"]) for one in services)
        stops_s = sum(
            one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0) for one in services
        )
        assert spec["terminationGracePeriodSeconds"] > drains_s + stops_s


@pytest.mark.parametrize(
    ("what", "least"),
    [("frontend", 20 + 600 + 10), ("engine", 60 + 10 + 10)],
)
def test_P2_a_grace_that_is_too_short_is_refused_with_what_is_needed(what: str, least: int) -> None:
    values: dict[str, Any] = {"model": MODEL, "frontend": {"drainSeconds": 600, "preStopSeconds": 20}, "engine": {}}
    values[what]["terminationGracePeriodSeconds"] = least - 1
    with pytest.raises(helm.Refused, match=rf"{what}\.terminationGracePeriodSeconds is {least - 1}, but .* {least};"):
        helm.render(values)
    values[what]["terminationGracePeriodSeconds"] = least
    helm.render(values)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_P3_tensor_parallel_pods_have_shared_memory_that_the_limit_counts(ranks: int) -> None:
    values = {"model": MODEL, "engine": {"tpSize": ranks}, "executor": {"memoryMi": 4096, "shmMi": 512}}
    spec = render(Combination(values)).one("StatefulSet", "-engine")["spec"]["template"]["spec"]
    executor = container(spec, "executor")
    shared = [one for one in spec["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory"]
    mounted = [one["name"] for one in executor["volumeMounts"] if one["mountPath"] == "/dev/shm"]
    assert [one["name"] for one in shared] == mounted == (["shm"] if ranks > 1 else [])
    assert [one["emptyDir"]["sizeLimit"] for one in shared] == (["512Mi"] if ranks > 1 else [])
    assert executor["resources"]["limits"]["memory"] == ("4608Mi" if ranks > 1 else "4096Mi")


@pytest.mark.parametrize("gpus", [0.5, 1.5, "0.5", "1", -1])
def test_P3_fractions_of_a_gpu_are_refused_by_the_schema(gpus: object) -> None:
    values = {"model": MODEL, "executor": {"device": "cuda", "gpus": gpus}}
    with pytest.raises(helm.Refused, match="gpus"):
        helm.render(values)
    helm.render({"model": MODEL, "executor": {"device": "cuda", "gpus": 1}})
