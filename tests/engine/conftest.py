"""Plans of this folder's tests do not depend on measured times."""

import pytest

from pipetransformer import autocache, planner
from tests.engine.even_profile import even_profile, no_rates
from tests.support.device_ranks import build_libraries


@pytest.fixture(autouse=True)
def _even_profiles(monkeypatch):
    monkeypatch.setattr(planner, "profile", even_profile)
    monkeypatch.setattr(autocache, "measure_rates", no_rates)


@pytest.fixture(scope="session")
def libraries():
    """The pretended accelerator, and what carries its tensors between ranks."""
    return build_libraries()
