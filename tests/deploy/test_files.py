"""Files of docs/deploy by the tools that know their formats. Each tool is shown to find a mistake."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from programs import find_program

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
KUBERNETES = "1.33"
DOCKERFILES = ["Dockerfile", "Dockerfile.spark"]
MANIFESTS = ["console.yaml", "network-policy.yaml", "secrets.example.yaml", "spark.yaml", "vertex.yaml"]
UNITS = ["ftlayer-console.service", "ftlayer-job@.service", "ftlayer-vertex.service"]


def test_the_lists_here_have_all_files() -> None:
    assert sorted(path.name for path in (DEPLOY / "docker").glob("Dockerfile*")) == DOCKERFILES
    found = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert sorted(found - {"kustomization.yaml"}) == MANIFESTS
    assert sorted(path.name for path in (DEPLOY / "systemd").glob("*.service")) == UNITS


def hadolint(files: Any, path: Path) -> tuple[int, str]:
    code, said = files.run(files.tool("hadolint"), path)
    return int(code), str(said)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles(files: Any, name: str) -> None:
    assert hadolint(files, DEPLOY / "docker" / name) == (0, "")


def test_a_dockerfile_with_a_mistake_is_found(files: Any, tmp_path: Path) -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text("utf-8")
    (tmp_path / "Dockerfile").write_text(text.replace("WORKDIR /src", "RUN cd /src"))
    code, said = hadolint(files, tmp_path / "Dockerfile")
    assert code == 1
    assert "DL3003" in said


def validate(files: Any, *paths: Path) -> tuple[int, str]:
    command = (files.tool("kubernetes-validate"), "-k", KUBERNETES, "--strict", "--quiet", *paths)
    code, said = files.run(*command)
    return int(code), str(said)


def test_manifests(files: Any) -> None:
    assert validate(files, *(DEPLOY / "kubernetes" / name for name in MANIFESTS)) == (0, "")


def test_a_manifest_with_a_mistake_is_found(files: Any, tmp_path: Path) -> None:
    text = (DEPLOY / "kubernetes" / "vertex.yaml").read_text("utf-8")
    (tmp_path / "vertex.yaml").write_text(text.replace("readinessProbe:", "readynessProbe:"))
    code, said = validate(files, tmp_path / "vertex.yaml")
    assert code != 0
    assert "readynessProbe" in said


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A file system with Debian's units and ours, and programs where ours look for them."""
    find_program("systemd-analyze")
    units = tmp_path / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    for name in UNITS:
        shutil.copy(DEPLOY / "systemd" / name, units)
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr" / "lib" / "systemd" / "system", symlinks=True)
    programs = tmp_path / "opt" / "ftlayer" / "bin"
    programs.mkdir(parents=True)
    for program in ("ftlayer", "python"):
        # Looked at, and not run: tests/deploy/test_started.py runs the commands.
        (programs / program).write_text("#!/bin/sh\n")
        (programs / program).chmod(0o755)
    return tmp_path


def verify(files: Any, machine: Path, name: str) -> tuple[int, str]:
    instance = name.replace("@.", "@orders.")
    code, said = files.run("systemd-analyze", "verify", "--man=no", f"--root={machine}", instance)
    return int(code), str(said)


def test_units(files: Any, machine: Path) -> None:
    for name in UNITS:
        assert verify(files, machine, name) == (0, ""), name


def test_a_unit_with_a_mistake_is_found(files: Any, machine: Path) -> None:
    path = machine / "etc" / "systemd" / "system" / "ftlayer-vertex.service"
    path.write_text(path.read_text("utf-8").replace("WatchdogSec=", "WatchdogSecs="))
    assert "WatchdogSecs" in verify(files, machine, "ftlayer-vertex.service")[1]
    (machine / "opt" / "ftlayer" / "bin" / "ftlayer").unlink()
    code, said = verify(files, machine, "ftlayer-console.service")
    assert code != 0
    assert "/opt/ftlayer/bin/ftlayer is not executable" in said


@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_configurations_of_prometheus(files: Any, tmp_path: Path, name: str) -> None:
    find_program("promtool")
    shutil.copytree(DEPLOY / "prometheus", tmp_path, dirs_exist_ok=True)
    (tmp_path / "ftlayer-console-token").write_text("a-token-of-some-length")
    text = (tmp_path / name).read_text("utf-8")
    # Debian builds Prometheus without Kubernetes: all but how pods are found is checked.
    (tmp_path / name).write_text(text.replace("kubernetes_sd_configs: [{role: pod}]", "static_configs: []"))
    code, said = files.run("promtool", "check", "config", name, directory=tmp_path)
    assert code == 0, said
    assert "rule files found" in said


def test_the_entrypoint_of_spark_s_image_starts_what_kubernetes_asks_for(files: Any, tmp_path: Path) -> None:
    entrypoint = DEPLOY / "docker" / "spark-entrypoint.sh"
    for program in ("java", "bin/spark-submit"):
        path = tmp_path / program
        path.parent.mkdir(exist_ok=True)
        path.write_text('#!/bin/sh\necho "$(basename "$0")" "$@"\n')
        path.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SPARK_HOME": str(tmp_path),
        "SPARK_DRIVER_BIND_ADDRESS": "10.0.0.7",
        "SPARK_JAVA_OPT_0": "-Dspark.driver.port=7078",
        "SPARK_JAVA_OPT_1": "-Dname=with blanks",
        "SPARK_EXECUTOR_MEMORY": "2g",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_EXECUTOR_ID": "3",
        "SPARK_EXECUTOR_POD_IP": "10.0.0.8",
        "SPARK_EXECUTOR_POD_NAME": "orders-exec-3",
        "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@orders-driver:7078",
        "SPARK_APPLICATION_ID": "spark-1",
        "SPARK_RESOURCE_PROFILE_ID": "0",
    }
    started = ["env", "-i", *(f"{name}={value}" for name, value in environ.items()), str(entrypoint)]
    assert files.run(*started, "driver", "--class", "x", "local:///orders.py") == (
        0,
        "spark-submit --deploy-mode client --conf spark.driver.bindAddress=10.0.0.7 --class x local:///orders.py\n",
    )
    code, said = files.run(*started, "executor")
    assert code == 0
    assert said.startswith("java -Dspark.driver.port=7078 -Dname=with blanks -Xms2g -Xmx2g -cp ")
    assert said.endswith(
        " org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend "
        "--driver-url spark://CoarseGrainedScheduler@orders-driver:7078 --executor-id 3 --cores 2 --app-id spark-1 "
        "--hostname 10.0.0.8 --resourceProfileId 0 --podName orders-exec-3\n"
    )
    assert files.run(*started, "echo", "anything else") == (0, "anything else\n")
