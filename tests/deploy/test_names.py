"""What files of docs/deploy name, against the code and against each other."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from ftlayer.cli.main import DEFAULT_URL, app
from ftlayer.monitor.console import watch as console_metrics
from ftlayer.vertex.metrics import catalogue
from ftlayer.vertex.metrics.catalogue import Metric, MetricKind
from ftlayer.vertex.service.metrics import LIVEZ, READYZ

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
METRICS_PORT = DEFAULT_URL.rpartition(":")[2]


def commands(files: Any) -> dict[str, list[str]]:
    """All command lines of `ftlayer` that the files start, by where they stand."""
    found = {}
    for target in ("vertex", "console"):
        of_target = files.docker_command("Dockerfile", target)
        found[f"Dockerfile, {target}"] = of_target["ENTRYPOINT"] + of_target["CMD"]
        found[f"Dockerfile, {target}, HEALTHCHECK"] = of_target["HEALTHCHECK"]
        (container,) = (
            container for container in containers(files) if container["image"] == f"ftlayer-{target}"
        )
        found[f"{target}.yaml"] = of_target["ENTRYPOINT"] + container["args"]
        found[f"ftlayer-{target}.service"] = files.unit_command(f"ftlayer-{target}.service")
    return found


def containers(files: Any) -> list[dict[str, Any]]:
    return [
        container
        for each in files.manifests()
        if each["kind"] in ("StatefulSet", "Deployment")
        for container in each["spec"]["template"]["spec"]["containers"]
    ]


def parsed(command: list[str]) -> dict[str, Any]:
    """Parse a command line as `ftlayer` would, and return its options."""
    assert Path(command[0]).name == "ftlayer"
    group = typer.main.get_command(app)
    sub = group.commands[command[1]]  # type: ignore[attr-defined]
    context = sub.make_context(command[1], command[2:], resilient_parsing=False)
    parameters: dict[str, Any] = context.params
    return parameters


def test_commands_and_options_are_ftlayer_s(files: Any) -> None:
    for where, command in commands(files).items():
        assert parsed(command), where


def test_ports_are_the_same_everywhere(files: Any) -> None:
    for where, command in commands(files).items():
        options = parsed(command)
        if command[1] == "serve":
            assert str(options["metrics_port"]) == METRICS_PORT, where
            assert options["listen"].endswith(":7077"), where
        elif command[1] == "console":
            assert options["listen"].endswith(":7080"), where
            assert [place.endswith(":7077") for place in options["vertex"]] == [True], where
        else:
            assert options["url"] in (DEFAULT_URL, "https://127.0.0.1:7080"), where
    exposed = re.findall(
        r"^EXPOSE (.*)$", (DEPLOY / "docker" / "Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    assert exposed == [f"7077 {METRICS_PORT}", "7080"]
    assert f"127.0.0.1:{METRICS_PORT}" in (DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8")


def test_probes_and_ports_of_manifests(files: Any) -> None:
    """Probes ask what there is, at ports that the container has and its command listens on."""
    probed = 0
    for container in containers(files):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        listened = {int(port) for port in re.findall(r"[:=](\d{4})\b", " ".join(container["args"]))}
        for kind, path in (("startupProbe", LIVEZ), ("livenessProbe", LIVEZ), ("readinessProbe", READYZ)):
            if kind in container:
                asked = container[kind]["httpGet"]
                assert asked["path"] == path
                assert ports[asked["port"]] in listened
                probed += 1
    assert probed == 6


def test_services_and_policies_find_pods_and_ports(files: Any) -> None:
    pods = [
        each["spec"]["template"]
        for each in files.manifests()
        if each["kind"] in ("StatefulSet", "Deployment")
    ]
    selectors = 0
    for each in files.manifests():
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            wanted, ports = spec["selector"], [port.get("targetPort", port["port"]) for port in spec["ports"]]
        elif each["kind"] == "PodDisruptionBudget":
            wanted, ports = spec["selector"]["matchLabels"], []
        elif each["kind"] == "NetworkPolicy":
            wanted = spec["podSelector"]["matchLabels"]
            ports = [port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])]
        else:
            continue
        selectors += 1
        found = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
        assert found, each["metadata"]["name"]
        for pod in found:
            known = {
                value
                for container in pod["spec"]["containers"]
                for port in container["ports"]
                for value in (port["name"], port["containerPort"])
            }
            assert set(ports) <= known, each["metadata"]["name"]
    assert selectors == 8


def test_secrets_that_are_named_are_in_the_example(files: Any) -> None:
    there = {
        each["metadata"]["name"]: set(each["stringData"]) for each in files.manifests("secrets.example.yaml")
    }
    used = set()
    for each in files.manifests():
        if each["kind"] not in ("StatefulSet", "Deployment"):
            continue
        spec = each["spec"]["template"]["spec"]
        keys: dict[str, set[str]] = {}
        for volume in spec["volumes"]:
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                keys[volume["name"]] = {item["key"] for item in volume["secret"].get("items", [])} or there[
                    name
                ]
                assert keys[volume["name"]] <= there[name]
                used.add(name)
        for container in spec["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            known = {f"{mounts[volume]}/{key}" for volume, of_it in keys.items() for key in of_it}
            named = set(re.findall(r"=(/etc/ftlayer/\S+)", "\n".join(container["args"])))
            assert named <= known
            for variable in container.get("env", []):
                if "secretKeyRef" in variable["valueFrom"]:
                    reference = variable["valueFrom"]["secretKeyRef"]
                    assert reference["key"] in there[reference["name"]]
    assert used == set(there)


def test_the_kustomization_names_what_there_is(files: Any) -> None:
    text = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text("utf-8")
    kustomization = yaml.safe_load(text)
    objects = files.manifests(*kustomization["resources"])
    images = {
        container["image"]
        for each in objects
        if "template" in each.get("spec", {})
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert images == {image["name"] for image in kustomization["images"]}
    assert not any("namespace" in each["metadata"] for each in files.manifests())


def test_every_pod_keeps_to_the_restricted_standard(files: Any) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    for each in files.manifests():
        if each["kind"] not in ("StatefulSet", "Deployment"):
            continue
        spec = each["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(set(volume) & {"secret", "emptyDir", "configMap"} for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_users_of_images_and_manifests_are_the_same(files: Any) -> None:
    users = {"ftlayer-vertex": 10001, "ftlayer-console": 10001, "ftlayer-spark": 185}
    for each in files.manifests():
        if each["kind"] in ("StatefulSet", "Deployment"):
            spec = each["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            assert spec["securityContext"]["runAsUser"] == users[container["image"]]
    for name, user in (("Dockerfile", 10001), ("Dockerfile.spark", 185)):
        assert f"\nUSER {user}:{user}\n" in (DEPLOY / "docker" / name).read_text("utf-8")


def test_spark_s_properties(files: Any) -> None:
    objects = {(each["kind"], each["metadata"]["name"]): each for each in files.manifests("spark.yaml")}
    data = objects["ConfigMap", "orders-spark"]["data"]
    properties = dict(line.split() for line in data["spark.properties"].splitlines())
    assert all(name.startswith("spark.") for name in properties)
    assert importlib.util.find_spec(properties["spark.python.daemon.module"]) is not None
    assert ("Service", properties["spark.driver.host"]) in objects
    ports = [port["port"] for port in objects["Service", properties["spark.driver.host"]]["spec"]["ports"]]
    assert [str(port) for port in ports] == [
        properties["spark.driver.port"],
        properties["spark.driver.blockManager.port"],
    ]
    assert yaml.safe_load(data["executor.yaml"])["kind"] == "Pod"
    compile(objects["ConfigMap", "orders-program"]["data"]["orders.py"], "orders.py", "exec")


def test_variables_are_known(files: Any) -> None:
    known = {"FTLAYER_TOKEN", "FTLAYER_VERTEX_OPTIONS", "FTLAYER_CONSOLE_OPTIONS"}
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix in (".service", ".yaml", ".yml"):
            assert set(re.findall(r"\bFTLAYER_\w+", path.read_text("utf-8"))) <= known, path


def known_metrics() -> set[str]:
    """Names of series: of the catalogue, with what histograms and counters add."""
    metrics: list[Metric] = []
    for module in (catalogue, console_metrics):
        for value in vars(module).values():
            if isinstance(value, Metric):
                metrics.append(value)
            elif isinstance(value, dict):
                metrics += [each for each in value.values() if isinstance(each, Metric)]
    names = set()
    for metric in metrics:
        if metric.kind is MetricKind.HISTOGRAM:
            names |= {f"{metric.name}_{part}" for part in ("bucket", "count", "sum")}
        else:
            names.add(f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name)
    return names


@pytest.mark.parametrize("name", ["grafana/ftlayer.json", "prometheus/alerts.yml"])
def test_metrics_are_in_the_catalogue(name: str) -> None:
    text = (DEPLOY / name).read_text("utf-8")
    if name.endswith(".json"):
        expressions = [
            target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", ())
        ]
    else:
        rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
        expressions = [rule["expr"] for rule in rules]
    asked = set(re.findall(r"ftlayer_\w+", "\n".join(expressions)))
    assert len(asked) >= 14
    assert asked <= known_metrics()
