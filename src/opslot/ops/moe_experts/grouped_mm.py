"""grouped_mm: sort token-expert pairs by expert, then one GEMM per expert and weight: grouped_mm on GPUs, mm on CPUs.

On CPU, GEMMs write into the output directly, and combine is one embedding_bag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot._base.tensor_cache import TensorCache
from opslot.ops._common.contract import variants_of
from opslot.ops.moe_experts._autograd import Backward, Forward, Grads, Wanted, differentiable
from opslot.ops.moe_experts._call import prepare
from opslot.ops.moe_experts._gating import empty_parts
from opslot.ops.moe_experts.contract import VARIANTS, Experts, ExpertsInputs
from opslot.ops.moe_experts.low_rank import add_adapters
from opslot.ops.moe_experts.rows import ExpertsCall, backward, forward, saved_parts

# Output [T, H]; gate and up of the sorted rows, [P, 2I] or, not gated, [P, I], and an empty tensor, or [P, I] each for
# separate weights; the pair of each row [P], token * K + k; the end of each expert's rows [E].
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# (rows [P, M], weights [E, M, N], ends) -> [P, N], or (rows [M, P], rows [P, N], ends) -> [E, M, N]
GroupedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]


def _run(given: ExpertsInputs) -> Tensor:
    """On any device and in any floating dtype. Deterministic."""
    x, experts = prepare("grouped_mm", given)
    return _experts(x, experts, given.top_k_index, given.top_k_weights).to(given.hidden_states.dtype)


class _SortedRows:
    """`ExpertRows` without padding between experts; rows after the last expert's end belong to other ranks.

    Args:
        ends: of each expert's rows, int32 [E].
        shape: of the routing weights, [T, K].
    """

    def __init__(self, pair: Tensor, ends: Tensor, shape: torch.Size, gemm: GroupedGemm) -> None:
        self.pair, self.ends, self._shape, self._gemm = pair, ends, shape, gemm

    @classmethod
    def sorted(cls, index: Tensor, experts: Experts, gemm: GroupedGemm) -> _SortedRows:
        """Of expert indices [T, K]; those outside 0..E-1 come last."""
        flat, count = index.reshape(-1), experts.sizes[0]
        by_expert, pair = torch.sort(flat.masked_fill(flat < 0, count), stable=True)
        edges = torch.arange(count, device=pair.device, dtype=by_expert.dtype)
        return cls(pair, torch.searchsorted(by_expert, edges, right=True, out_int32=True), index.shape, gemm)

    @functools.cached_property
    def is_pair(self) -> Tensor:
        return torch.arange(len(self.pair), device=self.pair.device) < self.ends[-1]

    @functools.cached_property
    def expert(self) -> Tensor:
        rows = torch.arange(len(self.pair), device=self.pair.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, rows, right=True).clamp_(max=len(self.ends) - 1)

    def gemm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._gemm(rows, weight, self.ends)

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        return self._gemm(left.t(), right, self.ends)

    def combine(self, rows: Tensor, weights: Tensor, weighted: bool) -> Tensor:
        row = torch.empty_like(self.pair)
        row[self.pair] = torch.arange(len(row), device=row.device)
        row = row.view(self._shape)
        if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows[int(self.ends[-1]) :] = 0
            scales = weights.to(rows.dtype) if weighted else None
            return F.embedding_bag(row, rows, mode="sum", per_sample_weights=scales)
        terms = rows[row.flatten()].view(*self._shape, rows.shape[1])
        dtype = torch.promote_types(rows.dtype, torch.float32)
        if weighted:
            terms = terms.to(dtype) * weights.unsqueeze(-1)
        terms = terms.masked_fill((row >= self.ends[-1]).unsqueeze(-1), 0)
        return terms.sum(1, dtype=dtype).to(rows.dtype)


KERNELS = standard, clamped, biased, split, transposed, ungated = variants_of(_run, VARIANTS)
add_adapters(
    "grouped_mm",
    KERNELS,
    functools.partial(prepare, "grouped_mm"),
    lambda x, index, experts: _SortedRows.sorted(index, experts, _gemm_for(x, experts)),
    lambda index, experts: index.numel(),
)


def forward_and_backward(gemm_for: Callable[[Tensor, Experts], GroupedGemm]) -> tuple[Forward, Backward]:
    """Both for `differentiable`, with the grouped GEMM that `gemm_for` selects by tokens and weights."""

    def call(x: Tensor, experts: Experts, weights: Tensor, rows: _SortedRows) -> ExpertsCall:
        return ExpertsCall(x, experts, weights, [None] * (len(experts.gate_up_weights) + 1), rows)

    def run(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
        rows = _SortedRows.sorted(index, experts, gemm_for(x, experts))
        return *forward(call(x, experts, weights, rows)), rows.pair, rows.ends

    def run_backward(
        grad: Tensor, x: Tensor, experts: Experts, weights: Tensor, saved: Sequence[Tensor], wanted: Wanted
    ) -> Grads:
        *parts, pair, ends = saved
        rows = _SortedRows(pair, ends, weights.shape, gemm_for(x, experts))
        inputs, of_weights, of_biases = wanted
        needs = inputs, of_weights, of_weights, True, of_weights, of_biases, of_biases
        return Grads(*backward(grad.contiguous(), call(x, experts, weights, rows), parts, needs)[:7])  # type: ignore[arg-type]

    return run, run_backward


def fake(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        *saved_parts(empty_parts(x, experts, index.numel(), experts.sizes[2])),
        index.new_empty(index.numel(), dtype=torch.int64),
        index.new_empty(experts.sizes[0], dtype=torch.int32),
    )


def _gemm_for(x: Tensor, experts: Experts) -> GroupedGemm:
    """torch's grouped GEMM where it has fast kernels: for bf16 with rows aligned to 16 bytes on SM80 and newer."""
    aligned = all(width % 8 == 0 for width in experts.sizes[1:])
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or not aligned:
        return _looped_gemm
    return _torch_gemm if torch.cuda.get_device_capability(x.device) >= (8, 0) else _looped_gemm


def _torch_gemm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(left, right, offs=ends)


# Read once in forward and once in backward: on a GPU each time is a synchronization.
_experts_with_rows: TensorCache[list[tuple[int, slice]]] = TensorCache(4)


def _looped_gemm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """One mm for each expert with rows."""
    segments = _experts_with_rows.get(ends, lambda: _segments(ends))
    if right.dim() == 3:
        out = left.new_empty(len(left), right.shape[2])
        for expert, mine in segments:
            torch.mm(left[mine], right[expert], out=out[mine])
        return out
    fresh = left.new_empty if len(segments) == len(ends) else left.new_zeros
    out = fresh(len(ends), len(left), right.shape[1])
    for expert, mine in segments:
        torch.mm(left[:, mine], right[mine], out=out[expert])
    return out


def _segments(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) for the experts that have rows."""
    found, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            found.append((expert, slice(start, end)))
        start = end
    return found


_forward, _backward = forward_and_backward(_gemm_for)
_experts = differentiable("moe_grouped_mm", _forward, _backward, fake)
