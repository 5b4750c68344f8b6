"""Every registered kernel that can run here, on every check case of its op, in every dtype it claims."""

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import facts_of
from opslot.slots import KernelRequest
from opslot.testing import check_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable_specs():
    for spec in KERNEL_REGISTRY.specs():
        if spec.unusable(KernelRequest(spec.op_name, spec.variant, facts_of(DEVICE))) is None:
            yield spec


def cases():
    for spec in usable_specs():
        for case in KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant).cases:
            if case.role == "check":
                yield pytest.param(spec, case, id=f"{'-'.join(spec.key)}-{case.name}")


@pytest.mark.parametrize(("spec", "case"), cases())
def test_forward_and_gradients_against_fp64(spec, case):
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    kernel = KERNEL_REGISTRY.load(*spec.key)
    for dtype in DTYPES:
        if spec.dtypes is None or dtype in spec.dtypes:
            result = check_kernel(kernel, spec.op_name, variant, case, dtype, DEVICE, name=spec.name)
            assert result.ok, str(result)


def test_every_op_has_cases_that_exercise_its_contract():
    for op in KERNEL_REGISTRY.ops.values():
        for variant in op.variants.values():
            names = [c.name for c in variant.cases]
            assert len(set(names)) == len(names), f"{op.name}/{variant.name} has two cases of one name"
            assert any(c.role == "check" for c in variant.cases), f"{op.name}/{variant.name} has no check case"


def test_references_are_float64_exact():
    """The truth is the reference in float64: it must not round through a narrower dtype on the way."""
    for op in KERNEL_REGISTRY.ops.values():
        for variant in op.variants.values():
            case = next(c for c in variant.cases if c.role == "check")
            arguments = case.make(torch.float64, torch.device("cpu"), torch.Generator().manual_seed(0))
            out = variant.reference(**arguments)
            tensors = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
            for tensor in tensors:
                assert tensor.dtype == torch.float64, (
                    f"{op.name}/{variant.name} returns {tensor.dtype} for float64 input"
                )
