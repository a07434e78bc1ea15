"""The hub, on loopback: what is fetched, what never is, and what each refusal says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hullspeed.arch.load import arch_from_remote
from hullspeed.errors import CorruptFileError, ModelError, SourceError
from hullspeed.sources.hub import split
from hullspeed.sources.remote import read_remote
from support.fake_hub import COMMIT, FakeHub, fake_hub
from support.patience import PATIENCE_S

_PULL = """
import json, sys
from hullspeed.errors import SourceError
from hullspeed.sources import resolve
try:
    files = resolve(sys.argv[1], need_weights="--no-weights" not in sys.argv)
except SourceError as error:
    print(error)
    sys.exit(2)
print(json.dumps({"kind": files.kind, "revision": files.revision,
                  "names": sorted(path.name for path in files.all())}))
"""


def _pull(
    reference: str, hub: FakeHub, home: Path, *more: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface-hub reads its environment when it is imported."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", _PULL, reference, *more],
        env={
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "hf_test",
            "HF_HUB_DISABLE_XET": "1", **env,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "sub").mkdir(parents=True)
    _checkpoint(root)
    for name in ("modeling_evil.py", "pytorch_model.bin", "sub/config.json", "README.md"):
        (root / name).write_bytes(b"never fetched")
    (root / "tokenizer.json").write_text("{}")
    return root


def _checkpoint(root: Path) -> None:
    """A Llama of 2 layers in two shards."""
    config = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "torch_dtype": "float32", "tie_word_embeddings": False, "eos_token_id": 2,
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    (root / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (16, 8),
    }
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (8, 8),
            f"model.layers.{i}.self_attn.k_proj.weight": (4, 8),
            f"model.layers.{i}.self_attn.v_proj.weight": (4, 8),
            f"model.layers.{i}.self_attn.o_proj.weight": (8, 8),
            f"model.layers.{i}.mlp.gate_proj.weight": (12, 8),
            f"model.layers.{i}.mlp.up_proj.weight": (12, 8),
            f"model.layers.{i}.mlp.down_proj.weight": (8, 12),
            f"model.layers.{i}.input_layernorm.weight": (8,),
            f"model.layers.{i}.post_attention_layernorm.weight": (8,),
        }
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    shards: dict[str, dict[str, np.ndarray]] = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, array) in enumerate(arrays.items()):
        shards["ab"[i % 2] + ".safetensors"][name] = array
    for name, content in shards.items():
        save_file(content, root / name)
    weight_map = {tensor: shard for shard, content in shards.items() for tensor in content}
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def test_fetches_models_and_never_code(repository: Path, tmp_path: Path) -> None:
    with fake_hub(repository) as hub:
        done = _pull("hf:org/model", hub, tmp_path / "home")
        assert done.returncode == 0, done.stderr + done.stdout
        found = json.loads(done.stdout)
        assert found["kind"] == "safetensors"
        assert found["revision"] == COMMIT
        expected = "a.safetensors b.safetensors config.json generation_config.json tokenizer.json"
        assert found["names"] == expected.split()
        fetched = {path.rpartition("/")[2] for method, path in hub.requests if method == "GET"}
        assert not fetched & {"modeling_evil.py", "pytorch_model.bin", "README.md"}
        assert "Bearer hf_test" in hub.tokens
        # The second time nothing is transferred, and none of it is needed when offline.
        offline = _pull("org/model", hub, tmp_path / "home", HF_HUB_OFFLINE="1")
        assert json.loads(offline.stdout) == found


def test_weights_are_left_on_the_hub_where_none_are_needed(
    repository: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with fake_hub(repository) as hub:
        done = _pull("org/model", hub, home, "--no-weights")
        assert json.loads(done.stdout)["kind"] == "config", done.stderr
        assert not [path for method, path in hub.requests if path.endswith(".safetensors")]
        assert json.loads(_pull("org/model", hub, home).stdout)["kind"] == "safetensors"
        # Once here, they are found.
        done = _pull("org/model", hub, home, "--no-weights")
        assert json.loads(done.stdout)["kind"] == "safetensors"


def test_refusals_say_what_to_do(repository: Path, tmp_path: Path) -> None:
    with fake_hub(repository) as hub:
        assert "no such model on the hub" in _pull("hf:org/none", hub, tmp_path / "h").stdout
        cold = _pull("org/model", hub, tmp_path / "cold", HF_HUB_OFFLINE="1")
        assert cold.returncode == 2
        assert "not in the local cache" in cold.stdout
    with fake_hub(repository, gated=True) as hub:
        assert "the model is gated" in _pull("hf:org/model", hub, tmp_path / "h").stdout


def test_references() -> None:
    assert split("org/model") == ("org/model", None, None)
    assert split("org/model@v1.0") == ("org/model", None, "v1.0")
    assert split("org/model/m-Q4.gguf@main") == ("org/model", "m-Q4.gguf", "main")
    for bad in ("", "model", "a/b/c", "../etc", "a/..", "a/b@", "a/b@../x", "-x/y", "a b/c"):
        with pytest.raises(SourceError, match="not a model on the hub"):
            split(bad)


@pytest.mark.parametrize("ranges", [True, False])
def test_headers_without_weights(
    repository: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with fake_hub(repository, ranges=ranges) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        model = read_remote("org/model")
        arch = arch_from_remote(model)
    assert model.revision == COMMIT
    assert [header.name for header in model.headers] == ["a.safetensors", "b.safetensors"]
    assert hub.tokens == {"Bearer hf_test"}
    expected = 2 * 16 * 8 + 8 + 2 * (8 * 8 * 2 + 2 * 4 * 8 + 3 * 8 * 12 + 16)
    assert arch.param_count() == expected
    assert arch.dtype == "fp32"
    assert arch.eos_token_ids == (2, 7)


def test_only_headers_are_transferred(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "model.safetensors.index.json").unlink()
    big = {"model.embed_tokens.weight": np.zeros((2048, 1024), np.float32)}
    save_file(big, repository / "model.safetensors")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with fake_hub(repository) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        model = read_remote("org/model")
    assert model.headers[0].file_bytes > 8_000_000
    assert hub.sent_bytes < 300_000


def test_remote_refusals(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with fake_hub(repository) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(SourceError, match="no such model"):
            read_remote("org/none")
        with pytest.raises(SourceError, match="no such revision"):
            read_remote("org/model@nope")
        (repository / "b.safetensors").write_bytes(b"\xff" * 100)
        with pytest.raises(CorruptFileError, match="header that cannot be"):
            read_remote("org/model")
        (repository / "b.safetensors").unlink()
        with pytest.raises(SourceError, match="shard named in the index is missing"):
            read_remote("org/model")
        index = {"weight_map": {"x": "../../etc/passwd.safetensors"}}
        (repository / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CorruptFileError, match="no plain"):
            read_remote("org/model")
        (repository / "config.json").unlink()
        with pytest.raises(SourceError, match=r"no config\.json"):
            read_remote("org/model")
    with fake_hub(repository, gated=True) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(SourceError, match="gated"):
            read_remote("org/model")
    with pytest.raises(SourceError, match="out of reach"):
        read_remote("org/model")  # the server is gone
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        read_remote("org/model")


def test_headers_that_contradict_the_config(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps({**config, "intermediate_size": 16}))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with fake_hub(repository) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        model = read_remote("org/model")
    with pytest.raises(ModelError, match=r"do not fit config\.json in 6 tensors"):
        arch_from_remote(model)
