"""Emitted files: as the golden ones, and valid by the schemas that their readers publish.

``HULLSPEED_WRITE_GOLDEN=1 pytest tests/launch/test_emit.py`` writes the golden files anew.
"""

from __future__ import annotations

import configparser
import functools
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hullspeed.errors import UsageError
from hullspeed.launch.command import build_command
from hullspeed.launch.emit import TARGETS, emit
from hullspeed.launch.emit.dashboards import metric_names
from hullspeed.launch.flagtable import FlagTable
from hullspeed.launch.settings import Settings

HERE = Path(__file__).parent
BASE = Settings(
    model="Qwen/Qwen3.6-27B-FP8",
    version="0.33.0",
    gpu="H100-SXM",
    context_tokens=32768,
    max_num_seqs=256,
    kv_dtype="fp8",
    prefix_caching=False,
    draft_tokens=3,
    reasoning_parser="qwen3",
    tool_parser="qwen3_coder",
)
NODES = BASE.with_(nodes=2, tensor_parallel=8, pipeline_parallel=2)
SGLANG = BASE.with_(engine="sglang", version="0.5.23", prefix_caching=None)
TRTLLM = Settings(
    model="Qwen/Qwen3-32B", engine="trtllm", version="1.2.1", gpu="H100-SXM",
    tensor_parallel=2, context_tokens=16384, max_num_seqs=64, kv_dtype="fp8",
)  # fmt: skip
CASES = {
    **{f"vllm-{target}": (target, BASE) for target in TARGETS if target != "lws"},
    "vllm-lws": ("lws", NODES),
    "vllm-slurm-nodes": ("slurm", NODES),
    "vllm-kserve-nodes": ("kserve", NODES),
    "vllm-kubernetes-replicas": ("kubernetes", BASE.with_(replicas=3)),
    **{
        f"sglang-{target}": (target, SGLANG)
        for target in TARGETS
        if target not in ("lws", "kserve", "ray")
    },
    "sglang-lws": ("lws", SGLANG.with_(nodes=2, tensor_parallel=16)),
    **{
        f"trtllm-{target}": (target, TRTLLM)
        for target in ("command", "docker", "compose", "kubernetes", "systemd", "slurm", "skypilot")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_golden_files(name: str) -> None:
    folder = HERE / "golden" / name
    files = emit(*CASES[name])
    if os.environ.get("HULLSPEED_WRITE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    golden = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert files == golden


def validate(document: Any, against: dict[str, Any]) -> None:
    """Without the check of the schema itself, which takes seconds for a large one."""
    jsonschema.Draft202012Validator(against).validate(document)


@functools.cache
def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((HERE / "schemas" / f"{name}.json").read_text("utf-8"))
    return loaded


def documents(files: dict[str, str]) -> list[dict[str, Any]]:
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml") and name != "serve.yaml"
        for document in yaml.safe_load_all(text)
    ]


def validate_kubernetes(document: dict[str, Any]) -> None:
    kind = document["kind"]
    if kind in ("Deployment", "Service"):
        kubernetes = schema("kubernetes-1.36")
        validate(document, {**kubernetes["kinds"][kind], "definitions": kubernetes["definitions"]})
    elif kind == "ConfigMap":
        assert all(isinstance(text, str) for text in document["data"].values())
    else:
        version = document["apiVersion"].rpartition("/")[2]
        validate(document, schema(f"{kind.lower()}-{version}"))


KUBERNETES = [name for name, (target, _) in CASES.items() if target in (
    "kubernetes", "lws", "kserve", "prometheus")]  # fmt: skip


@pytest.mark.parametrize("name", KUBERNETES)
def test_kubernetes_files_are_valid_by_their_schemas(name: str) -> None:
    seen = [one for one in documents(emit(*CASES[name])) if "kind" in one]
    assert seen
    for document in seen:
        validate_kubernetes(document)


def test_the_schemas_refuse_what_is_wrong() -> None:
    (deployment,) = [
        one for one in documents(emit("kubernetes", BASE)) if one["kind"] == "Deployment"
    ]
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate_kubernetes(deployment)
    (service,) = documents(emit("kserve", BASE))
    service["spec"]["modle"] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate_kubernetes(service)


@pytest.mark.parametrize("name", ["vllm-kubernetes", "sglang-kubernetes", "vllm-lws"])
def test_services_and_monitors_select_the_pods(name: str) -> None:
    by_kind = {one["kind"]: one for one in documents(emit(*CASES[name]))}
    workload = by_kind.get("Deployment") or by_kind["LeaderWorkerSet"]
    template = workload["spec"].get("template") or workload["spec"]["leaderWorkerTemplate"][
        "leaderTemplate"]  # fmt: skip
    labels = template["metadata"]["labels"]
    selector = dict(by_kind["Service"]["spec"]["selector"])
    selector.pop("leaderworkerset.sigs.k8s.io/worker-index", None)
    assert selector.items() <= labels.items()
    assert by_kind["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == "compose"])
def test_compose_files_are_valid_by_the_compose_specification(name: str) -> None:
    (document,) = documents(emit(*CASES[name]))
    validate(document, schema("compose-spec"))
    (service,) = document["services"].values()
    assert service["ports"] == ["127.0.0.1:8000:8000"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == "skypilot"])
def test_skypilot_files_are_valid_by_its_schemas(name: str) -> None:
    (document,) = documents(emit(*CASES[name]))
    schemas = schema("skypilot-0.14")
    assert document.keys() <= schemas["task"]["properties"].keys()
    assert document["resources"].keys() <= schemas["resources"]["properties"].keys()
    validate(document["envs"], schemas["task"]["properties"]["envs"])


@pytest.mark.parametrize("name", [
    name for name, case in CASES.items() if case[0] in ("docker", "slurm", "command")
])  # fmt: skip
def test_scripts_are_shell(name: str, tmp_path: Path) -> None:
    for file, text in emit(*CASES[name]).items():
        if file.endswith(".sh"):
            (tmp_path / file).write_text(text)
            shell = "bash" if file == "slurm.sh" else "sh"
            subprocess.run([shell, "-n", str(tmp_path / file)], check=True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == "systemd"])
def test_units_run_the_gate_first(name: str) -> None:
    files = emit(*CASES[name])
    text = next(text for file, text in files.items() if file.endswith(".service"))
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text.replace("\\\n ", " "))
    service = parser["Service"]
    assert "hullspeed preflight" in service["ExecStartPre"]
    words = shlex.split(service["ExecStart"])
    settings = CASES[name][1]
    command = build_command(settings)
    expected = [*command.argv[1:], *command.key_flags("${SGLANG_API_KEY}")]
    assert words[1:] == expected


def test_ray_arguments_are_vllm_s() -> None:
    (document,) = documents(emit("ray", BASE))
    (model,) = document["applications"][0]["args"]["llm_configs"]
    table = FlagTable("vllm", "0.33.0")
    for name in model["engine_kwargs"]:
        assert table.match(f"--{name}") is not None
    assert model["accelerator_type"] == "H100"


@pytest.mark.parametrize("settings", [BASE, SGLANG])
def test_rules_and_panels_use_the_engine_s_metrics(settings: Settings) -> None:
    known = set(metric_names(settings.engine).values())
    prefix = f"{settings.engine}:"
    texts = [*emit("prometheus", settings).values(), *emit("grafana", settings).values()]
    for text in texts:
        for word in text.replace("(", " ").replace("[", " ").replace('"', " ").split():
            if word.startswith(prefix):
                assert word.removesuffix("_bucket").rstrip("),") in known


def test_dashboard_panels_do_not_overlap() -> None:
    board = json.loads(emit("grafana", BASE)["dashboard.json"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        assert panel["description"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("helm", BASE),
        ("docker", NODES),
        ("ray", SGLANG),
        ("kserve", SGLANG),
        ("lws", TRTLLM.with_(nodes=2)),
        ("skypilot", BASE.with_(gpu=None)),
        ("skypilot", BASE.with_(gpu="DGX Spark")),
        ("grafana", TRTLLM),
    ],
)
def test_what_a_target_cannot_carry_is_a_usage_error(target: str, settings: Settings) -> None:
    with pytest.raises(UsageError):
        emit(target, settings)


def test_the_compose_specification_refuses_what_is_wrong() -> None:
    (document,) = documents(emit("compose", BASE))
    document["services"]["vllm"]["imagee"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        validate(document, schema("compose-spec"))
