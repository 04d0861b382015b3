"""What Helm rendered, to ask questions of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.charts.combinations import COMBINATIONS, Combination
from tests.support import helm

WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Pod")


class Documents(list[dict[str, Any]]):
    """Kubernetes objects."""

    def of(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """Those of a kind; whose name ends so."""
        return [one for one in self if one["kind"] == kind and one["metadata"]["name"].endswith(name)]

    def one(self, kind: str, name: str = "") -> dict[str, Any]:
        """The only one."""
        (found,) = self.of(kind, name)
        return found

    def templates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name of a workload and its pod's template; a LeaderWorkerSet has two."""
        for one in self:
            name = f"{one['kind']}/{one['metadata']['name']}"
            if one["kind"] == "Pod":
                yield name, one
            elif one["kind"] == "LeaderWorkerSet":
                group = one["spec"]["leaderWorkerTemplate"]
                yield f"{name}/leader", group["leaderTemplate"]
                yield f"{name}/worker", group["workerTemplate"]
            elif one["kind"] in WORKLOADS:
                yield name, one["spec"]["template"]

    def containers(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Where it stands, the pod's spec, and the container, init containers included."""
        for name, template in self.templates():
            spec = template["spec"]
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                yield f"{name}/{container['name']}", spec, container


def render(combination: Combination | str, chart: Path = helm.CHART, *, major: int = 4) -> Documents:
    """Raises helm.Refused."""
    if isinstance(combination, str):
        combination = COMBINATIONS[combination]
    text = helm.render(combination.values, combination.cluster, major=major, chart=chart)
    return Documents(one for one in yaml.safe_load_all(text) if one)


def container(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """Of a pod."""
    (found,) = [one for one in [*spec.get("initContainers", []), *spec["containers"]] if one["name"] == name]
    return found


def flags(container: dict[str, Any]) -> dict[str, str]:
    """The last value of each flag of a container."""
    pairs = [argument.removeprefix("--").partition("=") for argument in container["args"]]
    return {name: value for name, _, value in pairs}
