import pytest

from opslot.models import MODEL_CONFIG_REGISTRY, MODELING_REGISTRY


@pytest.fixture
def restored_registries(monkeypatch):
    """What a test registers is removed after it: error messages list the served architectures."""
    for registry in (MODELING_REGISTRY, MODEL_CONFIG_REGISTRY):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
