"""Kernels that leave few tokens to torch's own functions."""

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common import few_tokens
from opslot.ops._common.few_tokens import are_few_tokens

KERNELS = [spec for spec in KERNEL_REGISTRY.specs() if spec.name == "triton_or_torch"]
BY_KERNEL = pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: f"{spec.op_name}-{spec.variant}")


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        ((1, 2048, 1024), True),
        ((8, 256, 1152), True),
        ((4, 2048, 1024), False),
        ((1, 1024, 4096), True),
        ((1, 2048, 4096), False),
        ((2, 4096, 128), True),
        ((1, 2048, 16, 64), False),
        ((0, 64), True),
        ((), False),
    ],
)
def test_few_tokens_by_shape(shape, few):
    assert are_few_tokens(torch.zeros((), dtype=torch.bfloat16).expand(shape)) is few


def test_tensors_of_another_dtype_and_autocast_are_left_to_triton():
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8)
    assert are_few_tokens(x, weight.bfloat16(), None)
    assert not are_few_tokens(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not are_few_tokens(x, weight.bfloat16())


@BY_KERNEL
def test_kernel_by_size(spec, monkeypatch):
    """Bitwise Triton's from the limit on, and not Triton's below it."""
    triton = KERNEL_REGISTRY.load(spec.op_name, spec.variant, "triton")
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    case = next(case for case in variant.cases if case.role == "check")
    arguments = case.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    kernel, launched, launch = KERNEL_REGISTRY.load(*spec.key), [], KernelLauncher.__call__
    expected = triton(**arguments)
    monkeypatch.setattr(KernelLauncher, "__call__", lambda *args: launched.append(1) or launch(*args))
    found = kernel(**arguments)
    assert not launched
    torch.testing.assert_close(found, expected)
    monkeypatch.setattr(few_tokens, "_FEW", 1)
    found = kernel(**arguments)
    assert launched
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@BY_KERNEL
def test_errors_do_not_depend_on_the_number_of_tokens(spec):
    """Few tokens raise what many do: Triton's kernels have no float64, and broadcast nothing."""
    kernel, double = KERNEL_REGISTRY.load(*spec.key), torch.ones(2, 8, dtype=torch.float64)
    x, weight = torch.ones(2, 8), torch.ones(8)
    others = {"layer_norm": (weight, None, 1e-6)}.get(spec.op_name, (weight, 1e-6))
    calls = [(double, *(o.double() if isinstance(o, torch.Tensor) else o for o in others)), (x[:, :4], *others)]
    if "fused_add" in spec.variant:
        calls = [(given, given, *rest) for given, *rest in calls] + [(x, x[:1], *others)]
    for call in calls:
        with pytest.raises(KernelError, match="'triton_or_torch'"):
            kernel(*call)


def test_compiled_code_is_not_specialized_on_the_number_of_tokens():
    kernel, sizes = KERNEL_REGISTRY.load("rms_norm", "standard", "triton_or_torch"), []

    def backend(graph, _):
        sizes.append([node.target for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(lambda x: kernel(x, torch.ones(8), 1e-6), backend=backend, fullgraph=True, dynamic=True)
    for rows in (2, 3, 5):
        compiled(torch.ones(rows, 8))
    assert len(sizes) == 1
