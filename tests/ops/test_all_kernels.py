"""Every registered kernel that can run here, on every check case of its op, in every dtype it declares."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opslot import KERNEL_REGISTRY
from opslot._base.device import facts_of
from opslot._base.errors import KernelError
from opslot.slots import KernelRequest
from opslot.verify import check_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def usable_specs():
    requests = ((spec, KernelRequest(spec.op_name, spec.variant, facts_of(DEVICE))) for spec in KERNEL_REGISTRY.specs())
    return [spec for spec, request in requests if spec.unsupported(request) is None]


def check_cases(spec):
    return [c for c in KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant).cases if c.role == "check"]


# They take seconds in the interpreter; "packed documents in two rows" exercises the same code.
SLOW_CASES = {"mamba_chunk_scan": {"two rows"}, "chunk_gated_delta_rule": {"two rows"}}
# Each variant is another function, with other limits.
QUICK_CASES = {"mlp_activation": {"large values"}}


def quick_cases(spec):
    """In Triton's interpreter, the first kernel of an op runs all cases.

    Others run the first one, one without elements, those that only they have, and the last one unless they are the
    first kernel for another variant. `QUICK_CASES` are run by all.
    """
    slow = SLOW_CASES.get(spec.op_name, ()) if DEVICE != "cuda" and spec.interpretable else ()
    cases = [case.name for case in check_cases(spec) if case.name not in slow]
    first = next((s for s in usable_specs() if s.op_name == spec.op_name and s.interpretable), spec)
    if DEVICE == "cuda" or not spec.interpretable or spec is first:
        return set(cases)
    shared = {case.name for case in check_cases(first)}
    last = cases[:1] if spec.name == first.name else cases[-1:]
    own = (name for name in cases if name not in shared or name.startswith("no "))
    return {cases[0], *last, *own, *QUICK_CASES.get(spec.op_name, ())}


def cases():
    for spec in usable_specs():
        quick = quick_cases(spec)
        for case in check_cases(spec):
            marks = [] if case.name in quick else [pytest.mark.slow]
            yield pytest.param(spec, case, id=f"{'-'.join(spec.key)}-{case.name}", marks=marks)


def selected_dtypes(spec, case):
    """The dtypes that the kernel declares; in Triton's interpreter fp32, and 16-bit dtypes for two cases.

    These are bf16 for the first quick case and cases of mixed dtypes, and fp16 for the last quick case. `opslot verify`
    checks every kernel on a GPU in all of them.
    """
    claimed = [dtype for dtype in DTYPES if spec.dtypes is None or dtype in spec.dtypes]
    if DEVICE == "cuda" or not spec.interpretable:
        return claimed
    quick = [case for case in check_cases(spec) if case.name in quick_cases(spec)]
    call = case.make(torch.bfloat16, torch.device("cpu"), torch.Generator().manual_seed(0))
    mixed = len({x.dtype for x in tree_leaves(call) if isinstance(x, torch.Tensor) and x.is_floating_point()}) > 1
    wanted = {torch.float32: True, torch.bfloat16: case is quick[0] or mixed, torch.float16: case is quick[-1]}
    return [dtype for dtype in claimed if wanted[dtype]]


# The interpreter uses NumPy's exp, which warns on overflow. A sigmoid is 0 there.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("spec", "case"), cases())
def test_forward_and_gradients_against_fp64(spec, case):
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    kernel = KERNEL_REGISTRY.load(*spec.key)
    for dtype in selected_dtypes(spec, case):
        result = check_kernel(
            kernel, spec.op_name, variant, case, dtype, DEVICE, name=spec.name, relative_error=spec.relative_error
        )
        assert result.ok, str(result)


def test_every_kernel_is_checked_in_all_its_dtypes():
    for spec in usable_specs():
        checked = {dtype for case in check_cases(spec) for dtype in selected_dtypes(spec, case)}
        assert checked == set(DTYPES if spec.dtypes is None else spec.dtypes) & set(DTYPES), spec.key


def second_derivative(function, variant, arguments):
    """Second derivative of the sum of the outputs with respect to the first differentiable argument."""
    name = variant.differentiable[0]
    leaf = arguments[name].detach().requires_grad_()
    outputs = tree_leaves(function(**{**arguments, name: leaf}))
    total = sum(o.sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad)
    (first,) = torch.autograd.grad(total, leaf, create_graph=True)
    if not first.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(first.square().sum(), leaf, materialize_grads=True)[0]


OWN = [pytest.param(s, id="-".join(s.key)) for s in usable_specs() if {x.module for x in s.requires} <= {"triton"}]


@pytest.mark.parametrize("spec", OWN)
def test_second_derivative_is_right_or_raises(spec):
    """Under create_graph, a backward that returns constants would be wrong without an error."""
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    case = next(c for c in variant.cases if c.role == "check")
    arguments = case.make(torch.float32, torch.device(DEVICE), torch.Generator().manual_seed(0))
    if not variant.differentiable or not isinstance(arguments[variant.differentiable[0]], torch.Tensor):
        pytest.skip("no single tensor to differentiate by")
    expected = second_derivative(variant.reference, variant, arguments)
    try:
        found = second_derivative(KERNEL_REGISTRY.load(*spec.key), variant, arguments)
    except RuntimeError:
        return
    torch.testing.assert_close(found, expected)


def test_every_op_has_cases_that_exercise_its_contract():
    for op in KERNEL_REGISTRY.ops.values():
        for variant in op.variants.values():
            names = [c.name for c in variant.cases]
            assert len(set(names)) == len(names), f"{op.name}/{variant.name} has two cases of one name"
            assert any(c.role == "check" for c in variant.cases), f"{op.name}/{variant.name} has no check case"


def test_references_are_float64_exact():
    """The fp64 reference must not round through fp32 or 16 bits."""
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


# On a GPU: `pytest -m gpu tests/ops`. Warnings of compilers and libraries are not errors there.

# Libraries that autotune for minutes before the first call; `opslot verify` checks them.
TUNED_FOR_MINUTES = {
    ("chunk_gated_delta_rule", "standard", "fla"),
    ("chunk_gated_delta_rule", "per_channel", "fla"),
    ("chunk_gated_delta_rule", "standard", "flash_qla"),
}


def gpu_specs(own=False):
    if DEVICE != "cuda":
        return []
    specs = [spec for spec in usable_specs() if not own or (spec.interpretable and bound_to_model(spec))]
    return [pytest.param(spec, id="-".join(spec.key)) for spec in specs if spec.key not in TUNED_FOR_MINUTES]


def bound_to_model(spec):
    return KERNEL_REGISTRY.op(spec.op_name).bound_to_model


def some_cases(spec):
    """All cases for opslot's kernels; for libraries, which compile for seconds, one dense and two packed cases."""
    cases = check_cases(spec)
    if spec.interpretable:
        return cases
    return cases[:1] + [case for case in cases[1:] if "packed" in case.name][:2]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("spec", gpu_specs())
def test_bf16_on_a_gpu_against_fp64(spec):
    if spec.dtypes is not None and torch.bfloat16 not in spec.dtypes:
        pytest.skip("takes no bfloat16")
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    kernel = KERNEL_REGISTRY.load(*spec.key)
    results = [
        check_kernel(
            kernel,
            spec.op_name,
            variant,
            case,
            torch.bfloat16,
            DEVICE,
            name=spec.name,
            relative_error=spec.relative_error,
        )
        for case in some_cases(spec)
    ]
    assert [str(r) for r in results if not r.ok] == []
    assert not all(r.unsupported for r in results), results[0].unsupported


def forward_backward(kernel, variant, arguments):
    """Outputs and gradients of one call, with the same incoming gradients for every kernel."""
    call = {
        n: v.detach().requires_grad_() if n in variant.differentiable and isinstance(v, torch.Tensor) else v
        for n, v in arguments.items()
    }
    outputs = [o for o in tree_leaves(kernel(**call)) if isinstance(o, torch.Tensor)]
    leaves = [v for n, v in call.items() if n in variant.differentiable and isinstance(v, torch.Tensor)]
    rooted = [o for o in outputs if o.requires_grad]
    generator = torch.Generator(DEVICE).manual_seed(1)
    douts = [torch.randn(o.shape, device=DEVICE, generator=generator).to(o) for o in rooted]
    grads = torch.autograd.grad(rooted, leaves, douts, allow_unused=True) if rooted else ()
    return [x for x in (*outputs, *grads) if x is not None]


class _CallsOps(TorchDispatchMode):
    """Lets kernels run as ops of torch.library, inside of which autograd records nothing, as compiled models do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def torch_specs():
    """Kernels made of torch functions, which need their own backward: autograd records nothing inside an op."""
    specs = () if DEVICE == "cuda" else usable_specs()
    return [pytest.param(spec, id="-".join(spec.key)) for spec in specs if not spec.interpretable]


@pytest.mark.parametrize("spec", torch_specs())
def test_torch_kernels_compute_the_same_as_ops(spec):
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    kernel = KERNEL_REGISTRY.load(*spec.key)
    dtype = torch.float32 if spec.dtypes is None or torch.float32 in spec.dtypes else spec.dtypes[0]
    compared = 0
    for case in check_cases(spec):
        arguments = case.make(dtype, torch.device(DEVICE), torch.Generator().manual_seed(0))
        try:
            expected = forward_backward(kernel, variant, arguments)
        except KernelError:
            # An option that the kernel does not have.
            continue
        with _CallsOps():
            found = forward_backward(kernel, variant, arguments)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda text, name=case.name: f"{name}: {text}")
        compared += 1
    assert compared


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("spec", gpu_specs(own=True))
def test_triton_is_deterministic_and_compiles_with_fullgraph(spec):
    """Forward and backward; compiled code launches the same kernels, and may round differently around them."""
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    kernel = KERNEL_REGISTRY.load(*spec.key)
    case = check_cases(spec)[0]
    arguments = case.make(torch.bfloat16, torch.device(DEVICE), torch.Generator().manual_seed(0))
    expected = forward_backward(kernel, variant, arguments)
    again = forward_backward(kernel, variant, arguments)
    assert [torch.equal(a, b) for a, b in zip(expected, again, strict=True)] == [True] * len(expected)
    torch._dynamo.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    found = forward_backward(compiled, variant, arguments)
    for got, want in zip(found, expected, strict=True):
        rounding = torch.finfo(want.dtype).eps * want.abs().max().item() if want.is_floating_point() else 0
        torch.testing.assert_close(got, want, rtol=0, atol=rounding)
