"""The real tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hullspeed.arch.gguf import GgufFile
from hullspeed.sources.files import ModelFiles
from hullspeed.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_files: ModelFiles) -> Mapping[str, object]:
    return GgufFile(smollm2_files.weights[0]).metadata


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_metadata: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)
