"""The scan of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", section 6): contract, reference, cost.

Shapes: `x` [B, S, heads, P]; `dt` [B, S, heads]; `A`, `D`, `dt_bias` [heads]; `B` and `C` [B, S, groups, N], with heads
a multiple of groups; state [B, heads, P, N]. In the variant per_channel (Mamba-1, Gu and Dao 2023) a head is one
channel, P = 1, whose decay differs along the state: `A` is [heads, N]. `cu_seqlens` (int32 or int64, [documents + 1],
over the B * S tokens, no document crosses rows) gives every document a separate state, so packed documents do not
affect each other; Transformers' code does not support it.

Shape suffixes below: N chunks, D documents, H heads, T tokens of a chunk, P and S widths of a head and of a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opslot.ops._common.arguments import reject, require_shapes, without_autocast
from opslot.ops._common.chunk_schedule import ChunkSchedule, step_slices
from opslot.ops._common.contract import takes
from opslot.ops._common.documents import check_cu_seqlens, one_row, remove_document_hooks
from opslot.ops.mamba_chunk_scan.cases import CASES, PER_CHANNEL_CASES
from opslot.slots import Cost, InputCase, OpSpec, OpVariant, walk_slots

_CHUNK = 64
# The limit of opslot's Triton kernels, which hold the columns of a head in registers.
WIDEST_HEAD = 128
NO_LIMIT = (0.0, float("inf"))

# What Transformers' and mamba_ssm's scans also take by these names.
OPTIONS = ("D", "dt_bias", "dt_softplus", "dt_limit", "return_final_states")


class Scan(NamedTuple):
    """The arguments of the op; see `reference`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_states: Tensor | None = None
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = NO_LIMIT
    return_final_states: bool = False
    cu_seqlens: Tensor | None = None

    def in_one_row(self) -> Scan:
        """With packed documents, the tokens of all rows in one."""
        if self.cu_seqlens is None:
            return self
        return self._replace(x=one_row(self.x), dt=one_row(self.dt), B=one_row(self.B), C=one_row(self.C))

    def check(self, kernel: str) -> None:
        """Raise KernelError, naming `kernel`, for inconsistent arguments."""
        x, dt, A, B, C, D, dt_bias, initial_states, *_, cu_seqlens = self
        batch, length, heads, width = x.shape
        if heads % B.shape[2]:
            reject(kernel, "x", f"{heads} heads, which is not a multiple of B's {B.shape[2]} groups", "use a multiple")
        if cu_seqlens is not None:
            check_cu_seqlens(kernel, "cu_seqlens", cu_seqlens, batch, length)
        states = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        by_head, by_group = (heads,), (batch, length, *B.shape[2:])
        require_shapes(
            kernel,
            dt=(dt, (batch, length, heads)),
            A=(A, by_head if A.dim() == 1 or width > 1 else (heads, B.shape[3])),
            B=(B, by_group),
            C=(C, by_group),
            D=(D, by_head),
            dt_bias=(dt_bias, by_head),
            initial_states=(initial_states, (states, heads, width, B.shape[3])),
        )


@takes(Scan)
def reference(given: Scan) -> Tensor | tuple[Tensor, Tensor]:
    """Per token and head: state = exp(dt A) state + dt x B^T; out = state C + D x.

    First, dt becomes clamp(softplus(dt + dt_bias), *dt_limit), without softplus unless `dt_softplus`. Computed in
    chunks, for all documents in parallel (section 6 of the paper); in fp32, or fp64 for fp64 input.

    Returns:
        The output [B, S, heads, P] in `x`'s dtype; with `return_final_states` also the last state of each row (with
        `cu_seqlens`: of each document) in the dtype computed in. `initial_states` has the same shape.

    Raises:
        KernelError: `cu_seqlens` that do not cover the tokens or cross rows, or shapes that do not match.
    """
    given.check("mamba_chunk_scan")
    x, dt, A, B, C, D, dt_bias, initial_states, softplus, limit, want_states, cu_seqlens = given
    dtype = torch.promote_types(x.dtype, torch.float32)
    batch, length, heads, width = x.shape
    step = dt.to(dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(dtype)
    if softplus:
        step = nn.functional.softplus(step)
    step = step.clamp(*limit)
    plan = ChunkSchedule(batch, length, cu_seqlens, _CHUNK, x.device)
    # [B, S, heads, 1], or N instead of 1 in the variant per_channel.
    log_decays = step[..., None] * (A if A.dim() == 2 else A[:, None]).to(dtype)
    tokens = (x, step[..., None], log_decays, B, C)
    x_NHTP, dt_NHT1, log_decay, B_NGTS, C_NGTS = (plan.chunks(tensor, dtype) for tensor in tokens)
    scan = _scan_by_channel if A.dim() == 2 else _scan
    state = x_NHTP.new_zeros(len(plan.order), heads, width, B.shape[-1])
    if initial_states is not None:
        state = initial_states.to(dtype)[plan.order]
    # Autocast would round the operands of every matmul, and so the states between chunks.
    with without_autocast(x):
        out_NHTP, state = scan(x_NHTP * dt_NHT1, log_decay, B_NGTS, C_NGTS, state, plan.active)
    out = plan.tokens(out_NHTP).view(x.shape)
    if D is not None:
        out = out + D.to(dtype)[:, None] * x.to(dtype)
    out = out.to(x.dtype)
    return (out, state[plan.order.argsort()]) if want_states else out


def _scan(
    x_NHTP: Tensor,
    log_decay_NHT1: Tensor,
    B_NGTS: Tensor,
    C_NGTS: Tensor,
    state_DHPS: Tensor,
    active: list[int],
) -> tuple[Tensor, Tensor]:
    """Outputs of all chunks and the documents' last states; x is multiplied by dt."""
    groups = x_NHTP.shape[1] // B_NGTS.shape[1]
    cumulated = log_decay_NHT1.cumsum(2)
    future = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=x_NHTP.device).triu(1)
    between = (cumulated - cumulated.mT).masked_fill(future, float("-inf")).exp()
    within = (C_NGTS @ B_NGTS.mT).repeat_interleave(groups, 1) * between @ x_NHTP
    B_NHTS, C_NHTS = (tensor.repeat_interleave(groups, 1) for tensor in (B_NGTS, C_NGTS))
    last_NH11 = cumulated[:, :, -1:]
    added_NHPS = (x_NHTP * (last_NH11 - cumulated).exp()).mT @ B_NHTS
    return _carry(within, C_NHTS * cumulated.exp(), last_NH11.exp(), added_NHPS, state_DHPS, active)


def _scan_by_channel(
    x_NHT1: Tensor,
    log_decay_NHTS: Tensor,
    B_NGTS: Tensor,
    C_NGTS: Tensor,
    state_DH1S: Tensor,
    active: list[int],
) -> tuple[Tensor, Tensor]:
    """`_scan` with a decay for each value of a state: token by token within chunks, for all chunks in parallel."""
    groups = x_NHT1.shape[1] // B_NGTS.shape[1]
    B_NHTS, C_NHTS = (tensor.repeat_interleave(groups, 1) for tensor in (B_NGTS, C_NGTS))
    state_NHS, within = torch.zeros_like(log_decay_NHTS[:, :, 0]), []
    tokens = zip(log_decay_NHTS.exp().unbind(2), (x_NHT1 * B_NHTS).unbind(2), C_NHTS.unbind(2), strict=True)
    for decay, added, read in tokens:
        state_NHS = decay * state_NHS + added
        within.append((state_NHS * read).sum(-1, keepdim=True))
    decays_NHTS = log_decay_NHTS.cumsum(2).exp()
    reads, decay_NH1S = C_NHTS * decays_NHTS, decays_NHTS[:, :, -1:]
    return _carry(torch.stack(within, 2), reads, decay_NH1S, state_NHS[:, :, None], state_DH1S, active)


def _carry(
    within_NHTP: Tensor,
    reads_NHTS: Tensor,
    decay: Tensor,
    added_NHPS: Tensor,
    state_DHPS: Tensor,
    active: list[int],
) -> tuple[Tensor, Tensor]:
    """Carry the states from chunk to chunk: outputs of all chunks and the documents' last states.

    Args:
        within_NHTP: outputs from the tokens of the same chunk.
        reads_NHTS: what is read from the state that arrives at the chunk.
        decay, added_NHPS: the state that leaves a chunk is decay * state + added.
    """
    outputs, finished = [within_NHTP[:0]], []
    for step, count in zip(step_slices(active), active, strict=True):
        finished.append(state_DHPS[count:])
        state_DHPS = state_DHPS[:count]
        outputs.append(within_NHTP[step] + reads_NHTS[step] @ state_DHPS.mT)
        state_DHPS = state_DHPS * decay[step] + added_NHPS[step]
    return torch.cat(outputs), torch.cat([state_DHPS, *reversed(finished)])


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads x, dt, B and C and writes the output; backward reads all five and writes four gradients.

    Two state-vector matmuls per head and token in forward (write, read), four in backward.
    """
    x, dt, B = arguments["x"], arguments["dt"], arguments["B"]
    bytes_moved = (5 * x.numel() + 6 * B.numel()) * x.element_size() + 3 * dt.numel() * dt.element_size()
    return Cost(bytes=bytes_moved, flops=12 * x.numel() * B.shape[-1])


def _attach(model: nn.Module, slot: Any, kernel: Any) -> list[Any]:
    """Models with a causal convolution get cu_seqlens by its hooks."""
    # It imports torch._dynamo, which lists of kernels do not need.
    from opslot.ops._common.by_document import add_document_hooks

    convolves = any(found.op_name == "causal_conv1d" for found in walk_slots(model))
    return [] if convolves else add_document_hooks(model, "mamba_chunk_scan")


def _variant(name: str, cases: Sequence[InputCase]) -> OpVariant:
    return OpVariant(
        name,
        reference,
        cases,
        ("x", "dt", "A", "B", "C", "D", "dt_bias"),
        _cost,
        # A chunked kernel reads x, B and C with their decay, rounded to the input's dtype, into every matmul of a
        # chunk, where the reference rounds once at the end.
        tolerance_ulps={"bfloat16": 4, "float16": 4, "float32": 64},
        compiles=False,
    )


OP = OpSpec(
    name="mamba_chunk_scan",
    attach=_attach,
    detach=remove_document_hooks,
    description="scan of Mamba-2 (SSD) and Mamba-1",
    variants={"standard": _variant("standard", CASES), "per_channel": _variant("per_channel", PER_CHANNEL_CASES)},
)
