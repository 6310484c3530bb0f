"""What is asked of Prometheus in alert rules, on the dashboard, by KEDA and in the documentation, a server exports."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import debian
from deploy.files import DEPLOY, ROOT, documents
from deploy.promql import SERIES, read_by, strays
from tilework.server.metrics.families import FAMILIES, OPEN_LABELS
from tools.metrics_table import tables

DASHBOARD = ROOT / "src" / "tilework" / "data" / "grafana.json"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
RULES = DEPLOY / "alerts.yml"
COMMANDS = (
    ("check", "rules", "deploy/alerts.yml"),
    ("check", "config", "--syntax-only", "deploy/prometheus.yml"),
    ("test", "rules", "tests/deploy/alerts_test.yml"),
)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]


def targets() -> list[dict[str, Any]]:
    """The queries of the dashboard, with intervals as Grafana fills them in."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return [
        target | {"expr": target["expr"].replace("$__rate_interval", "5m")}
        for panel in panels
        for target in panel["targets"]
    ]


def queries() -> Iterator[Any]:
    """Each with where it stands."""
    for rule in rules():
        yield pytest.param(rule["expr"], id=rule["alert"])
    for number, target in enumerate(targets()):
        yield pytest.param(target["expr"], id=f"dashboard {number}")
    for block in re.findall(r"```promql\n(.*?)```", OPERATIONS, re.DOTALL):
        for number, lines in enumerate(block.strip().split("\n\n")):
            yield pytest.param(lines, id=f"operations {number}")
    (scaled,) = documents("kubernetes/keda.yaml")
    for trigger in scaled["spec"]["triggers"]:
        yield pytest.param(trigger["metadata"]["query"], id="keda")


@pytest.mark.parametrize("query", queries())
def test_queries_name_metrics_labels_and_values_that_exist(query: str) -> None:
    assert list(strays(query)) == []
    assert read_by(query), "it reads something"


@pytest.mark.parametrize(
    ("query", "stray"),
    [
        ("tilework_devices_upp", "metric tilework_devices_upp"),
        ("rate(tilework_slack_seconds_sum[5m])", "metric tilework_slack_seconds_sum"),
        ("rate(tilework_decision_seconds[5m])", "metric tilework_decision_seconds"),
        ('tilework_requests_total{result="done"}', "label result of tilework_requests_total"),
        ('x or tilework_requests_total{outcome=~"done|late"}', "value 'late' of outcome of tilework_requests_total"),
        ("sum by (tenant) (tilework_jobs_queued)", "label tenant"),
        ("tilework_devices / on (tenant) tilework_devices_up", "label tenant"),
    ],
)
def test_what_does_not_exist_is_found(query: str, stray: str) -> None:
    assert stray in list(strays(query))


def test_the_dashboard_shows_what_matters_by_labels_that_there_are() -> None:
    used = set[str]()
    for target in targets():
        read = {SERIES[name] for name in read_by(target["expr"])}
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= {name for family in read for name in family.label_names}, target
        used |= {family.name for family in read}
    needed = (
        "deadlines_total slack_seconds jobs_queued device_busy_seconds_total steps_total refusals_total eta_error_ratio"
        " device_memory_bytes card_busy_ratio card_memory_bytes card_power_watts card_slowed"
    )
    assert {f"tilework_{name}" for name in needed.split()} <= used


def test_each_rule_says_how_bad_it_is_and_what_to_do() -> None:
    found = rules()
    assert len(found) >= 15
    assert all(number == 1 for number in Counter(rule["alert"] for rule in found).values())
    for rule in found:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["alert"].startswith("Tilework")
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_prometheus_takes_its_files(command: list[str]) -> None:
    """And in stories of a server the rules do what they should."""
    if not debian.has("promtool", "prometheus"):
        pytest.skip("needs promtool, of the Debian package prometheus")
    result = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# The documentation.


def test_all_metrics_can_be_printed_as_a_table() -> None:
    text = "\n".join(tables())
    assert re.findall(r"^\| `(tilework_\w+)` \|", text, re.MULTILINE) == [family.name for family in FAMILIES]
    assert "`expired`" in text
    assert "`too_large`" in text


def test_the_page_names_only_metrics_that_exist() -> None:
    names = set(re.findall(r"`(tilework_\w+)`", OPERATIONS))
    assert names
    assert names <= {family.name for family in FAMILIES}


def test_metrics_are_declared_once_and_each_label_says_its_values() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert len(set(family.label_names)) == len(family.labels)
        assert list(family.bounds) == sorted(family.bounds)
        for label in family.labels:
            assert bool(label.values) != (label in OPEN_LABELS), (family.name, label.name)
            assert len(set(label.values)) == len(label.values)
