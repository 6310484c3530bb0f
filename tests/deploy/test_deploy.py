"""The files of deploy/ fit the program and each other. Nothing is built or started."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.command_line import invoke
from deploy.files import (
    DEPLOY,
    DRAIN_MARGIN_S,
    ROOT,
    check_command,
    check_variables,
    commands_in,
    documents,
    of_kind,
)
from fake_engine import FakeEngine, serving
from tilework.server.config import PREFIX, ServerConfig

DASHBOARD = ROOT / "src" / "tilework" / "data" / "grafana.json"
UNIT = DEPLOY / "tilework.service"
DRAIN_S = ServerConfig().drain_s


def test_each_file_says_how_it_was_checked() -> None:
    named = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix not in (".md", ".dockerignore")]
    assert len(named) >= 10
    for path in named:
        head = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
        assert "Checked: " in "\n".join(head), path


# The image.


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile in capitals, and what follows it."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, rest) for name, rest in pairs]


def test_the_image_has_what_it_copies_and_installs() -> None:
    found = instructions()
    known = {
        "ARG",
        "FROM",
        "RUN",
        "ENV",
        "WORKDIR",
        "COPY",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {name for name, _ in found} <= known
    included = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [word for name, rest in found if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert set(copied) == included
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    arguments = dict(rest.split("=", 1) for name, rest in found if name == "ARG" and "=" in rest)
    assert set(arguments["EXTRAS"].split(",")) <= project["optional-dependencies"].keys()
    assert arguments["TORCH"] == re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    variables = [word.partition("=")[0] for name, rest in found if name == "ENV" for word in rest.split()]
    check_variables(variables)
    assert next(rest for name, rest in reversed(found) if name == "USER") != "root"
    assert [rest for name, rest in found if name in ("ENTRYPOINT", "CMD")] == ['["tilework"]', '["serve"]']


# Compose.


def compose_schema() -> dict[str, Any]:
    return json.loads(files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text("utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_files_follow_the_specification(name: str) -> None:
    import jsonschema

    (document,) = documents(name)
    validator = jsonschema.Draft202012Validator(compose_schema())
    validator.validate(document)
    assert not validator.is_valid(document | {"services": {"tilework": {"images": "tilework"}}})
    check_command(document["services"]["tilework"]["command"])


def test_compose_names_files_and_services_that_exist() -> None:
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    assert (DEPLOY / services["tilework"]["build"]["context"] / services["tilework"]["build"]["dockerfile"]).is_file()
    check_variables(services["tilework"]["environment"])
    assert int(services["tilework"]["stop_grace_period"].removesuffix("s")) > DRAIN_S + DRAIN_MARGIN_S
    mounts = [mount.split(":") for one in services.values() for mount in one.get("volumes", ())]
    local = {source: target for source, target, *_ in mounts if source.startswith(".")}
    assert all((DEPLOY / source).is_file() for source in local)
    assert {source for source, *_ in mounts} - local.keys() == compose["volumes"].keys()
    (target,) = scrape()["static_configs"][0]["targets"]
    assert target.partition(":")[0] in services
    (rules,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"]
    assert local[f"./{rules}"] == f"/etc/prometheus/{rules}"
    (source,) = documents("grafana/datasources.yaml")[0]["datasources"]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]
    (provider,) = documents("grafana/dashboards.yaml")[0]["providers"]
    assert Path(local[f"../{DASHBOARD.relative_to(ROOT)}"]).parent == Path(provider["options"]["path"])


def setting_of(variable: str) -> str:
    """The server's setting of an environment variable."""
    return variable.removeprefix(PREFIX).lower()


def scrape() -> dict[str, Any]:
    (found,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    return found  # type: ignore[no-any-return]


def check_scrape(settings: dict[str, str], key: str, path: str, probes: set[str]) -> None:
    """A server with keys lets Prometheus in with this one, which cannot draw; probes need none."""
    with serving(FakeEngine(), **settings) as server:
        of_prometheus = {"Authorization": f"Bearer {key}"}
        assert server.http.get(path).status_code == 401
        assert server.http.get(path, headers=of_prometheus).status_code == 200
        assert server.post({"prompt": "x"}, headers=of_prometheus).status_code == 403
        assert all(server.http.get(probe).status_code == 200 for probe in probes)


def test_prometheus_of_compose_has_the_key_that_reads_metrics() -> None:
    (compose,) = documents("compose.yaml")
    ((name, secret),) = compose["secrets"].items()
    assert compose["services"]["prometheus"]["secrets"] == [name]
    assert scrape()["authorization"] == {"credentials_file": f"/run/secrets/{name}"}
    environment = compose["services"]["tilework"]["environment"]
    assert environment[secret["environment"]].startswith(f"${{{secret['environment']}:?"), "it must be given"
    settings = {setting_of(name): name for name in environment}
    check_scrape(settings, secret["environment"], scrape()["metrics_path"], {"/health", "/ready"})


# The dashboard.


def test_the_dashboard_is_a_page_that_grafana_can_lay_out() -> None:
    board = json.loads(DASHBOARD.read_text("utf-8"))
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(one["x"] >= 0 and one["x"] + one["w"] <= 24 and one["h"] > 0 for one in places)
    for one, other in combinations(places, 2):
        apart = (one["x"] + one["w"] <= other["x"], other["x"] + other["w"] <= one["x"])
        assert any((*apart, one["y"] + one["h"] <= other["y"], other["y"] + other["h"] <= one["y"])), (one, other)
    variables = {one["name"] for one in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= variables
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0


def test_the_dashboard_ships() -> None:
    """Its queries are compared with the metrics of a server in `test_queries`."""
    assert json.loads(files("tilework").joinpath("data/grafana.json").read_text("utf-8"))["uid"] == "tilework"


# systemd.


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text("utf-8"))
    return parser


def test_the_unit_starts_the_program_as_it_is() -> None:
    service = unit()["Service"]
    program, *words = service["ExecStart"].split()
    assert program.endswith("/tilework")
    check_command(words)
    check_variables([word.partition("=")[0] for word in service["Environment"].split()])
    assert int(service["TimeoutStopSec"]) > DRAIN_S + DRAIN_MARGIN_S
    assert service["KillMode"] == "mixed", "workers must not get the signal of a stop"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_verifies_the_unit(tmp_path: Path) -> None:
    """With a program that is here instead of the one that the unit names."""
    text = UNIT.read_text("utf-8").replace("/opt/tilework/bin/tilework serve", f"{sys.executable} -m tilework serve")

    def verified(text: str) -> str:
        (tmp_path / UNIT.name).write_text(text, "utf-8")
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return "\n".join(line for line in result.stderr.splitlines() if UNIT.name in line)

    assert verified(text) == ""
    assert "Unknown key" in verified(text.replace("KillMode", "KillingMode"))


# Kubernetes.

MANIFESTS = (
    "kubernetes/tilework.yaml",
    "kubernetes/keda.yaml",
    "kubernetes/raycluster.yaml",
    "kubernetes/podmonitor.yaml",
)
OWN_KINDS = {"ScaledObject", "RayCluster", "PodMonitor"}
MONITOR = {"selector", "jobLabel", "podMetricsEndpoints"}
ENDPOINT = {"port", "path", "interval", "authorization"}
"""Fields of the operator of Prometheus that the manifest uses (prometheus-operator.dev, API reference, PodMonitor)."""
RAY_CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
RAY_HEAD = {"rayStartParams", "template", "serviceType"}
RAY_WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
"""Fields of KubeRay 1.x that the manifest uses (docs.ray.io, RayCluster configuration)."""


def pod_templates() -> list[dict[str, Any]]:
    """The pods of all manifests."""
    found = [one["spec"]["template"] for one in of_kind(MANIFESTS[0], "Deployment")]
    (cluster,) = of_kind(MANIFESTS[2], "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [*found, *(group["template"] for group in groups)]


@pytest.mark.slow
def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    for name in MANIFESTS:
        for one in documents(name):
            if one["kind"] not in OWN_KINDS:
                kubernetes_validate.validate(one, version, strict=True)
    pods = [{"apiVersion": "v1", "kind": "Pod"} | template for template in pod_templates()]
    for pod in pods:
        kubernetes_validate.validate(pod, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pods[0] | {"spec": pods[0]["spec"] | {"container": []}}, version, strict=True)


def test_pods_have_the_volumes_that_their_containers_mount() -> None:
    for template in pod_templates():
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes


def test_selectors_find_their_pods() -> None:
    labels = [template["metadata"]["labels"].items() for template in pod_templates()]
    for name in MANIFESTS:
        for one in [*of_kind(name, "Service"), *of_kind(name, "PodDisruptionBudget"), *of_kind(name, "Deployment")]:
            selector = one["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= found for found in labels), one["metadata"]["name"]


def test_the_servers_of_kubernetes_are_started_and_stopped_as_they_can_be(tmp_path: Path) -> None:
    (server,) = (one for one in of_kind(MANIFESTS[0], "Deployment") if one["metadata"]["name"] == "tilework")
    pod = server["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_command(container["args"])
    check_variables([variable["name"] for variable in container["env"]])
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"/health", "/ready"}
    (settings,) = of_kind(MANIFESTS[0], "ConfigMap")
    (tmp_path / "tilework.toml").write_text(settings["data"]["tilework.toml"], "utf-8")
    shown = json.loads(invoke("serve", "--config", tmp_path / "tilework.toml", "--show-config", "--json").stdout)
    assert pod["terminationGracePeriodSeconds"] > shown["drain_s"]["value"] + DRAIN_MARGIN_S
    (redis,) = (one for one in of_kind(MANIFESTS[0], "Service") if one["metadata"]["name"] == "tilework-redis")
    assert shown["results"]["value"] == f"redis://tilework-redis:{redis['spec']['ports'][0]['port']}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(shown["workers"]["value"])


def test_the_operator_scrapes_the_pods_with_the_key_that_reads_metrics() -> None:
    (monitor,) = documents(MANIFESTS[3])
    (server,) = (one for one in of_kind(MANIFESTS[0], "Deployment") if one["metadata"]["name"] == "tilework")
    template = server["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert monitor["spec"].keys() == MONITOR
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint.keys() == ENDPOINT
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert template["metadata"]["labels"][monitor["spec"]["jobLabel"]] == scrape()["job_name"], "as the rules have it"
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"]}
    settings = {setting_of(name): f"{secret['name']}-{secret['key']}" for name, secret in secrets.items()}
    credentials = endpoint["authorization"]["credentials"]
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    check_scrape(settings, f"{credentials['name']}-{credentials['key']}", endpoint["path"], probes)
    head = (DEPLOY / MANIFESTS[0]).read_text("utf-8").partition("\n\n")[0]
    assert all(f"--from-literal={secret['key']}=" in head for secret in secrets.values())


@pytest.mark.slow
def test_keda_knows_all_fields_of_its_manifest() -> None:
    from cloudcoil.models.keda.v1alpha1 import ScaledObject

    (document,) = documents(MANIFESTS[1])

    def kept(document: dict[str, Any]) -> Any:
        """The document without what KEDA does not know."""
        model = ScaledObject.model_validate(document)
        return json.loads(model.model_dump_json(by_alias=True, exclude_unset=True))

    assert kept(document) == document
    wrong = document | {"spec": document["spec"] | {"minReplicas": 1}}
    assert kept(wrong) != wrong


def test_keda_scales_the_servers() -> None:
    (scaled,) = documents(MANIFESTS[1])
    deployments = {one["metadata"]["name"] for one in of_kind(MANIFESTS[0], "Deployment")}
    assert scaled["spec"]["scaleTargetRef"]["name"] in deployments
    (trigger,) = scaled["spec"]["triggers"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_the_ray_cluster_has_the_nodes_that_the_server_waits_for() -> None:
    (cluster,) = of_kind(MANIFESTS[2], "RayCluster")
    spec = cluster["spec"]
    assert spec.keys() <= RAY_CLUSTER
    assert spec["headGroupSpec"].keys() <= RAY_HEAD
    (workers,) = spec["workerGroupSpecs"]
    assert workers.keys() <= RAY_WORKERS
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    (script,) = head["args"]
    (command,) = commands_in(script)
    check_command(command)
    assert command[command.index("--nodes") + 1] == str(workers["replicas"])
    assert f"< {workers['replicas'] + 1})" in script, "the head counts, too"
    (worker,) = workers["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == command[command.index("--workers") + 1]
