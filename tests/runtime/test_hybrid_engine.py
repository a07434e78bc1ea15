"""A hybrid through the library face: loaded from a folder, sized, cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from hullspeed.core.sampling import SamplingParams
from hullspeed.errors import CapacityError, UsageError
from hullspeed.runtime.library import Engine
from support.families import write_family

from .tiny import write_tokenizer

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
TEXT = "The keeper of the lighthouse climbed the stairs every evening and wrote in his book: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    kinds = ["linear_attention", "full_attention"]
    write_family(path, "qwen3_5", num_hidden_layers=2, layer_types=kinds, vocab_size=307)
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_prompt_asked_again_is_cached_and_answered_alike(folder: Path, store: str) -> None:
    options = {"weight_dtype": "fp32", "threads": 1, "max_running": 3, "page_tokens": 16}
    with Engine(str(folder), state_store=store, **options) as engine:  # type: ignore[arg-type]
        assert engine.info.n_state_slots > 0
        assert engine.info.family == "qwen3_5"
        first, second = (engine.generate(TEXT, PARAMS)[0] for _ in range(2))
        talk = [{"role": "user", "content": TEXT * 2}]
        chats = [engine.chat(talk, PARAMS)[0] for _ in range(2)]
    n_prompt = len(TEXT)
    assert (first.cached_tokens, second.cached_tokens) == (0, n_prompt - 1)
    assert (chats[0].cached_tokens, chats[1].cached_tokens) == (n_prompt - 1, 2 * n_prompt - 1)
    if store == "fp32":
        assert second.token_ids == first.token_ids
        assert chats[1].token_ids == chats[0].token_ids


def test_states_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(CapacityError, match="recurrent states"):
        Engine(str(folder), kernels="ref", kv_budget_bytes=100_000)


def test_chained_hashes_are_for_models_without_state(folder: Path) -> None:
    with pytest.raises(UsageError, match="prefix cache"):
        Engine(str(folder), kernels="ref", max_running=2, cache="hash")
