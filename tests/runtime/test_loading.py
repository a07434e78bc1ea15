from __future__ import annotations

from pathlib import Path

import pytest

from hullspeed.errors import CorruptFileError, UsageError
from hullspeed.runtime.config import EngineConfig
from hullspeed.runtime.loading import load_engine

from .tiny import CONTEXT_TOKENS, VOCAB, write_checkpoint, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, "llama")
    write_tokenizer(path)
    return path


def test_what_was_loaded_is_told(folder: Path) -> None:
    heard: list[tuple[str, float]] = []
    engine = load_engine(
        EngineConfig(
            model=str(folder), kernels="ref", page_tokens=16, max_running=3, threads=1,
            kv_budget_bytes=2**20,
        ),
        lambda stage, share: heard.append((stage, share)),
    )  # fmt: skip
    info = engine.info
    # 2 layers, K and V of 2 heads of 16 floats.
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.n_pages == 2**20 // (info.kv_bytes_per_token * 16)
    assert (info.vocab, info.max_context_tokens, info.family) == (VOCAB, CONTEXT_TOKENS, "llama")
    assert info.eos_token_ids == (256,)
    assert info.name == folder.name
    assert engine.text.template is not None
    assert list(dict.fromkeys(stage for stage, _ in heard)) == ["weights", "warm-up"]


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"page_tokens": 0},
        {"max_running": 0},
        {"step_tokens": -1},
        {"max_context_tokens": 0},
        {"max_context_tokens": CONTEXT_TOKENS + 1},
    ],
)
def test_knobs_that_cannot_be(folder: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        load_engine(EngineConfig(model=str(folder), kernels="ref", **options))  # type: ignore[arg-type]


def test_damaged_weights_are_one_clear_error(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    with pytest.raises(CorruptFileError):
        load_engine(EngineConfig(model=str(tmp_path), kernels="ref"))
