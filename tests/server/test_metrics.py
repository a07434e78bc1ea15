from __future__ import annotations

import time
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from hullspeed.server.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    ITL_BUCKETS_S,
    LATENCY_BUCKETS_S,
    TTFT_BUCKETS_S,
)
from support.live_server import live_server

SNAPSHOT = Path(__file__).with_name("metrics.txt")


def shape(page: str) -> list[str]:
    """Every name with its type, label names and buckets; no values."""
    lines = []
    for family in text_string_to_metric_families(page):
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        bounds = list(dict.fromkeys(s.labels["le"] for s in family.samples if "le" in s.labels))
        fixed = {
            f"{name}={value}"
            for sample in family.samples
            for name, value in sample.labels.items()
            if name in ("reason", "finished_reason")
        }
        lines.append(
            " ".join([family.name, family.type, ",".join(labels), *sorted(fixed), *bounds])
        )
    return lines


def page_after_one_request(client: httpx2.Client) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    return client.get("/metrics").text


def test_names_labels_and_buckets_stay() -> None:
    """Dashboards depend on them. After a wanted change, write the new shape to metrics.txt."""
    with live_server() as server, server.client() as client:
        assert shape(page_after_one_request(client)) == SNAPSHOT.read_text().splitlines()


def test_values_of_one_request() -> None:
    with live_server() as server, server.client() as client:
        begin_s = time.monotonic()
        page = page_after_one_request(client)
        took_s = time.monotonic() - begin_s
    values = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values[sample.name, *sorted(sample.labels.values())] = sample.value

    def value(name: str, *labels: str) -> float:
        return values[name, *sorted((*labels, "0", "fake"))]

    for prefix in ("hullspeed", "vllm"):
        assert value(f"{prefix}:prompt_tokens_total") == 21
        assert value(f"{prefix}:generation_tokens_total") == 9
        assert value(f"{prefix}:request_success_total", "stop") == 1
        assert value(f"{prefix}:request_success_total", "error") == 0
        assert value(f"{prefix}:time_to_first_token_seconds_count") == 1
        assert value(f"{prefix}:inter_token_latency_seconds_count") == 8
        assert value(f"{prefix}:request_generation_tokens_sum") == 9
        assert value(f"{prefix}:e2e_request_latency_seconds_count") == 1
    assert 0 < value("vllm:inter_token_latency_seconds_sum") < took_s
    assert value("hullspeed:ready") == 1
    assert value("hullspeed:requests_in_flight") == 0
    route = ("POST", "/v1/chat/completions", "2xx")
    assert values["http_requests_total", *sorted(route)] == 1


def test_no_path_of_a_client_becomes_a_label(client: httpx2.Client) -> None:
    for i in range(20):
        client.get(f"/made/up/{i}")
        client.request(f"VERB{i}", "/version")
    page = client.get("/metrics").text
    assert "made" not in page
    assert "VERB" not in page
    assert 'handler="other"' in page


def test_vllm_bucket_boundaries_are_all_there() -> None:
    vllm_itl = (
        .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    )  # fmt: skip
    assert set(vllm_itl) <= set(ITL_BUCKETS_S)
    assert len(TTFT_BUCKETS_S) == 22
    vllm_latency = (
        .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
    )  # fmt: skip
    assert set(vllm_latency) <= set(LATENCY_BUCKETS_S)
    for buckets in (ITL_BUCKETS_S, TTFT_BUCKETS_S, LATENCY_BUCKETS_S):
        assert list(buckets) == sorted(set(buckets))


def test_names_are_unique_and_explained() -> None:
    names = [name for table in (GAUGES, COUNTERS, HISTOGRAMS) for name in table]
    assert len({name.ours for name in names}) == len(names)
    assert all(name.help.endswith(".") for name in names)
