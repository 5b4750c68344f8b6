"""layer_norm: how it is bound to torch's modules, and cases that the parity harness does not cover."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import opslot
from opslot import KERNEL_REGISTRY
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.layer_norm import op
from opslot.verify.tiny import tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = {"layer_norm_implementation": "triton"}


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.LayerNorm(24, **options)
        self.other = nn.LayerNorm(24)

    def forward(self, x):
        return self.other(torch.tanh(self.norm(x)))


def test_one_channel_has_no_gradient():
    kernel = KERNEL_REGISTRY.load("layer_norm", "standard", "triton")
    x, weight = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in [(33, 1), (1,)])
    kernel(hidden_states=x, weight=weight, bias=None, eps=1e-6).backward(torch.randn(33, 1, device=DEVICE))
    assert not x.grad.any()
    assert not weight.grad.any()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from opslot.ops.layer_norm.triton import {kernel} as kernel

sizes, scalars = {sizes}, {{"rows": "i32", "x_stride": "i32", "eps": "fp32"}}
constants = {{(i,): sizes[p.name] for i, p in enumerate(kernel.params) if p.name in sizes}}
types = {{p.name: "constexpr" if p.name in sizes else scalars.get(p.name, "*{dtype}") for p in kernel.params}}
print(triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def instructions(folder, kernel, dtype, **sizes):
    """Those of a kernel on an H100, as PTX."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE.format(kernel=kernel, dtype=dtype, sizes=sizes)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "st.global" in run.stdout
    return run.stdout


@pytest.mark.slow
def test_one_channel_computes_no_difference_on_a_gpu(tmp_path):
    """A fused multiply-add would make weight * dout - average a rounding error, which 1 / sqrt(eps) multiplies."""
    sizes = {"dout_stride": 1, "x_stride": 1, "WIDTH": 1, "ROWS": 16, "COLUMNS": 1, "STAGES": 1}
    needs = {"HAS_WEIGHT": True, "NEED_X": True, "NEED_WEIGHT": False, "NEED_BIAS": False}
    assert "fma" not in instructions(tmp_path, "_backward_kernel", "fp32", **sizes, **needs)


@pytest.mark.slow
def test_mean_of_bfloat16_is_rounded_to_nearest_on_a_gpu(tmp_path):
    """Of a row of equal values it is that value; an error would be multiplied by 1 / sqrt(eps)."""
    sizes = {"WIDTH": 1152, "ROWS": 1, "COLUMNS": 2048, "HAS_WEIGHT": False, "HAS_BIAS": False}
    assert "div.rn.f32" in instructions(tmp_path, "_forward_kernel", "bf16", **sizes)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 30.1), (torch.bfloat16, 30.1), (torch.bfloat16, 3008.0)])
@pytest.mark.parametrize("width", [3, 65, 123, 1000])
def test_rows_of_equal_values_are_the_bias(width, dtype, value):
    """As in torch's layer norm: the rounding error of the mean is not multiplied by 1 / sqrt(eps)."""
    kernel = KERNEL_REGISTRY.load("layer_norm", "standard", "triton")
    x = torch.full((4, width), value, device=DEVICE, dtype=dtype)
    weight, bias = torch.ones(width, device=DEVICE, dtype=dtype), torch.randn(width, device=DEVICE).to(dtype)
    out = kernel(hidden_states=x, weight=weight, bias=bias, eps=1e-6)
    torch.testing.assert_close(out, bias.expand_as(out), rtol=0, atol=1e-7)


def net(**options):
    torch.manual_seed(0)
    model = Net(**options).to(DEVICE)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def outcome(model, x=None):
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)) if x is None else x
    model.zero_grad()
    out = model(x.to(DEVICE))
    out.square().sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def listed(model):
    return {path: row.chosen for row in opslot.explain(model) if row.op == "layer_norm" for path in row.modules}


def kernels(model):
    return {path: chosen for path, chosen in listed(model).items() if chosen != "eager"}


def test_named_kernel_runs_and_restore_undoes_it():
    model = net()
    exact, exact_gradients = outcome(model)
    opslot.bind(model, TRITON)
    assert kernels(model) == {"norm": "triton", "other": "triton"}
    (row,) = [row for row in opslot.explain(model) if row.op == "layer_norm"]
    assert row.slot == "LayerNorm"
    found, gradients = outcome(model)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, exact_gradients, rtol=1e-4, atol=1e-4)
    opslot.bind(model, TRITON | {"overrides": {"other": {"layer_norm_implementation": "eager"}}})
    assert kernels(model) == {"norm": "triton"}
    opslot.bind(model, "eager")
    assert "forward" not in model.norm.__dict__
    torch.testing.assert_close(outcome(model), (exact, exact_gradients), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}])
def test_modules_without_bias_or_weight(options):
    model = net(**options)
    exact = outcome(model)
    opslot.bind(model, TRITON)
    torch.testing.assert_close(outcome(model), exact, rtol=1e-4, atol=1e-4)


def test_copies_and_pickles_keep_the_kernel():
    model = net()
    opslot.bind(model, TRITON)
    expected = outcome(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert clone.norm.__dict__["forward"].args[0] is clone.norm
        assert all(torch.equal(a, b) for a, b in zip(outcome(clone)[1].values(), expected[1].values(), strict=True))
        opslot.bind(clone, "eager")
        assert "forward" not in clone.norm.__dict__
        assert "forward" in model.norm.__dict__


def test_replaced_forward_is_kept():
    model = net()
    model.norm.forward = lambda x: 2.0 * x
    with pytest.raises(ConfigError, match="norm: layer_norm_implementation='triton': the forward of the module was"):
        opslot.bind(model, TRITON)
    opslot.bind(model, TRITON | {"overrides": {"norm": {"layer_norm_implementation": "eager"}}})
    assert model.norm(torch.ones(24, device=DEVICE)).mean() == 2.0
    opslot.bind(model, TRITON | {"overrides": {"norm": {"layer_norm_implementation": "eager"}}})
    assert kernels(model) == {"other": "triton"}


class Shifted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1.0


class Named(nn.LayerNorm):
    pass


def test_classes_with_a_forward_of_their_own_are_left():
    model = nn.Sequential(Shifted(8), Named(8)).to(DEVICE)
    opslot.bind(model, TRITON)
    assert kernels(model) == {"1": "triton"}


def test_unsupported_shapes_raise_when_bound():
    with pytest.raises(ConfigError, match="normalizes one dimension, this module 2"):
        opslot.bind(nn.Sequential(nn.LayerNorm((4, 8))).to(DEVICE), TRITON)
    with pytest.raises(ConfigError, match="supports widths up to 16384, this module's is 16400"):
        opslot.bind(nn.Sequential(nn.LayerNorm(16400)).to(DEVICE), TRITON)


def test_unsupported_arguments_raise():
    kernel = KERNEL_REGISTRY.load("layer_norm", "standard", "triton")
    with pytest.raises(KernelError, match=r"weight: its shape is \(12,\), not \(24,\)"):
        kernel(torch.randn(3, 24), torch.ones(12), None, 1e-5)
    with pytest.raises(KernelError, match=r"dtype is torch\.float64"):
        kernel(torch.randn(3, 24).double(), None, None, 1e-5)


def test_weight_in_float32_beside_bfloat16():
    x = torch.randn(6, 24, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.randn(24, device=DEVICE, requires_grad=True) for _ in "wb")
    out = KERNEL_REGISTRY.load("layer_norm", "standard", "triton")(x, weight, bias, 1e-5)
    expected = op.standard(x.float(), weight, bias, 1e-5)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, weight, bias), dout)
    wanted = torch.autograd.grad(expected, (x, weight, bias), dout.float())
    assert [t.dtype for t in (out, *found)] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for got, want in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-6)


def test_gradients_are_deterministic_and_only_the_needed_ones():
    kernel = KERNEL_REGISTRY.load("layer_norm", "standard", "triton")
    x, weight, bias = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((300, 24), (24,), (24,)))
    first, second = (torch.autograd.grad(kernel(x, weight, bias, 1e-5).sum(), (x, weight, bias)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for leaf, want in zip((x, weight, bias), first, strict=True):
        frozen = [t if t is leaf else t.detach() for t in (x, weight, bias)]
        (got,) = torch.autograd.grad(kernel(*frozen, 1e-5).sum(), leaf)
        assert torch.equal(got, want)


def test_compiles_with_fullgraph():
    model = net()
    opslot.bind(model, TRITON)
    expected = outcome(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model.zero_grad()
    compiled(x).square().sum().backward()
    torch.testing.assert_close(model.norm.weight.grad, expected[1]["norm.weight"])


@pytest.mark.parametrize("arch", ["gpt_neox", "phi", "cohere", "olmo"])
def test_model_trains_like_the_original(arch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(arch)).to(DEVICE)
    ids = torch.randint(3, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    exact = gradients()
    opslot.apply(model, {"layer_norm_implementation": "triton", "attn_implementation": "eager"})
    norms = {path for path, module in model.named_modules() if type(module).__name__.endswith("LayerNorm")}
    assert norms
    assert kernels(model) == dict.fromkeys(norms, "triton")
    torch.testing.assert_close(gradients(), exact, rtol=1e-3, atol=1e-5)
    opslot.restore(model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), exact, strict=True))


def test_norms_of_several_heads_stay_eager():
    """Cohere's norms of queries and keys have a weight for each head."""
    config = tiny_config("cohere")
    config.use_qk_norm = True
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"q_norm and 3 more.*normalizes one dimension, this module 2"):
        opslot.apply(model, TRITON)
    report = opslot.apply(model, {**TRITON, "overrides": {"*_norm": {"layer_norm_implementation": "eager"}}})
    assert set(report.chosen("layer_norm")) == {"triton", "eager"}


def test_kernel_with_a_priority_is_listed_and_bound_under_auto():
    """As any other op; without a priority of any kernel, `auto` leaves the modules out."""
    model = net()
    specs = [KERNEL_REGISTRY.get("layer_norm", "standard", name) for name in ("triton", "triton_or_torch")]

    def set_priority(priority, *of, **changes):
        for spec in of or specs[:1]:
            KERNEL_REGISTRY.register(dataclasses.replace(spec, priority=priority, **changes), replace=True)

    try:
        set_priority(None, *specs)
        opslot.bind(model, "auto")
        assert listed(model) == {}
        set_priority(90, interpretable=False, hardware=opslot.HardwareRequirement("any"))
        opslot.bind(model, {"overrides": {"other": {"layer_norm_implementation": "eager"}}})
        assert listed(model) == {"norm": "triton", "other": "eager"}
        set_priority({(9, 0): 90})
        opslot.bind(model, "auto", device="cpu")
        assert listed(model) == {"norm": "eager", "other": "eager"}
    finally:
        for spec in specs:
            KERNEL_REGISTRY.register(spec, replace=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_dtype_of_torch(dtype):
    model = net()
    x = torch.randn(5, 24, device="cuda", dtype=dtype)
    with torch.autocast("cuda", torch.bfloat16):
        expected = model(x)
        opslot.bind(model, TRITON)
        found = model(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 3, 7, 72, 123, 768, 1000, 1152, 4093, 16383])
def test_rows_of_any_equal_bfloat16_values_are_the_bias(width):
    """A division that is not rounded to nearest would not give their mean."""
    kernel = KERNEL_REGISTRY.load("layer_norm", "standard", "triton")
    values = torch.arange(128, device="cuda").add(128).bfloat16()
    x = torch.cat([values * 2.0**power for power in (-20, -3, 0, 1, 10)])[:, None].expand(-1, width).contiguous()
    bias = torch.randn(width, device="cuda").bfloat16()
    assert torch.equal(kernel(x, torch.ones_like(bias), bias, 1e-6), bias.expand_as(x))
