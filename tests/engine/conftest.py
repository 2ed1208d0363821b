"""Plans of this folder's tests do not depend on measured times."""

import pytest

from pipetransformer import planner
from tests.engine.even_profile import even_profile


@pytest.fixture(autouse=True)
def _even_profiles(monkeypatch):
    monkeypatch.setattr(planner, "profile", even_profile)
