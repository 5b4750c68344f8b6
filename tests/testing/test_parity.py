"""The harness itself: it must catch what kernels get wrong."""

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError
from opslot.testing import check_kernel, poisoned_memory

VARIANT = KERNEL_REGISTRY.op("rms_norm").variant("standard")
CASE = next(c for c in VARIANT.cases if c.role == "check")


def right(hidden_states, weight, eps):
    return VARIANT.reference(hidden_states, weight, eps)


def check(kernel, dtype=torch.float32):
    return check_kernel(kernel, "rms_norm", VARIANT, CASE, dtype)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


def unwritten(hidden_states, weight, eps):
    out = torch.empty_like(hidden_states)
    out[:-1] = right(hidden_states, weight, eps)[:-1]
    return out


def wrong_gradient(hidden_states, weight, eps):
    return right(_WrongBackward.apply(hidden_states), weight, eps)


WRONG = {
    "a percent off": lambda x, w, e: right(x, w, e) * 1.01,
    "another eps": lambda x, w, e: right(x, w, 1e-3),
    "no weight gradient": lambda x, w, e: right(x, w.detach(), e),
    "a gradient 0.1% off": wrong_gradient,
    "an element never written": unwritten,
    "nan": lambda x, w, e: right(x, w, e) * float("nan"),
    "offset form": lambda x, w, e: right(x, w, e) + right(x, torch.ones_like(w), e),
}


@pytest.mark.parametrize("name", WRONG)
def test_catches(name):
    kernel = WRONG[name]

    def named(hidden_states, weight, eps):
        return kernel(hidden_states, weight, eps)

    result = check(named)
    assert not result.ok
    assert "WRONG" in str(result)


def test_passes_the_reference_itself():
    result = check(right)
    assert result.ok
    assert {c.name for c in result.comparisons} == {"out", "grad hidden_states", "grad weight"}


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda hidden_states, weight, eps: right(hidden_states, weight, eps)[0], "shape"),
        (lambda hidden_states, weight, eps: right(hidden_states, weight, eps).double(), "dtype"),
        (lambda hidden_states, weight, eps: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_says_what_is_not_comparable(kernel, message):
    result = check(kernel)
    assert not result.ok
    assert message in str(result)


def test_a_refusal_is_neither_failure_nor_proof():
    def refusing(hidden_states, weight, eps):
        raise KernelError("serves powers of two")

    result = check(refusing)
    assert result.ok
    assert result.refused == "serves powers of two"
    assert not result.comparisons


def test_inputs_are_the_same_in_every_process_and_differ_by_case():
    first = CASE.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    again = CASE.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert torch.equal(first["hidden_states"], again["hidden_states"])


def test_poison_ends_with_the_block():
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
