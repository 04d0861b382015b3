"""What the chart renders is what Kubernetes takes and our services read, for every combination of values."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from services.cli.parts import config_type
from services.common.config import SERVICES, resolve
from tests.charts.combinations import COMBINATIONS, FEW
from tests.charts.documents import render
from tests.support import helm

CUSTOM = ("ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet", "Certificate")
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
IN_CI = ("1.29", "1.33", "1.37")
VARIABLES = {"POD_INDEX": "1", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "chat-engine-0.chat-engine.llm"}

combinations = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in COMBINATIONS]
)


@combinations
def test_kubernetes_takes_what_is_rendered(name: str, chart: Path) -> None:
    documents = render(name, chart)
    assert documents
    versions = IN_CI if name in FEW else VERSIONS
    for version in versions:
        for document in documents:
            if document["kind"] not in CUSTOM:
                kubernetes_validate.validate(document, version, strict=True)


@combinations
def test_each_container_starts_with_flags_that_its_service_knows(name: str, chart: Path) -> None:
    seen = set()
    for where, _, found in render(name, chart).containers():
        if found["name"] in SERVICES:
            arguments = [_expanded(argument, found) for argument in found["args"]]
            resolved = resolve(config_type(found["name"]), arguments, {})
            assert resolved.config.host != "127.0.0.1", where
            seen.add(found["name"])
    assert seen == set(SERVICES)


@combinations
def test_every_pod_is_locked_down(name: str, chart: Path) -> None:
    documents = render(name, chart)
    for where, spec, found in documents.containers():
        assert spec["automountServiceAccountToken"] is False, where
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        context = found["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, where
        assert context["allowPrivilegeEscalation"] is False, where
        assert context["capabilities"] == {"drop": ["ALL"]}, where
        assert "memory" in found["resources"]["limits"], where
        image = found["image"]
        assert "@sha256:" in image or re.search(r":(?!latest$)[\w.-]+$", image), where
        mounts = {mount["name"] for mount in found["volumeMounts"]}
        assert mounts <= {volume["name"] for volume in spec["volumes"]}, where
        assert len({mount["mountPath"] for mount in found["volumeMounts"]}) == len(found["volumeMounts"]), where


@combinations
def test_selectors_hold_nothing_that_changes_and_find_their_pods(name: str, chart: Path) -> None:
    documents = render(name, chart)
    labels = [template["metadata"].get("labels", {}) for _, template in documents.templates()]
    for document in documents:
        selector = _selector(document)
        if selector is None:
            continue
        where = f"{document['kind']}/{document['metadata']['name']}"
        assert set(selector) <= {
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/component",
            "triptych/engine",
        }, where
        assert [one for one in labels if selector.items() <= one.items()], where


@combinations
def test_ports_that_probes_and_services_name_are_there(name: str, chart: Path) -> None:
    documents = render(name, chart)
    for where, _, found in documents.containers():
        if found["name"] in SERVICES:
            given = dict(argument.removeprefix("--").partition("=")[::2] for argument in found["args"])
            port = int(given.get("health-port", given["port"]))
            probes = [found[f"{probe}Probe"] for probe in ("startup", "liveness", "readiness")]
            assert {probe["grpc"]["port"] for probe in probes} == {port}, where
            assert [probe["grpc"]["service"] for probe in probes][1:] == ["liveness", "readiness"], where
            assert probes[1]["terminationGracePeriodSeconds"] < 30, where
    ports = {port["name"] for _, _, found in documents.containers() for port in found.get("ports", [])}
    for service in documents.of("Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_both_versions_of_helm_lint_it_and_render_the_same(name: str, chart: Path) -> None:
    combination = COMBINATIONS[name]
    rendered = []
    for major in (3, 4):
        if not combination.cluster.serves:  # lint cannot be told of them
            lint = ("lint", "--strict", "--kube-version", combination.cluster.version, str(chart), "--values", "-")
            helm.run(major, *lint, stdin=yaml.safe_dump(combination.values))
        rendered.append(sorted(map(yaml.safe_dump, render(name, chart, major=major))))
    assert rendered[0] == rendered[1]


def test_helm_lints_and_packages_the_chart(chart: Path, tmp_path: Path) -> None:
    values = yaml.safe_dump(COMBINATIONS["claim"].values)
    assert "0 chart(s) failed" in helm.run(4, "lint", "--strict", str(chart), "--values", "-", stdin=values)
    helm.run(4, "package", str(chart), "--destination", str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["triptych-0.1.0.tgz"]


def _expanded(argument: str, found: dict[str, object]) -> str:
    """As kubelet does it, by variables that Kubernetes or the pod gives."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "POD_INDEX":
            assert "POD_INDEX" in str(found["env"]), f"{argument} of {found['name']} has no variable"
        return VARIABLES[match[1]]

    return re.sub(r"\$\((\w+)\)", value, argument)


def _selector(document: dict[str, object]) -> dict[str, str] | None:
    spec = document.get("spec", {})
    assert isinstance(spec, dict)
    if document["kind"] == "Service":
        return spec["selector"]
    if document["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        return spec["selector"]["matchLabels"]
    return spec["podSelector"]["matchLabels"] if document["kind"] == "NetworkPolicy" else None
