"""AdamW in Triton: one launch for many tensors, in place, bound by memory bandwidth.

torch's fused AdamW reaches half of an H200's bandwidth on large tensors (2.2 of 4.3 TB/s); a plain elementwise kernel
with 16-byte accesses reaches more. It reads the addresses of the tensors from a table on the device.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed.tensor import DTensor

from opslot._base.errors import KernelError
from opslot._base.jit import downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.distributed.dtensors import local_tensor
from opslot.optim.partial_adamw import PartialAdamW

_BLOCK = 2048
# Blocks of one CTA.
_BLOCKS = 4
_CHUNK = _BLOCK * _BLOCKS
_WARPS = 8
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0; by its series near 0, to avoid cancellation."""
    series = 1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7)))
    near = -x * (1.0 + x / 2 * (1.0 + x / 3 * series))
    return tl.where(x > -0.25, near, 1.0 - tl.exp(x))


# Columns of the table: addresses, then units of a tensor and the number of the first CTA that updates it.
_COLUMNS = tl.constexpr(7)
_SCALARS = ["lr", "beta2", "rest1", "rest2", "log_beta1", "log_beta2", "eps", "weight_decay"]


@triton.jit(do_not_specialize=_SCALARS)
def _adamw_kernel(
    table_ptr,
    owner_ptr,
    lr,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    table_ptr += tl.load(owner_ptr + tl.program_id(0)).to(tl.int64) * _COLUMNS
    # Addresses and counts are multiples of UNIT elements, so that masked accesses have 16 bytes.
    param_ptr = tl.multiple_of(tl.load(table_ptr).to(tl.pointer_type(PARAM)), UNIT)
    grad_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(tl.pointer_type(GRAD)), UNIT)
    exp_avg_ptr = tl.multiple_of(tl.load(table_ptr + 2).to(tl.pointer_type(EXP_AVG)), UNIT)
    exp_avg_sq_ptr = tl.multiple_of(tl.load(table_ptr + 3).to(tl.pointer_type(EXP_AVG_SQ)), UNIT)
    step = tl.load(tl.load(table_ptr + 4).to(tl.pointer_type(tl.float32)))
    count = tl.load(table_ptr + 5) * UNIT
    first = (tl.program_id(0) - tl.load(table_ptr + 6)) * (BLOCK * BLOCKS)
    correction1 = _one_minus_exp(step * log_beta1)
    correction2 = _one_minus_exp(step * log_beta2)
    for block in tl.static_range(BLOCKS):
        index = first + block * BLOCK + tl.arange(0, BLOCK)
        mask = index < count
        param = tl.load(param_ptr + index, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avg_ptr + index, mask=mask, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + index, mask=mask, other=0.0).to(tl.float32)
        exp_avg += (grad - exp_avg) * rest1
        exp_avg_sq = exp_avg_sq * beta2 + grad * grad * rest2
        denominator = tl.sqrt(exp_avg_sq / correction2) + eps
        param = param * (1.0 - lr * weight_decay) - lr * (exp_avg / correction1) / denominator
        tl.store(param_ptr + index, downcast(param, PARAM), mask=mask)
        tl.store(exp_avg_ptr + index, downcast(exp_avg, EXP_AVG), mask=mask)
        tl.store(exp_avg_sq_ptr + index, downcast(exp_avg_sq, EXP_AVG_SQ), mask=mask)


_launch = KernelLauncher(_adamw_kernel)


_Form = tuple[Any, ...]
_Row = tuple[int, ...]


class _Table(NamedTuple):
    """The tables of a launch on the device, and what they were made of; `programs` are the CTAs of each tensor."""

    rows: list[_Row]
    programs: np.ndarray
    table: Tensor
    owner: Tensor


class _Launches:
    """Launches of the kernel, with the tables of the last ones: from step to step addresses are mostly the same."""

    def __init__(self) -> None:
        self._tables: dict[_Form, _Table] = {}

    def run(self, rows: dict[_Form, list[_Row]], group: int, options: Mapping[str, Any]) -> None:
        """Update the tensors of `rows`, with the options of parameter group number `group`."""
        lr, (beta1, beta2) = options["lr"], options["betas"]
        # Differences from 1 are computed in double: in float32, 1 - 0.999 has an error of 1e-5.
        rest = (1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2))
        scalars = (lr, beta2, *rest, options["eps"], options["weight_decay"])
        for form, found in rows.items():
            known = self._tables.get((group, *form))
            device, unit, *dtypes = form
            if known is None or known.rows != found:
                known = self._tables[(group, *form)] = _new_table(found, device, known)
            constants = (*[_DTYPES[dtype] for dtype in dtypes], unit, _BLOCK, _BLOCKS)
            _launch((known.owner.numel(), 1, 1), (known.table, known.owner), (), scalars, constants, _WARPS)


def _form_and_row(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[_Form, _Row] | None:
    """Device, unit and dtypes of a launch, and the row of its table; None if the kernel does not support the tensors.

    Raises:
        KernelError: a tensor that is updated is not contiguous.
    """
    numbers = (param, grad, exp_avg, exp_avg_sq)
    if step.dtype != torch.float32 or any(x.device != param.device for x in (*numbers, step)):
        return None
    if any(x.dtype not in _DTYPES for x in numbers):
        return None
    for name, tensor in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not tensor.is_contiguous():
            raise KernelError(
                f"the AdamW kernel updates contiguous tensors; {name} is not",
                found=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                hint="use torch.optim.AdamW for this parameter",
            )
    count, addresses = param.numel(), [x.data_ptr() for x in numbers]
    unit = 1 if functools.reduce(operator.or_, addresses, count) % 16 else 16
    form = (param.device, unit, *[x.dtype for x in numbers])
    return form, (*addresses, step.data_ptr(), count // unit, cdiv(count, _CHUNK))


def _new_table(rows: list[_Row], device: torch.device, last: _Table | None) -> _Table:
    """The kernel's table: `rows` with the first CTA of a tensor in place of their number. Reuses what `last` shares."""
    table = np.array(rows, dtype=np.int64)
    programs = table[:, -1].copy()
    table[:, -1] = np.cumsum(programs) - programs
    # Mostly, only gradients have moved.
    same = last is not None and np.array_equal(programs, last.programs)
    owner = last.owner if last is not None and same else _owners(programs, device)
    return _Table(rows, programs, _copied(torch.from_numpy(table), device), owner)


def _owners(programs: np.ndarray, device: torch.device) -> Tensor:
    """For each CTA, the row of the tensor that it updates."""
    numbers = np.arange(len(programs), dtype=np.int32)
    return _copied(torch.from_numpy(np.repeat(numbers, programs)), device)


def _copied(values: Tensor, device: torch.device) -> Tensor:
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contract: see `op.reference`; contiguous tensors, updated in place."""
    # The launch has only its address, so a copy must outlive it.
    grad = grad.contiguous()
    found = _form_and_row(param, grad, exp_avg, exp_avg_sq, step)
    assert found is not None, "dtypes of the contract"
    if param.numel():
        form, row = found
        options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        _Launches().run({form: [row]}, 0, options)
    return param, exp_avg, exp_avg_sq


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


class _Known(NamedTuple):
    """A parameter in the last step: what its update depends on besides the gradient's address, and what it found."""

    same: tuple[Any, ...]
    form: _Form | None
    row: _Row


class AdamW(PartialAdamW):
    """torch.optim.AdamW(fused=True) that updates CUDA tensors with the kernel above.

    State, state dicts and parameter groups are the same as torch's, and results are equal up to rounding, so a run can
    switch between the two.
    """

    # Made when needed: pickle and deepcopy copy an optimizer's state and groups only.
    @functools.cached_property
    def _launches(self) -> _Launches:
        return _Launches()

    @functools.cached_property
    def _known(self) -> dict[int, _Known]:
        """What the last step found, by the id of a parameter."""
        return {}

    def _step_own(self) -> list[tuple[Tensor, Tensor]]:
        done: list[tuple[Tensor, Tensor]] = []
        if getattr(self, "grad_scale", None) is not None:
            return done
        for number, group in enumerate(self.param_groups):
            if group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor):
                continue
            if group["capturable"]:
                # A CUDA graph cannot capture the copy of a table from the host.
                continue
            rows: dict[_Form, list[_Row]] = {}
            steps: list[Tensor] = []
            copies: list[Tensor] = []
            for param in group["params"]:
                # torch creates the state in its first step.
                if (grad := param.grad) is None or not (state := self.state[param]):
                    continue
                given: tuple[Tensor, ...] = (param, grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
                if isinstance(param, DTensor):
                    given = tuple(map(local_tensor, given))
                if not given[1].is_contiguous():
                    given = (given[0], given[1].contiguous(), *given[2:])
                    copies.append(given[1])
                form, row = self._look_up(id(param), *given)
                if form is not None:
                    rows.setdefault(form, []).append(row)
                    steps.append(given[4])
                    done.append((param, grad))
            if steps:
                torch._foreach_add_(steps, 1)
                self._launches.run(rows, number, group)
        return done

    def _look_up(
        self, key: int, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
    ) -> tuple[_Form | None, _Row]:
        """`_form_and_row` of the tensors, from the last step if they are where they were; None where it is.

        On the host of an H200 this is a significant part of a step of small models.
        """
        same = (
            *(param.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), step.data_ptr()),
            *(param.dtype, grad.dtype, exp_avg.dtype, exp_avg_sq.dtype, param.numel(), param.is_contiguous()),
        )
        address = grad.data_ptr()
        known = self._known.get(key)
        if known is None or known.same != same or (known.row[1] != address and (known.row[1] | address) % 16):
            served = _on_gpu(param) and param.numel() > 0 and param.is_contiguous()
            found = _form_and_row(param, grad, exp_avg, exp_avg_sq, step) if served else None
            known = self._known[key] = _Known(same, *(found or (None, (0, address))))
        elif known.row[1] != address:
            # Only the gradient has moved.
            known = self._known[key] = known._replace(row=(known.row[0], address, *known.row[2:]))
        return known.form, known.row


def _on_gpu(param: Tensor) -> bool:
    return param.is_cuda


# The trainer creates the optimizer from the selected kernel.
adamw.optimizer = AdamW  # type: ignore[attr-defined]
