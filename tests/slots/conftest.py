"""A toy op whose kernels have no requirements."""

import pytest
import torch
from torch import Tensor, nn

from opslot import KERNEL_REGISTRY, KernelSpec, OpSlot
from opslot.slots import InputCase, OpSpec, OpVariant


def double(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


def _make(dtype, device, generator):
    return {"x": torch.randn(5, generator=generator).to(dtype)}


TOY = OpSpec(
    "toy_double",
    {
        name: OpVariant(
            name,
            double,
            [InputCase("five", _make)],
            ("x",),
            check_module=lambda m: getattr(m, "unsupported_reason", None),
        )
        for name in ("standard", "other")
    },
)


class Doubler(nn.Module):
    toy = OpSlot("toy_double", "standard")

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        if self.toy is not None:
            return self.toy(x) * self.weight
        return x * 2 * self.weight


def fast(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale + 0


def other_fast(x: Tensor, scale: float = 2.0) -> Tensor:
    return x + x * (scale - 1)


@pytest.fixture
def toy():
    """The toy op with kernels "fast" (both variants), "gpu_only", "needs_package"; removed after the test."""
    from opslot import HardwareRequirement

    KERNEL_REGISTRY.ops  # noqa: B018  discovers the built-in ops first, so that only the toy's are removed below
    KERNEL_REGISTRY._ops[TOY.name] = TOY
    specs = [
        KernelSpec("fast", TOY.name, "standard", lambda: fast, priority=10),
        KernelSpec("fast", TOY.name, "other", lambda: other_fast, priority=10),
        KernelSpec("unranked", TOY.name, "standard", lambda: other_fast),
        KernelSpec("only_other", TOY.name, "other", lambda: other_fast),
        KernelSpec("gpu_only", TOY.name, "standard", lambda: fast, HardwareRequirement("npu"), priority=99),
        KernelSpec("needs_package", TOY.name, "standard", lambda: fast, requires=("no_such_package_x",), priority=99),
    ]
    for spec in specs:
        KERNEL_REGISTRY.register(spec)
    yield TOY
    for key in [k for k in KERNEL_REGISTRY._specs if k[0] == TOY.name]:
        KERNEL_REGISTRY.unregister(*key)
    del KERNEL_REGISTRY._ops[TOY.name]
