import pytest

from opslot.models import MODEL_CONFIG_REGISTRY, MODELING_REGISTRY


@pytest.fixture
def restored_registries(monkeypatch):
    """What a test registers is removed after it: error messages list the served architectures."""
    for registry in (MODELING_REGISTRY, MODEL_CONFIG_REGISTRY):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))


@pytest.fixture
def count_calls(monkeypatch):
    """count_calls(name=(owner, attribute)) returns the number of calls of that function so far, by name."""

    def count(**functions):
        seen = dict.fromkeys(functions, 0)

        def counting(name, function):
            def counted(*args):
                seen[name] += 1
                return function(*args)

            return counted

        for name, (owner, attribute) in functions.items():
            monkeypatch.setattr(owner, attribute, counting(name, getattr(owner, attribute)))
        return seen

    return count
