"""Experts with frozen weights and low-rank adapters (LoRA): the adapters are grouped GEMMs beside those of the weights.

A step has no copy and no gradient of the size of the weights. A kernel that serves adapters has the attribute
`with_adapters`: its contract with all arguments given, followed by the two factors of each of its weights (`rows.py`)
in their order, or None and None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.custom_op import differentiable_op
from opslot.ops.moe_experts._autograd import GATING, TENSORS, on_its_device
from opslot.ops.moe_experts._gating import empty_parts
from opslot.ops.moe_experts.contract import VARIANTS, Experts, ExpertsInputs
from opslot.ops.moe_experts.rows import ExpertRows, ExpertsCall, Factors, backward, forward, saved_parts

Sort = Callable[[Tensor, Tensor, Experts], ExpertRows]


def add_adapters(
    name: str,
    kernels: Sequence[Callable[..., Tensor]],
    prepare: Callable[[ExpertsInputs], tuple[Tensor, Experts]],
    sort: Sort,
    count_rows: Callable[[Tensor, Experts], int],
) -> None:
    """Give the kernels, of the variants in the order of `VARIANTS`, their attribute `with_adapters`.

    Args:
        name: of the kernels; the custom op is opslot::moe_<name>_adapters.
        prepare: checks the arguments and casts tokens and experts.
        sort: (hidden_states, top_k_index, experts) -> the rows.
        count_rows: (top_k_index, experts) -> the number of rows, also for fake tensors.
    """
    function = _differentiable(name, sort, count_rows)
    for arguments, kernel in zip(VARIANTS, kernels, strict=True):
        kernel.with_adapters = functools.partial(_with_adapters, arguments, prepare, function)  # type: ignore[attr-defined]


def _with_adapters(
    read: Callable[..., ExpertsInputs],
    prepare: Callable[[ExpertsInputs], tuple[Tensor, Experts]],
    function: Callable[..., Tensor],
    hidden_states: Tensor,
    *arguments: Any,
) -> Tensor:
    """A kernel with the arguments of `read`, followed by two factors of each weight, None without an adapter."""
    weights = next(i for i, value in enumerate(arguments) if not value.is_floating_point())
    arguments, factors = arguments[: -2 * weights], arguments[-2 * weights :]
    given = read(hidden_states, *arguments)
    x, experts = prepare(given)
    pairs = [_padded(a, b, x.dtype) for a, b in zip(factors[::2], factors[1::2], strict=True)]
    if experts.up_proj is None:
        pairs.insert(1, (None, None))
    flat = [factor for pair in pairs for factor in pair]
    tensors = *experts[:2], given.top_k_weights, *experts[2:5], *flat, given.top_k_index
    out = function(x, *tensors, *experts[5:])
    return out.to(hidden_states.dtype)


def _padded(first: Tensor | None, second: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Factors whose rank is a multiple of 8: grouped GEMMs need rows of a multiple of 16 bytes."""
    if first is None or second is None:
        return None, None
    extra = -second.shape[1] % 8
    first, second = F.pad(first, (0, extra)), F.pad(second, (0, 0, 0, extra))
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


# Two factors of up to three weights.
_FACTORS = ("gate_up_a", "gate_up_b", "up_a", "up_b", "down_a", "down_b")
_INPUTS = f"{TENSORS}, {', '.join(f'Tensor? {factor}' for factor in _FACTORS)}, Tensor top_k_index"
_TENSORS = _INPUTS.count(", ") + 1


def _differentiable(name: str, sort: Sort, count_rows: Callable[[Tensor, Experts], int]) -> Callable[..., Tensor]:
    """Register opslot::moe_<name>_adapters and its backward; returns the function of their flat arguments."""

    def call(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any) -> ExpertsCall:
        factors, index = rest[3:9], rest[9]
        experts = Experts(gate_up, down, *rest[:3], *rest[10:])
        pairs: list[Factors] = [None if a is None else (a, b) for a, b in zip(factors[::2], factors[1::2], strict=True)]
        if experts.up_proj is None:
            del pairs[1]
        return ExpertsCall(x, experts, weights, pairs, sort(x, index, experts))

    def fake(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        experts = Experts(gate_up, down, *rest[:3], *rest[10:])
        parts = empty_parts(x, experts, count_rows(rest[9], experts), experts.sizes[2])
        return torch.empty_like(x, memory_format=torch.contiguous_format), *saved_parts(parts)

    def run_backward(grad: Tensor, *arguments: Any) -> Any:
        inputs, parts, rest = arguments[:_TENSORS], arguments[_TENSORS : _TENSORS + 2], arguments[_TENSORS + 2 :]
        gating, needs = rest[: 1 - _TENSORS], rest[1 - _TENSORS :]
        found = backward(grad.contiguous(), call(*inputs, *gating), parts, needs[:7])
        return tuple([g if need else None for g, need in zip(found, needs, strict=True)])

    return differentiable_op(
        f"moe_{name}_adapters({_INPUTS}, {GATING}) -> (Tensor out, Tensor gate_up, Tensor up)",
        allocate=fake,
        launch=functools.partial(on_its_device, lambda *arguments: forward(call(*arguments))),
        launch_backward=functools.partial(on_its_device, run_backward),
        in_place=False,
        module=sort.__module__,
        differentiable=_TENSORS - 1,
        kept=(*[tensor.split()[1] for tensor in _INPUTS.split(", ")], "gate_up", "up"),
        returned=1,
    )
