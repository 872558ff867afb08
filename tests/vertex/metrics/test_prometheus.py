"""What a real Prometheus server makes of the endpoint, the dashboard and the alerts. One server for all of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
DEPLOY = Path(__file__).resolve().parents[3] / "docs" / "deploy"
WAIT_S = 120.0


def _until(shop: Any, ready: Any) -> Any:
    """Let the vertex's figures grow until ``ready`` returns something; a scrape is made each quarter of a second."""
    deadline = time.monotonic() + WAIT_S
    while not (found := ready()):
        assert time.monotonic() < deadline, ready
        shop.step()
        time.sleep(0.1)
    return found


def _panels() -> Iterator[tuple[str, str]]:
    """Give the panels' titles with their queries, variables filled in."""
    dashboard = json.loads((DEPLOY / "grafana" / "ftlayer.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "1m")
            for variable in ("$query", "$topology"):
                expression = expression.replace(variable, ".*")
            yield panel["title"], expression


def test_names_and_texts_are_as_prometheus_wants_them(shop: Any, promtool: Any) -> None:
    assert promtool("check", "metrics", stdin=shop.scrape()) == (0, "")


def test_openmetrics_has_exemplars(shop: Any) -> None:
    families = {each.name: each for each in text_string_to_metric_families(shop.scrape(OPEN_METRICS))}
    roots = {
        sample.exemplar.labels["root"]
        for sample in families["ftlayer_persist_seconds"].samples
        if sample.exemplar is not None
    }
    assert roots == {"0000000000000abc"}
    assert families["ftlayer_records_persisted"].type == "counter"


def test_prometheus_takes_every_sample(shop: Any, prometheus: Any) -> None:
    def health() -> Any:
        targets = prometheus.ask("targets")["activeTargets"]
        return [each["lastError"] for each in targets if each["lastScrape"][:4] != "0001"]

    assert _until(shop, health) == [""]
    (died,) = _until(shop, lambda: prometheus.query('ftlayer_records_died_total{topology="shop"}'))
    assert died["metric"]["source"] == "orders"
    assert _until(shop, lambda: prometheus.query('ftlayer_batches_total{query="clean orders"}'))


def test_exemplars_come_back_with_the_root_of_a_record(shop: Any, prometheus: Any) -> None:
    def exemplars() -> Any:
        now = time.time()
        asked = "ftlayer_record_completion_seconds_bucket"
        return prometheus.ask("query_exemplars", query=asked, start=now - 3_600, end=now + 60)

    (series, *_) = _until(shop, exemplars)
    root = int(series["exemplars"][0]["labels"]["root"], 16)
    assert root in {100 * step + 6 for step in range(1, shop.steps + 1)}, "the last of a call that was done"


@pytest.mark.parametrize(("title", "expression"), list(_panels()))
def test_each_panel_of_the_dashboard_has_series(
    shop: Any, prometheus: Any, title: str, expression: str
) -> None:
    assert _until(shop, lambda: prometheus.query(expression)), title


def test_alerts_ask_for_metrics_that_there_are(shop: Any) -> None:
    asked = set(re.findall(r"ftlayer_\w+", (DEPLOY / "prometheus" / "alerts.yml").read_text()))
    told = set(re.findall(r"^ftlayer_\w+", shop.scrape(), re.MULTILINE))
    assert len(asked) > 10
    assert asked <= told


def test_each_alert_is_a_rule_that_prometheus_takes(promtool: Any) -> None:
    code, said = promtool("check", "rules", "alerts.yml", directory=DEPLOY / "prometheus")
    assert code == 0, said


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else(promtool: Any) -> None:
    code, said = promtool("test", "rules", "alerts-test.yml", directory=DEPLOY / "prometheus")
    assert code == 0, said
