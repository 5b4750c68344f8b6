import importlib
import os
import sys
from types import ModuleType

import pytest
import torch

from opslot.ops.attention.flash4_library import load_interface

_VARIABLES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package in place of FlashAttention 4 that keeps the variables it was imported with."""
    package = tmp_path / "site/flash_attn/cute"
    package.mkdir(parents=True)
    (package / "interface.py").write_text(f"import os\nseen = [os.environ.get(name) for name in {_VARIABLES}]\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path / "cache"))
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_compiled_kernels_go_to_opslots_cache(library):
    assert load_interface().seen == ["1", str(library / "cache/flash_attention_4")]
    assert not any(name in os.environ for name in _VARIABLES)


@pytest.mark.parametrize(
    ("given", "seen"),
    [({0: "0"}, ["0", None]), ({0: "1", 1: "/there"}, ["1", "/there"]), ({1: "/there"}, ["1", "/there"])],
)
def test_environment_variables_take_precedence(library, monkeypatch, given, seen):
    for index, value in given.items():
        monkeypatch.setenv(_VARIABLES[index], value)
    assert load_interface().seen == seen


@pytest.mark.parametrize("more", [(), (None, None, None)], ids=["4.0.0b16", "4.0.0b36"])
def test_forward_takes_what_releases_return(monkeypatch, more):
    """Later releases return further values after the output and the logsumexp."""
    interface = ModuleType("flash_attn.cute.interface")

    def forward(q, k, v, *, out, lse, **options):
        return (out.copy_(q + 1), lse.zero_(), *more)

    interface._flash_attn_fwd = forward
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    flash4 = importlib.import_module("opslot.ops.attention.flash4")
    monkeypatch.setattr(flash4, "_INTERFACE", interface)
    q = torch.zeros(1, 4, 2, 8)
    out, lse = flash4.flash_attn_func(q, q, q, return_lse=True)
    assert torch.equal(out, q + 1)
    assert lse.shape == (1, 2, 4)
