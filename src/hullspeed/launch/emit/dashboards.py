"""Dashboards: Prometheus rules and a Grafana dashboard over the engine's own metrics."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from typing import Any

from hullspeed.errors import UsageError
from hullspeed.launch.emit.pods import labels
from hullspeed.launch.emit.text import as_json, as_yaml
from hullspeed.launch.settings import Settings

_RATE = "5m"


@functools.cache
def metric_names(engine: str) -> dict[str, str]:
    """What each engine calls its metrics.

    Raises:
        UsageError: for an engine that exports none that are known here.
    """
    text = files("hullspeed.launch.emit").joinpath("metrics.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, str]] = tomllib.loads(text)
    if engine not in table:
        raise UsageError(
            "no metrics are known for this engine", seen=engine, fix=f"use {', '.join(table)}"
        )
    return table[engine]


def rules(settings: Settings) -> dict[str, str]:
    """Recording and alerting rules, as a PrometheusRule and as a plain rule file."""
    groups = {
        "groups": [{"name": settings.slug, "rules": [*_recorded(settings), *_alerts(settings)]}]
    }
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": settings.slug, "labels": labels(settings)},
        "spec": groups,
    }
    comment = "Written by hullspeed launch. Thresholds are starting points: set your own objective."
    return {
        "prometheus-rules.yaml": as_yaml(groups, comment=comment),
        "prometheusrule.yaml": as_yaml(resource, comment=comment),
    }


def _quantile(metric: str, quantile: float, by: str = "model_name") -> str:
    rate = f"sum by ({by}, le) (rate({metric}_bucket[{_RATE}]))"
    return f"histogram_quantile({quantile}, {rate})"


def _hit_ratio(names: dict[str, str]) -> str:
    hits, queries = names["cache_hits"], names["cache_queries"]
    return (
        f"sum by (model_name) (rate({hits}[{_RATE}]))"
        f" / clamp_min(sum by (model_name) (rate({queries}[{_RATE}])), 1)"
    )


def _recorded(settings: Settings) -> list[dict[str, Any]]:
    names = metric_names(settings.engine)
    expressions = {
        "model:ttft_seconds:p95": _quantile(names["ttft"], 0.95),
        "model:itl_seconds:p95": _quantile(names["itl"], 0.95),
        "model:prefix_cache_hit_ratio": _hit_ratio(names),
        "model:generation_tokens:rate": (
            f"sum by (model_name) (rate({names['generation_tokens']}[{_RATE}]))"
        ),
    }
    return [{"record": name, "expr": expr} for name, expr in expressions.items()]


def _alerts(settings: Settings) -> list[dict[str, Any]]:
    names = metric_names(settings.engine)
    stuck = f"{names['running']} > 0 and rate({names['generation_tokens']}[{_RATE}]) == 0"
    return [
        _alert("EngineDown", f'absent({names["running"]}) == 1', "2m", "critical",
               "No engine reports its metrics."),
        _alert("EngineStuck", stuck, "3m", "critical",
               "Requests run and no token has come for minutes: alive, and not serving."),
        _alert("QueueGrows", f"min_over_time({names['waiting']}[10m]) > 0", "5m", "warning",
               "Requests have waited without a pause for ten minutes: the load is above capacity."),
        _alert("CacheFull", f"{names['kv_usage']} > 0.95", "10m", "warning",
               "The KV cache is full: requests wait or are preempted, prefixes evicted."),
        _alert("Preemptions", f"rate({names['preemptions']}[10m]) > 0.1", "10m", "warning",
               "Running requests are put back and computed again: lower max sequences or context."),
        _alert("SlowFirstToken", "model:ttft_seconds:p95 > 5", "10m", "warning",
               "One request in twenty waits more than 5 s for its first token."),
    ]  # fmt: skip


def _alert(name: str, expr: str, wait: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }


def dashboard(settings: Settings) -> dict[str, str]:
    """A Grafana dashboard; each panel says what it shows and what it cannot show."""
    names = metric_names(settings.engine)
    panels = [
        _stat("Running", f"sum({names['running']})", "short", "Requests that get tokens now."),
        _stat("Waiting", f"sum({names['waiting']})", "short", "Requests that wait for room."),
        _stat("Output tokens/s", f"sum(rate({names['generation_tokens']}[{_RATE}]))", "short",
              "Tokens of aborted requests count too."),
        _stat("KV cache used", f"max({names['kv_usage']})", "percentunit",
              "Of the fullest engine. Cached prefixes that can be evicted are not counted."),
        _series("Time to first token", _quantiles(names["ttft"]), "s",
                "Includes the queue. A reasoning model's first token is no answer yet."),
        _series("Between tokens", _quantiles(names["itl"]), "s",
                "Buckets are coarse below 10 ms: the quantile is interpolated there."),
        _series("Whole request", _quantiles(names["e2e"]), "s", "Only requests that finished."),
        _series("In the queue", _quantiles(names["queue"]), "s",
                "Falls behind when requests are refused before they are queued."),
        _series("Tokens", [
            (f"sum(rate({names['prompt_tokens']}[{_RATE}]))", "prompt"),
            (f"sum(rate({names['generation_tokens']}[{_RATE}]))", "output"),
        ], "short", "Prompt tokens include those that came from the prefix cache."),
        _series("Prefix cache hits", [(_hit_ratio(names), "{{model_name}}")], "percentunit",
                "Share of prompt tokens, not of requests."),
        _series("Load", [(f"sum({names['running']})", "running"),
                         (f"sum({names['waiting']})", "waiting")], "short",
                "Sampled at each scrape: short bursts do not show."),
        _series("Preemptions", [(f"sum(rate({names['preemptions']}[{_RATE}]))", "per second")],
                "short", "Work that is done twice."),
    ]  # fmt: skip
    document = {
        "title": f"{settings.served_name or settings.model} ({settings.engine})",
        "uid": settings.slug[:40],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["hullspeed", settings.engine],
        "templating": {"list": [_datasource_variable()]},
        "panels": _placed(panels),
    }
    return {"dashboard.json": as_json(document)}


def _quantiles(metric: str) -> list[tuple[str, str]]:
    return [(_quantile(metric, q / 100, "job"), f"p{q}") for q in (50, 90, 99)]


def _stat(title: str, expr: str, unit: str, description: str) -> dict[str, Any]:
    return {**_panel("stat", title, [(expr, "")], unit, description), "width": 6, "height": 4}


def _series(
    title: str, queries: list[tuple[str, str]], unit: str, description: str
) -> dict[str, Any]:
    return {**_panel("timeseries", title, queries, unit, description), "width": 12, "height": 8}


def _panel(
    kind: str, title: str, queries: list[tuple[str, str]], unit: str, description: str
) -> dict[str, Any]:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def _placed(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Panels in rows of 24 columns, in the order given."""
    placed: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        width, height = panel.pop("width"), panel.pop("height")
        if x + width > 24:
            x, y = 0, y + placed[-1]["gridPos"]["h"]
        place = {"x": x, "y": y, "w": width, "h": height}
        placed.append({"id": number, **panel, "gridPos": place})
        x += width
    return placed


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }
