"""The gated delta rule in Triton: chunks of 64 tokens, forward and backward, deterministic.

Forward: invert every chunk's triangular system in one kernel, and walk along each document's chunks with the state in
registers, writing the outputs. Backward walks again, from the arguments and the inverses (with decays of channels, also
the scores), which are all that is saved, but writes the state that each chunk finds and its residuals; walks back with
the state's gradient, at the same time; and computes the other gradients in one kernel over chunks and key heads.
Queries and keys are normalized by scaling rows of results. Long documents in few heads are split, since the state that
leaves a part is linear in the state that finds it.
No chunk has tokens of two documents: a table of chunks is computed on the device, with the maximum length that the
documents could need, so that the host never waits for `cu_seqlens`. The modules of `kernels` give the formulas.

Roofline on an H200 (4.3 TB/s, 790 TFLOP/s) in bf16 at 8192 tokens, 16 key and 32 value heads of 128: forward reads
q, k and v and writes the output, 201 MB or 0.05 ms; backward reads these, writes three gradients, 336 MB or 0.08 ms.
With the intermediates that pass through memory these are 0.4 and 1.6 GB, 0.09 and 0.37 ms, of which the L2 cache may
spare some, and 36 and 121 GFLOP, 0.05 and 0.15 ms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot._base.kernel_launch import shared_memory
from opslot.ops._common.arguments import copy_or_zero, reject, require_floats
from opslot.ops._common.contract import takes
from opslot.ops._common.custom_op import all_but_last_gradient, differentiable_op
from opslot.ops._common.kernels.chunks import count_chunks
from opslot.ops.chunk_gated_delta_rule.kernels.backward import write_gradients
from opslot.ops.chunk_gated_delta_rule.kernels.call import CHUNK, prepare
from opslot.ops.chunk_gated_delta_rule.kernels.channel_gradients import write_channel_gradients
from opslot.ops.chunk_gated_delta_rule.kernels.channels import solve_channels
from opslot.ops.chunk_gated_delta_rule.kernels.forward import recur
from opslot.ops.chunk_gated_delta_rule.kernels.system import solve
from opslot.ops.chunk_gated_delta_rule.op import WIDEST_KEY, WIDEST_KEY_IN_99_KIB, DeltaRule

_LABEL = "chunk_gated_delta_rule_implementation='triton'"
# Bytes of shared memory of the recurrences in float32 with keys of 256.
_WIDE_KEYS = 132 * 1024
# query, key, value, g, beta and initial_state.
_DIFFERENTIABLE = 6


def _allocate(query: Tensor, key: Tensor, value: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """The output, the last states, and N and W for backward; without decays of channels, W is empty."""
    *_, cu_seqlens, _, want_final = rest
    batch, length, heads, width = value.shape
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    shape = (batch if documents is None else documents, heads, key.shape[3], width)
    final = value.new_empty(shape, dtype=torch.float32) if want_final else None
    planes = count_chunks(documents, batch, length, CHUNK) * heads
    inverse, within = (key.new_empty(count, CHUNK, CHUNK) for count in (planes, planes if g.dim() == 4 else 0))
    return out, final, inverse, within


def _forward(outputs: tuple[Any, ...], *args: Any) -> None:
    *inputs, initial_state, cu_seqlens, normalize, _ = args
    out, final, *solution = outputs
    if out.numel() == 0:
        copy_or_zero(final, initial_state)
        return
    call = prepare(inputs, cu_seqlens, normalize)
    if call.key > WIDEST_KEY_IN_99_KIB and call.k.element_size() > 2 and shared_memory(call.k.device) < _WIDE_KEYS:
        limit = f"{WIDEST_KEY_IN_99_KIB} in float32 on this GPU, for its shared memory"
        reject(_LABEL, "key", f"its heads are {call.key} wide, the limit is {limit}", "use torch_chunked or bfloat16")
    system = (solve_channels if call.per_channel else solve)(call, solution, solved=False)
    recur(call, system, initial_state, (None, None, out), final)


def _backward(gradients: tuple[Tensor | None, ...], dout: Tensor | None, dfinal: Tensor | None, *args: Any) -> None:
    *inputs, initial_state, cu_seqlens = args[: _DIFFERENTIABLE + 1]
    *solution, normalize, want_final = args[_DIFFERENTIABLE + 1 : -_DIFFERENTIABLE]
    *grads, dinitial = gradients
    value = inputs[2]
    if not want_final:
        # Under torch.compile, an output that is not wanted is an empty tensor, and so is its gradient.
        dfinal = None
    if value.numel() == 0:
        copy_or_zero(dinitial, dfinal)
        return
    dout = torch.zeros_like(value) if dout is None else dout
    call = prepare(inputs, cu_seqlens, normalize)
    arguments = initial_state, dout, dfinal, tuple(grads), dinitial
    if call.per_channel:
        system = solve_channels(call, solution, solved=True)
        write_channel_gradients(call, system, *arguments)  # type: ignore[arg-type]
    else:
        write_gradients(call, solve(call, solution, solved=True), *arguments)  # type: ignore[arg-type]


_gated_delta_rule = differentiable_op(
    "chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state,"
    " Tensor? cu_seqlens, bool normalize, bool want_final) -> (Tensor, Tensor, Tensor inverse, Tensor within)",
    allocate=_allocate,
    launch=_forward,
    allocate_gradients=all_but_last_gradient(_DIFFERENTIABLE),
    launch_backward=_backward,
    differentiable=_DIFFERENTIABLE,
    kept=("query", "key", "value", "g", "beta", "initial_state", "cu_seqlens", "inverse", "within"),
    returned=2,
)


@takes(DeltaRule)
def chunk_gated_delta_rule(given: DeltaRule) -> tuple[Tensor, Tensor | None]:
    """`op.reference` for float32, bfloat16 and float16, and keys up to 256 wide; the last state in float32.

    Query, key and value must have the same dtype; the others may have any of the three. Inputs are copied unless
    their columns are adjacent and rows of the batch can be flattened.

    Raises:
        KernelError: another dtype, larger keys, or arguments that the reference rejects.
    """
    query, key, value, g, beta, initial_state, want_state, normalize, cu_seqlens = given
    named = {"query": query, "key": key, "value": value, "g": g, "beta": beta, "initial_state": initial_state}
    require_floats(_LABEL, "use torch_chunked", **named)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            reject(_LABEL, name, f"its dtype is {tensor.dtype}, query's is {query.dtype}", "give all three the same")
    if key.shape[3] > WIDEST_KEY:
        reject(_LABEL, "key", f"its heads are {key.shape[3]} wide, the limit is {WIDEST_KEY}", "use torch_chunked")
    given.check(_LABEL)
    out, final = _gated_delta_rule(*given.in_one_row()[:5], initial_state, cu_seqlens, normalize, want_state)
    return out.view(value.shape), final if want_state else None
