"""The real tokenizer."""

from __future__ import annotations

import pytest

from hullspeed.sources.files import ModelFiles
from hullspeed.text.model_text import read_model_text
from hullspeed.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_files: ModelFiles) -> Tokenizer:
    return read_model_text(smollm2_files.weights[0]).tokenizer
