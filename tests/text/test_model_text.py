from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hullspeed.errors import CorruptFileError
from hullspeed.sources.files import ModelFiles
from hullspeed.text.model_text import from_metadata, read_model_text

from .test_tokenizer import small_metadata, write_folder


def folder(path: Path, **files: Any) -> Path:
    write_folder(path, small_metadata("qwen2"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_a_gguf_file_says_it_all(smollm2_files: ModelFiles) -> None:
    text = read_model_text(smollm2_files.weights[0])
    assert text.eos_token_ids == (2,)
    assert text.template is not None
    assert "<|im_start|>" in text.template


def test_end_tokens_are_the_union_of_what_all_files_name(tmp_path: Path) -> None:
    metadata = small_metadata("qwen2")
    end = metadata["tokenizer.ggml.eos_token_id"]
    path = folder(
        tmp_path,
        config={"eos_token_id": 5, "text_config": {"eos_token_id": [7]}},
        generation_config={"eos_token_id": [6, 5]},
    )
    assert read_model_text(path).eos_token_ids == (end, 5, 7, 6)


def test_the_end_of_turn_that_only_the_template_names_counts() -> None:
    metadata = small_metadata("qwen2")
    end = metadata.pop("tokenizer.ggml.eos_token_id")
    assert from_metadata(metadata).eos_token_ids == ()
    template = {"tokenizer.chat_template": "{{ messages[0].content }}<|end|>"}
    assert from_metadata({**metadata, **template}).eos_token_ids == (end,)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}], "y"),
        (None, None),
        (5, None),
    ],
)
def test_the_template_of_a_folder(tmp_path: Path, value: object, found: str | None) -> None:
    path = folder(tmp_path, tokenizer_config={"chat_template": value})
    assert read_model_text(path).template == found
    (path / "chat_template.jinja").write_text("own file")
    assert read_model_text(path).template == "own file"


@pytest.mark.parametrize("value", ["2", -1, True, [1, "x"], {"a": 1}])
def test_an_end_token_that_is_none_is_a_corrupt_file(tmp_path: Path, value: object) -> None:
    with pytest.raises(CorruptFileError, match="eos_token_id"):
        read_model_text(folder(tmp_path, config={"eos_token_id": value}))
