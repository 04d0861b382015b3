"""What stands in the manifests: who dials whom, in which order a pod ends, what a resource counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.charts.combinations import COMBINATIONS, KEDA, PROMETHEUS, Combination
from tests.charts.documents import Documents, container, flags, render
from tests.support.helm import Cluster

MODEL = {"volume": {"existingClaim": "checkpoints", "path": "small"}}


def _render(*serves: str, on: str = "1.33.0", chart: Path | None = None, **values: Any) -> Documents:
    combination = Combination({"model": MODEL, **values}, Cluster(on, serves))
    return render(combination, chart) if chart is not None else render(combination)


def _pod(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents.one(kind, name)["spec"]["template"]["spec"]
    return spec


def test_frontends_dial_each_engine_by_its_own_name_before_it_is_ready() -> None:
    documents = _render(engine={"replicas": 3})
    assert _engines_dialled(documents) == [
        f"chat-triptych-engine-{index}.chat-triptych-engine.llm.svc:50052" for index in range(3)
    ]
    engines = documents.one("StatefulSet", "-engine")
    assert engines["spec"]["replicas"] == 3
    service = documents.one("Service", "-engine")
    assert engines["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def _engines_dialled(documents: Documents) -> list[str]:
    arguments = container(_pod(documents, "Deployment", "-frontend"), "frontend")["args"]
    pairs = [argument.partition("=")[::2] for argument in arguments]
    first = [value for name, value in pairs if name == "--engine"]
    assert len(first) == 1
    return first + [value for name, value in pairs if name == "--more-engines"]


def test_clients_find_ready_frontends_alone() -> None:
    documents = _render()
    for name in ("chat-triptych", "chat-triptych-headless"):
        (service,) = [one for one in documents.of("Service") if one["metadata"]["name"] == name]
        assert "publishNotReadyAddresses" not in service["spec"]


def test_connections_to_frontends_have_an_age_and_internal_ones_have_none() -> None:
    documents = _render()
    for _, _, found in documents.containers():
        aged = "max-connection-age-s" in flags(found) if "--port" in str(found["args"]) else False
        assert aged == (found["name"] == "frontend")


def test_an_engines_executor_starts_before_its_scheduler_and_ends_after_it() -> None:
    pod = _pod(_render(), "StatefulSet", "-engine")
    assert [(one["name"], one["restartPolicy"]) for one in pod["initContainers"]] == [("executor", "Always")]
    assert [one["name"] for one in pod["containers"]] == ["scheduler"]
    assert flags(pod["containers"][0])["executor"] == "127.0.0.1:50053"


def test_an_engine_has_started_when_a_token_could_be_made() -> None:
    scheduler = container(_pod(_render(), "StatefulSet", "-engine"), "scheduler")
    assert scheduler["startupProbe"]["grpc"]["service"] == "generate"
    budget_s = scheduler["startupProbe"]["failureThreshold"] * scheduler["startupProbe"]["periodSeconds"]
    assert budget_s >= 1800


def test_cpus_are_counted_by_processes() -> None:
    documents = _render(frontend={"workers": 3}, engine={"tpSize": 2}, executor={"cpusPerRank": 4})
    engine = _pod(documents, "StatefulSet", "-engine")
    asked = {one["name"]: one["resources"]["requests"]["cpu"] for _, _, one in documents.containers()}
    assert asked == {"frontend": 3, "scheduler": 1, "executor": 8, "chat": "100m"}
    assert container(engine, "executor")["resources"]["limits"]["cpu"] == 8
    assert "cpu" not in container(engine, "scheduler")["resources"]["limits"]


def test_gpus_are_asked_for_by_their_resource() -> None:
    documents = _render(executor={"device": "cuda", "gpus": 4, "gpuResource": "example.com/gpu"}, engine={"tpSize": 4})
    executor = container(_pod(documents, "StatefulSet", "-engine"), "executor")
    assert executor["resources"]["limits"]["example.com/gpu"] == 4
    assert executor["resources"]["requests"]["example.com/gpu"] == 4
    assert flags(executor)["device"] == "cuda"
    assert "cpu" not in executor["resources"]["limits"]


def test_ranks_in_pods_meet_at_rank_0_of_their_own_engine() -> None:
    documents = _render(engine={"ranksIn": "pods", "tpSize": 2, "replicas": 2})
    for index in range(2):
        ranks = documents.one("StatefulSet", f"-rank-{index}")
        assert ranks["spec"]["replicas"] == 2
        assert ranks["spec"]["podManagementPolicy"] == "Parallel"
        given = flags(ranks["spec"]["template"]["spec"]["containers"][0])
        assert given["tp-rank"] == "$(POD_INDEX)"
        rank_zero = f"{ranks['metadata']['name']}-0.{ranks['spec']['serviceName']}.llm.svc"
        assert given["tp-rendezvous"] == f"{rank_zero}:29500"
        scheduler = flags(container(_pod(documents, "StatefulSet", "-engine"), "scheduler"))
        assert scheduler["executor"].replace("$(POD_INDEX)", str(index)) == f"{rank_zero}:50053"
    assert documents.one("Service", "-rank")["spec"]["publishNotReadyAddresses"] is True


def test_a_leaderworkerset_has_scheduler_and_rank_0_in_its_leader() -> None:
    documents = render("ranks-in-pods-of-leaderworkerset")
    engine = documents.one("LeaderWorkerSet")
    group = engine["spec"]["leaderWorkerTemplate"]
    assert engine["spec"]["replicas"] == 2
    assert group["size"] == 4
    leader, worker = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    for pod, rank in ((leader, "0"), (worker, "$(LWS_WORKER_INDEX)")):
        given = flags(container(pod, "executor"))
        assert given["tp-rank"] == rank
        assert given["tp-rendezvous"] == "$(LWS_LEADER_ADDRESS):29500"
    assert flags(container(leader, "scheduler"))["executor"] == "127.0.0.1:50053"
    assert [one["name"] for one in worker["containers"]] == ["executor"]
    assert not documents.of("StatefulSet")
    name = engine["metadata"]["name"]
    assert _engines_dialled(documents) == [f"{name}-{index}.{name}.llm.svc:50052" for index in range(2)]


def test_a_rank_waits_as_long_as_its_leader_may_take_to_end() -> None:
    group = render("ranks-in-pods-of-leaderworkerset").one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    leads_s = sum(int(flags(container(leader, name))["drain-s"]) for name in ("scheduler", "executor"))
    assert int(flags(container(worker, "executor"))["drain-s"]) >= leads_s
    assert worker["terminationGracePeriodSeconds"] > leads_s


def test_the_hubs_token_is_in_the_container_that_fetches_alone() -> None:
    token = {"name": "hub", "key": "t"}
    documents = render(Combination({"model": {"hub": {"id": "org/model", "revision": "0123", "tokenSecret": token}}}))
    seen = set()
    for where, _, found in documents.containers():
        names = [one["name"] for one in found.get("env", [])]
        assert ("HF_TOKEN" in names) == (found["name"] == "fetch-model"), where
        if found["name"] == "fetch-model":
            seen.add((where.split("/")[1], "--without-weights" in found["args"]))
        elif found["name"] != "chat":
            assert "--offline" in found["args"], where
            assert "--revision=0123" in found["args"], where
    assert seen == {("chat-triptych-frontend", True), ("chat-triptych-engine", False)}


def test_models_are_mounted_read_only_into_services() -> None:
    for name in ("claim", "hub", "host-path", "own-claim", "hub-cache-claim"):
        for where, _, found in render(name).containers():
            for mount in found["volumeMounts"]:
                if mount["name"] == "models":
                    assert mount.get("readOnly", False) == (found["name"] != "fetch-model"), (name, where)


def test_the_only_ways_in_are_gateway_to_frontend_to_scheduler() -> None:
    documents = _render()
    frontend = documents.one("NetworkPolicy", "-frontend")["spec"]["ingress"]
    engine = documents.one("NetworkPolicy", "-engine")["spec"]["ingress"]
    assert [port["port"] for rule in frontend for port in rule["ports"]] == [50051]
    assert [port["port"] for rule in engine for port in rule["ports"]] == [50052]
    (peer,) = engine[0]["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "frontend"


def test_a_budget_for_disruptions_stands_above_one_pod_alone() -> None:
    alone = _render(frontend={"replicas": 1})
    assert not alone.of("PodDisruptionBudget")
    more = _render(frontend={"replicas": 2}, engine={"replicas": 2})
    assert len(more.of("PodDisruptionBudget")) == 2


def test_what_scales_a_workload_owns_its_number_of_pods() -> None:
    frontends = _render(frontend={"autoscaling": {"enabled": True}})
    assert "replicas" not in frontends.one("Deployment")["spec"]
    assert (
        frontends.one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
        == (frontends.one("Deployment")["metadata"]["name"])
    )
    values = COMBINATIONS["example-fleet"].values | {"metrics": {"enabled": True}}
    engines = render(Combination(values, Cluster("1.33.0", (KEDA,))))
    assert "replicas" not in engines.one("StatefulSet")["spec"]
    scaled = engines.one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "chat-triptych-engine"}
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (2, 8)
    assert len(_engines_dialled(engines)) == 8
    (trigger,) = scaled["triggers"]
    assert "waiting" in trigger["metadata"]["query"]


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet"])
def test_custom_resources_are_left_out_where_the_cluster_has_none(kind: str, chart: Path) -> None:
    values: dict[str, Any] = {
        "metrics": {"enabled": True, "serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
    }
    scaled = {"engine": {"autoscaling": {"enabled": True}}}
    ranks = {"engine": {"ranksIn": "pods", "tpSize": 2}}
    chosen = values | (ranks if kind == "LeaderWorkerSet" else scaled)
    apis = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "ScaledObject": KEDA}
    assert not _render(chart=chart, **chosen).of(kind)
    assert _render(apis.get(kind, PROMETHEUS), chart=chart, **chosen).of(kind)


def test_a_monitor_finds_the_port_of_every_service(chart: Path) -> None:
    for name in ("metrics-all", "metrics-ranks"):
        documents = render(name, chart)
        monitor = documents.one("ServiceMonitor")["spec"]
        wanted = monitor["selector"]["matchLabels"]
        found = {
            port["name"]
            for service in documents.of("Service")
            if wanted.items() <= service["metadata"]["labels"].items()
            for port in service["spec"]["ports"]
        }
        assert found == {endpoint["port"] for endpoint in monitor["endpoints"]}


def test_dashboards_and_alerts_are_packed_as_they_are(chart: Path) -> None:
    documents = render("metrics-all", chart)
    packed = {name: json.loads(text) for one in documents.of("ConfigMap") for name, text in one["data"].items()}
    assert packed == {file.name: json.loads(file.read_text()) for file in chart.glob("dashboards/*.json")}
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in documents.of("ConfigMap"))
    groups = documents.one("PrometheusRule")["spec"]["groups"]
    text = "".join(file.read_text() for file in chart.glob("rules/*.yaml"))
    assert groups and all(group["name"] in text for group in groups)


def test_services_show_one_another_certificates_and_let_in_their_own_caller_alone() -> None:
    documents = render("tls-internal")
    engine = _pod(documents, "StatefulSet", "-engine")
    frontend = flags(container(_pod(documents, "Deployment", "-frontend"), "frontend"))
    scheduler, executor = (flags(container(engine, name)) for name in ("scheduler", "executor"))
    assert scheduler["tls-client-names"] == "chat-triptych-frontend"
    assert executor["tls-client-names"] == "chat-triptych-scheduler"
    assert frontend["peer-server-name"] == "chat-triptych-scheduler"
    assert scheduler["peer-server-name"] == "chat-triptych-executor"
    assert "tls-cert" not in frontend
    secrets = {one["secret"]["secretName"] for one in engine["volumes"] if "secret" in one}
    assert secrets == {"s", "e"}


def test_kubelet_asks_a_port_without_tls_where_a_service_speaks_it() -> None:
    for name, given in (("tls-public", 50151), ("claim", 50051)):
        frontend = container(_pod(render(name), "Deployment", "-frontend"), "frontend")
        assert frontend["livenessProbe"]["grpc"]["port"] == given


def test_certificates_of_cert_manager_have_the_names_that_are_asked_for() -> None:
    documents = render("tls-cert-manager")
    names = {one["metadata"]["name"]: one["spec"]["dnsNames"] for one in documents.of("Certificate")}
    for service in ("frontend", "scheduler", "executor"):
        assert names[f"chat-triptych-{service}"] == [f"chat-triptych-{service}"]
    assert {"chat-triptych.llm.svc", "chat-triptych-headless.llm.svc", "llm.example.com"} <= set(
        names["chat-triptych-public"]
    )
    made = {one["spec"]["secretName"] for one in documents.of("Certificate")}
    used = {
        volume["secret"]["secretName"]
        for _, spec, _ in documents.containers()
        for volume in spec["volumes"]
        if "secret" in volume
    }
    assert used == made


def test_preStop_is_an_action_of_its_own_where_kubernetes_has_it() -> None:
    old, new = (_pod(_render(on=on), "Deployment", "-frontend") for on in ("1.29.0", "1.30.0"))
    assert old["containers"][0]["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "5"]}}
    assert new["containers"][0]["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}


def test_helm_test_asks_with_our_client_by_the_service() -> None:
    pod = _render(frontend={"service": {"port": 8443}}).one("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (chat,) = pod["spec"]["containers"]
    assert chat["image"].startswith("triptych-client:")
    assert "--address=chat-triptych.llm.svc:8443" in chat["args"]


def test_helm_test_trusts_the_frontends_ca_and_holds_no_key_of_theirs() -> None:
    pod = render("tls-public").one("Pod")["spec"]
    assert "--tls-ca=/etc/triptych/ca/ca.crt" in pod["containers"][0]["args"]
    (secret,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
    assert secret["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_who_may_call_is_mounted_into_frontends_alone() -> None:
    for name in ("auth-tokens", "auth-mtls"):
        for where, _, found in render(name).containers():
            mounted = "auth" in [mount["name"] for mount in found["volumeMounts"]]
            assert mounted == (found["name"] == "frontend"), where
