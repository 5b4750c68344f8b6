"""The scans of Mamba-2 and Mamba-1 in Triton: chunks of tokens, forward and backward, deterministic.

Forward: cumulate the log decay within every chunk, walk along each document with the state in registers, writing the
state that arrives at each chunk, and compute the outputs of all chunks in parallel. Backward computes the states again
from the arguments, which are all that is saved; walks back with the state's gradient; and computes the gradients of
tokens in one kernel over chunks and heads, and those of B and C in one over chunks and groups, which sums over the
heads of a group in registers. No chunk has tokens of two documents: a table of chunks is computed on the device, with
the maximum length that the documents could need, so that the host never waits for `cu_seqlens`. The modules of
`kernels` give the formulas; `kernels.selective` those of Mamba-1, whose scan has no matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.arguments import copy_or_zero, reject, require_floats, zero
from opslot.ops._common.contract import takes
from opslot.ops._common.custom_op import all_but_last_gradient, differentiable_op
from opslot.ops._common.kernels.tiles import as_tokens
from opslot.ops.mamba_chunk_scan.kernels import selective, selective_gradients
from opslot.ops.mamba_chunk_scan.kernels.call import prepare
from opslot.ops.mamba_chunk_scan.kernels.gradients import write_gradients
from opslot.ops.mamba_chunk_scan.kernels.outputs import write_output
from opslot.ops.mamba_chunk_scan.kernels.states import walk
from opslot.ops.mamba_chunk_scan.kernels.steps import cumulate
from opslot.ops.mamba_chunk_scan.op import WIDEST_HEAD, Scan

_LABEL = "mamba_chunk_scan_implementation='triton'"
# x, dt, A, B, C, D, dt_bias and initial_states.
_DIFFERENTIABLE = 8


def _is_per_channel(inputs: Sequence[Tensor]) -> bool:
    return inputs[2].dim() == 2


def _allocate(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    cu_seqlens, want_final = rest[4], rest[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    documents = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (documents, *x.shape[2:], B.shape[3])
    return out, x.new_empty(shape, dtype=torch.float32) if want_final else None


def _forward(outputs: tuple[Tensor, Tensor | None], *args: Any) -> None:
    *inputs, initial_states, cu_seqlens, softplus, low, high, _ = args
    out, final = outputs
    if out.numel() == 0:
        copy_or_zero(final, initial_states)
        return
    if _is_per_channel(inputs):
        scan = selective.prepare(inputs, cu_seqlens, softplus, low, high, backward=False)
        selective.write_output(scan, selective.walk(scan, scan.x, initial_states, final), out)
        return
    call = prepare(inputs, cu_seqlens, softplus, low, high)
    steps = cumulate(call)
    write_output(call, steps, walk(call, call.x, steps, initial_states, final), out)


def _backward(gradients: tuple[Tensor | None, ...], dout: Tensor | None, dfinal: Tensor | None, *args: Any) -> None:
    *inputs, initial_states, cu_seqlens, softplus, low, high, want_final = args[:-_DIFFERENTIABLE]
    *grads, dinitial = gradients
    x = inputs[0]
    if not want_final:
        # Under torch.compile, an output that is not wanted is an empty tensor, and so is its gradient.
        dfinal = None
    if x.numel() == 0:
        zero(*grads)
        copy_or_zero(dinitial, dfinal)
        return
    dout = torch.zeros_like(x) if dout is None else dout
    if _is_per_channel(inputs):
        scan = selective.prepare(inputs, cu_seqlens, softplus, low, high, backward=True)
        douts = selective.as_channels(dout)
        states = selective.walk(scan, scan.x, initial_states, None)
        dstates = selective.walk(scan, douts, dfinal, dinitial, backward=True)
        selective_gradients.write_gradients(scan, douts, states, dstates, tuple(grads))
        return
    call = prepare(inputs, cu_seqlens, softplus, low, high)
    dout = as_tokens(dout)
    steps = cumulate(call)
    states = walk(call, call.x, steps, initial_states, None)
    dstates = walk(call, dout, steps, dfinal, dinitial, backward=True)
    write_gradients(call, dout, steps, states, dstates, tuple(grads))


_scan = differentiable_op(
    "mamba_chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias,"
    " Tensor? initial_states, Tensor? cu_seqlens, bool softplus, float low, float high, bool want_final)"
    " -> (Tensor, Tensor)",
    allocate=_allocate,
    launch=_forward,
    allocate_gradients=all_but_last_gradient(_DIFFERENTIABLE),
    launch_backward=_backward,
    differentiable=_DIFFERENTIABLE,
)


@takes(Scan)
def mamba_chunk_scan(scan: Scan) -> Tensor | tuple[Tensor, Tensor]:
    """`op.reference` for float32, bfloat16 and float16, and heads up to 128 wide; the last state in float32.

    x, B and C must have the same dtype; the others may have any of the three. Inputs are copied unless their columns
    are adjacent and rows of the batch can be flattened.

    Raises:
        KernelError: another dtype, wider heads, or arguments that the reference rejects.
    """
    x, dt, A, B, C, D, dt_bias, initial_states, softplus, limit, want_states, cu_seqlens = scan
    per_head = {"A": A, "D": D, "dt_bias": dt_bias}
    require_floats(_LABEL, "use torch_chunked", x=x, dt=dt, B=B, C=C, initial_states=initial_states, **per_head)
    for name, tensor in (("B", B), ("C", C)):
        if tensor.dtype != x.dtype:
            reject(_LABEL, name, f"its dtype is {tensor.dtype}, x's is {x.dtype}", "give all three the same")
    if x.shape[3] > WIDEST_HEAD:
        reject(_LABEL, "x", f"its heads are {x.shape[3]} wide, the limit is {WIDEST_HEAD}", "use torch_chunked")
    scan.check(_LABEL)
    if initial_states is not None and initial_states.requires_grad:
        # Caches write the next states into these, before backward reads them.
        scan = scan._replace(initial_states=initial_states.clone())
    out, final = _scan(*scan.in_one_row()[:8], cu_seqlens, softplus, *map(float, limit), want_states)
    out = out.view(x.shape)
    return (out, final) if want_states else out
