import pytest
import torch

import opslot
from opslot import KERNEL_REGISTRY
from opslot._base.errors import ConfigError, KernelError
from opslot.models.discovery import discover
from opslot.ops.hyper_connection import op

pytest.importorskip("transformers")

from transformers import AutoConfig

from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def classes_of(arch):
    pytest.importorskip(f"transformers.models.{arch}.modeling_{arch}")
    return __import__(f"transformers.models.{arch}.modeling_{arch}", fromlist=["x"])


def connection(arch, name, **changes):
    """A module of Transformers with random parameters, in float64."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(arch, hc_mult=4, hidden_size=24, **changes)
    module = getattr(classes_of(arch), name)(config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module, torch.randn(2, 5, 4, 24, dtype=torch.float64)


def test_sinkhorn_computes_what_transformers_does():
    module, streams = connection("deepseek_v4", "DeepseekV4HyperConnection", hc_sinkhorn_iters=3)
    found = op.sinkhorn(
        streams, module.fn, module.base, module.scale, module.input_norm.eps, module.hc_eps, module.hc_sinkhorn_iters
    )
    # Transformers computes the coefficients in float32.
    torch.testing.assert_close(found, module(streams), rtol=1e-4, atol=1e-5, check_dtype=False)


def test_independent_streams_and_head_compute_what_transformers_does():
    module, streams = connection("hy_v4", "HYV4HyperConnection", hc_magnitude=1.5)
    arguments = module.fn, module.base, module.scale, module.input_norm.eps, module.hc_eps, module.hc_post_magnitude
    found = op.independent(streams, *arguments)
    torch.testing.assert_close(found, module(streams), rtol=1e-4, atol=1e-5, check_dtype=False)
    for arch, name in (("hy_v4", "HYV4HyperHead"), ("deepseek_v4", "DeepseekV4HyperHead")):
        module, streams = connection(arch, name)
        arguments = module.hc_fn, module.hc_base, module.hc_scale, module.input_norm.eps, module.eps
        torch.testing.assert_close(
            op.head(streams, *arguments), module(streams), rtol=1e-4, atol=1e-5, check_dtype=False
        )


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_of_some_outputs(used):
    """post, comb and the collapsed streams."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, 3, 2, 8),
        torch.randn(8, 16),
        torch.randn(8),
        torch.randn(3),
    ]
    leaves = [x.to(DEVICE).requires_grad_() for x in inputs]
    kernel = KERNEL_REGISTRY.load("hyper_connection", "sinkhorn", "triton")
    found, wanted = (
        torch.autograd.grad(sum((outputs[i] ** 2).sum() for i in used), leaves, allow_unused=True)
        for outputs in (kernel(*leaves, iterations=4), op.sinkhorn(*leaves, iterations=4))
    )
    zeros = [torch.zeros_like(x) if w is None else w for x, w in zip(leaves, wanted, strict=True)]
    torch.testing.assert_close(list(found), zeros, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_get_no_gradient():
    kernel = KERNEL_REGISTRY.load("hyper_connection", "head", "triton")
    streams = torch.randn(1, 3, 2, 8, device=DEVICE, requires_grad=True)
    kernel(streams, *(torch.randn(shape, device=DEVICE) for shape in ((2, 16), (2,), (1,)))).sum().backward()
    assert streams.grad is not None


def test_output_under_autocast_may_be_narrower():
    post, streams = torch.rand(1, 3, 4, device=DEVICE), torch.randn(1, 3, 4, 8, device=DEVICE)
    output = torch.randn(1, 3, 8, device=DEVICE)
    add = KERNEL_REGISTRY.load("hyper_connection", "add", "triton")
    found = add(post, output.bfloat16(), streams)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, op.add(post, output.bfloat16().float(), streams))
    with pytest.raises(KernelError, match="cannot take output: its dtype is"):
        add(post, output, streams.bfloat16())


def test_number_of_streams_that_kernels_do_not_support():
    streams, fn = torch.randn(1, 2, 3, 8, device=DEVICE), torch.randn(3, 24, device=DEVICE)
    kernel = KERNEL_REGISTRY.load("hyper_connection", "head", "triton")
    with pytest.raises(KernelError, match="3 streams, not 2, 4 or 8"):
        kernel(streams, fn, torch.randn(3, device=DEVICE), torch.randn(1, device=DEVICE))
    classes_of("deepseek_v4")
    config = tiny_config("deepseek_v4")
    config.hc_mult = 3
    with pytest.raises(ConfigError, match="3 streams, not 2, 4 or 8"):
        opslot.apply(random_model(config), {"hyper_connection_implementation": "triton"})


@pytest.mark.parametrize(
    ("arch", "variants"),
    [
        ("deepseek_v4", {"sinkhorn", "head", "mix"}),
        ("glm5_next", {"sinkhorn", "mix"}),
        ("hy_v4", {"independent", "head", "add"}),
    ],
)
def test_slots_are_found(arch, variants):
    classes_of(arch)
    assert {match.variant for match in discover(arch).matches if match.op == "hyper_connection"} == variants


def test_trains_as_transformers_does():
    classes_of("hy_v4")
    models = [random_model(tiny_config("hy_v4")).to(DEVICE) for _ in range(2)]
    opslot.apply(models[0], {"preset": "eager", "hyper_connection_implementation": "triton"})
    ids = torch.arange(24, device=DEVICE).view(2, 12) % 40
    for model in models:
        model(input_ids=ids, labels=ids).loss.backward()
    found, wanted = ({name: p.grad for name, p in model.named_parameters()} for model in models)
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)
