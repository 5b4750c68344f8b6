import importlib
import os
import sys
from types import ModuleType

import pytest
import torch

from opslot.ops.attention import op
from opslot.ops.attention.flash4_library import load_interface
from tests.ops.attention.inputs import Attention, tensors

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


class Computed(ModuleType):
    """An interface of the library that computes forward by `op.reference`, and gradients of zero."""

    def __init__(self, more=()):
        super().__init__("flash_attn.cute.interface")
        self.more = more

    def _flash_attn_fwd(self, q, k, v, *, out, lse, learnable_sink, softmax_scale, **options):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found, _ = op.reference(Attention(False), q, k, v, None, scaling=softmax_scale, s_aux=learnable_sink)
        scores = q.float() @ k.float().mT * softmax_scale
        if learnable_sink is not None:
            assert learnable_sink.data_ptr() % 4 == 0
            sinks = learnable_sink.float().view(1, -1, 1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
        return out.copy_(found), lse.copy_(scores.logsumexp(-1)), *self.more

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, dq, dk, dv, **options):
        for gradient in (dq, dk, dv):
            gradient.zero_()


@pytest.fixture
def flash4(monkeypatch):
    def load(*more):
        interface = Computed(more)
        monkeypatch.setitem(sys.modules, interface.__name__, interface)
        module = importlib.import_module("opslot.ops.attention.flash4")
        monkeypatch.setattr(module, "_INTERFACE", interface)
        return module

    pytest.importorskip("triton")
    return load


@pytest.mark.parametrize("more", [(), (None, None, None)], ids=["4.0.0b16", "4.0.0b36"])
def test_forward_takes_what_releases_return(flash4, more):
    """Later releases return further values after the output and the logsumexp."""
    q = tensors()[0].transpose(1, 2)
    out = flash4(*more).flash_attn_func(q, q, q, softmax_scale=0.25)
    expected, _ = op.reference(Attention(False), *[q.transpose(1, 2)] * 3, None, scaling=0.25)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("width", "length"), [(16, 24), (24, 600)])
def test_gradient_of_sinks_equals_that_of_the_reference(flash4, width, length):
    # Of one rank of two: an address that the library does not take.
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0]).bfloat16()[1:].requires_grad_()
    q, k, v = (x.requires_grad_() for x in tensors(kv_heads=4, width=width, length=length))
    expected, _ = op.reference(Attention(False), q, k, v, None, scaling=0.25, s_aux=sinks)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    found = flash4().flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=0.25, sinks=sinks)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected, sinks, dout)
    (gradient,) = torch.autograd.grad(found, sinks, dout.mT.contiguous().mT)
    torch.testing.assert_close(gradient, wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("sinks", [False, True])
def test_compiled_gradients_have_the_strides_of_the_inputs(flash4, sinks):
    """torch.compile allocates by the fake implementations of forward and backward."""
    flash4()
    q, k, v = (x.transpose(1, 2) for x in tensors(kv_heads=4))
    # As heads after a rotation are: not contiguous.
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    bounds, options = (None, None), (None, None, 0.25, False, None, None, 0.0)
    arguments = (q, k, v, torch.zeros(4).bfloat16() if sinks else None, *bounds)
    out, lse = torch.ops.opslot.flash_attention_4(*arguments, *options)
    torch.library.opcheck(torch.ops.opslot.flash_attention_4, (*arguments, *options), test_utils="test_faketensor")
    backward = (out, *arguments, out, lse, *options, True, True, True, sinks)
    torch.library.opcheck(torch.ops.opslot.flash_attention_4_backward, backward, test_utils="test_faketensor")
