"""No example of hypothesis is timed: a loaded machine is no fault of the code."""

import pytest
from hypothesis import settings

from topologies.family_registry import FAMILIES

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")


@pytest.fixture
def own_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
