"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", equation 10): contract, reference, cost.

Shapes: `query`, `key` [B, S, K_heads, K]; `value` [B, S, V_heads, V] with V_heads a multiple of K_heads; `g` (log
decay, <= 0) and `beta` [B, S, V_heads]; state [B, V_heads, K, V]. In the variant per_channel (Kimi delta attention,
"Kimi Linear", 2025) each row of a state has its own decay: `g` is [B, S, V_heads, K]. `cu_seqlens` (int32 or int64,
[documents + 1], over the B * S tokens, no document crosses rows) gives every document a separate state, so packed
documents do not affect each other; Transformers' code does not support it.

Shape suffixes below: N chunks, D documents, H value heads, T tokens of a chunk, K and V widths of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject, require_shapes, without_autocast
from opslot.ops._common.chunk_schedule import ChunkSchedule, step_slices
from opslot.ops._common.contract import takes
from opslot.ops._common.documents import check_cu_seqlens, one_row
from opslot.ops.chunk_gated_delta_rule.cases import CASES, PER_CHANNEL_CASES
from opslot.slots import Cost, InputCase, OpSpec, OpVariant

# Tokens per chunk: matmuls and a triangular system within a chunk, one recurrent step between chunks.
_CHUNK = 64
# The limit of opslot's Triton kernels, which hold all rows of a state in registers, and of fla's.
WIDEST_KEY = 256
# That of the Triton kernels in float32 on GPUs with 99 KiB of shared memory: with keys of 256 they need 132 KiB.
WIDEST_KEY_IN_99_KIB = 128
# The only width of keys and values that FlashQLA's kernels are written for.
FLASH_QLA_WIDTH = 128


class DeltaRule(NamedTuple):
    """The arguments of the op; see `reference`."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: Tensor | None = None

    def in_one_row(self) -> DeltaRule:
        """With packed documents, the tokens of all rows in one."""
        if self.cu_seqlens is None:
            return self
        query, key, value, g, beta = map(one_row, self[:5])
        return self._replace(query=query, key=key, value=value, g=g, beta=beta)

    @property
    def library_options(self) -> dict[str, Any]:
        """Keyword arguments that fla and FlashQLA take; Kimi delta attention asserts a state in float32."""
        return {
            "initial_state": None if self.initial_state is None else self.initial_state.float(),
            "output_final_state": self.output_final_state,
            "use_qk_l2norm_in_kernel": self.use_qk_l2norm_in_kernel,
            "cu_seqlens": self.cu_seqlens,
        }

    def check(self, kernel: str) -> None:
        """Raise KernelError, naming `kernel`, for inconsistent arguments."""
        query, key, value, g, beta, initial_state, *_, cu_seqlens = self
        if value.shape[2] % key.shape[2]:
            found = f"{value.shape[2]} heads, which is not a multiple of key's {key.shape[2]}"
            reject(kernel, "value", found, "use a multiple of key's heads for value")
        if cu_seqlens is not None:
            check_cu_seqlens(kernel, "cu_seqlens", cu_seqlens, *key.shape[:2])
        states = key.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        by_head = tuple(value.shape[:3])
        require_shapes(
            kernel,
            query=(query, tuple(key.shape)),
            value=(value, (*key.shape[:2], *value.shape[2:])),
            g=(g, by_head if g.dim() == 3 else (*by_head, key.shape[3])),
            beta=(beta, by_head),
            initial_state=(initial_state, (states, value.shape[2], key.shape[3], value.shape[3])),
        )


@takes(DeltaRule)
def reference(given: DeltaRule) -> tuple[Tensor, Tensor | None]:
    """Per token: S = exp(g) S; S += k (beta (v - S^T k))^T; out = S^T q / sqrt(K).

    Computed in chunks, for all documents in parallel (section 3.3 of the paper); in fp32, or fp64 for fp64 input. With
    `use_qk_l2norm_in_kernel`, queries and keys are first divided by their norms.

    Returns:
        The output [B, S, V_heads, V] in `query`'s dtype and, with `output_final_state`, the last state of each row
        (with `cu_seqlens`: of each document) in the dtype computed in; `initial_state` has the same shape.

    Raises:
        KernelError: `cu_seqlens` that do not cover the tokens or cross rows, or heads that do not divide.
    """
    given.check("chunk_gated_delta_rule")
    query, key, value, g, beta, initial_state, want_state, normalize, cu_seqlens = given
    log_decays = g if g.dim() == 4 else g[..., None]
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, length, heads, v_width = value.shape
    plan = ChunkSchedule(batch, length, cu_seqlens, _CHUNK, value.device)
    q, k, v, log_decay, rate = (plan.chunks(x, dtype) for x in (query, key, value, log_decays, beta[..., None]))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    groups = heads // key.shape[2]
    q_NHTK, k_NHTK = (x.repeat_interleave(groups, 1) for x in (q * key.shape[-1] ** -0.5, k))

    state = v.new_zeros(len(plan.order), heads, key.shape[-1], v_width)
    if initial_state is not None:
        state = initial_state.to(dtype)[plan.order]
    # Autocast would round the operands of every matmul, and so the states between chunks.
    with without_autocast(query):
        out_NHTV, state = _scan(q_NHTK, k_NHTK, v, log_decay, rate, state, plan.active)
    out = plan.tokens(out_NHTV).view(value.shape).to(query.dtype)
    return out, state[plan.order.argsort()] if want_state else None


def _scan(
    q_NHTK: Tensor,
    k_NHTK: Tensor,
    v_NHTV: Tensor,
    log_decay_NHTC: Tensor,
    rate_NHT1: Tensor,
    state_DHKV: Tensor,
    active: list[int],
) -> tuple[Tensor, Tensor]:
    """Outputs of all chunks and the documents' last states.

    Within a chunk token i corrects what the state and the tokens before it predict: its correction u solves
    (I + A) u = beta (v - k exp(G) S) with A_ij = beta_i (k_i . k_j) exp(G_i - G_j) below the diagonal and G the
    cumulated log decay. The system is solved once for v and once for k, before the states are known. Decays are those
    of a head (C = 1) or of its channels (C = K).
    """
    width = k_NHTK.shape[-1]
    cumulated = log_decay_NHTC.cumsum(2)
    decayed = _decayed_by_channel if cumulated.shape[-1] > 1 else _decayed_by_head
    system = rate_NHT1 * decayed(k_NHTK, k_NHTK, cumulated)
    wanted = rate_NHT1 * torch.cat([k_NHTK * cumulated.exp(), v_NHTV], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    reads, writes = solved[..., :width], solved[..., width:]
    within = decayed(q_NHTK, k_NHTK, cumulated)
    q_NHTK = q_NHTK * cumulated.exp()
    k_NHTK = k_NHTK * (cumulated[:, :, -1:] - cumulated).exp()
    decay_NHC1 = cumulated[:, :, -1:].exp().mT

    outputs, finished = [v_NHTV[:0]], []
    for step, count in zip(step_slices(active), active, strict=True):
        finished.append(state_DHKV[count:])
        state_DHKV = state_DHKV[:count]
        correction = writes[step] - reads[step] @ state_DHKV
        outputs.append(q_NHTK[step] @ state_DHKV + within[step] @ correction)
        state_DHKV = state_DHKV * decay_NHC1[step] + k_NHTK[step].mT @ correction
    return torch.cat(outputs), torch.cat([state_DHKV, *reversed(finished)])


def _decayed_by_head(left_NHTK: Tensor, right_NHTK: Tensor, cumulated_NHT1: Tensor) -> Tensor:
    """left_i . right_j exp(G_i - G_j) for i >= j, else 0."""
    future = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=left_NHTK.device).triu(1)
    between = (cumulated_NHT1 - cumulated_NHT1.mT).masked_fill(future, float("-inf")).exp()
    return (left_NHTK @ right_NHTK.mT) * between


def _decayed_by_channel(left_NHTK: Tensor, right_NHTK: Tensor, cumulated_NHTK: Tensor) -> Tensor:
    """sum over channels of left_i right_j exp(G_i - G_j) for i >= j, else 0, as matmuls without positive exponents.

    For i in the second half of a block and j in the first, with m the end of the first half, both exp(G_i - G_m) and
    exp(G_m - G_j) are at most 1. Blocks of 2 tokens come first, then those of twice as many.
    """
    pairs = (left_NHTK * right_NHTK).sum(-1)[..., None, None]
    half = 1
    while half < _CHUNK:
        left, right, cumulated = (
            x.unflatten(2, (-1, 2, half)).unbind(3) for x in (left_NHTK, right_NHTK, cumulated_NHTK)
        )
        end = cumulated[0][..., -1:, :]
        corner = (left[1] * (cumulated[1] - end).exp()) @ (right[0] * (end - cumulated[0]).exp()).mT
        first, second = pairs.unflatten(2, (-1, 2)).unbind(3)
        upper, lower = torch.cat([first, torch.zeros_like(corner)], -1), torch.cat([corner, second], -1)
        pairs, half = torch.cat([upper, lower], -2), 2 * half
    return pairs.squeeze(2)


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads q, k, v, g and writes the output; backward reads all five and writes four gradients.

    Three state-vector matmuls per head and token in forward (predict, correct, read), six in backward.
    """
    q, v, g = (arguments[name] for name in ("query", "value", "g"))
    bytes_moved = (6 * q.numel() + 5 * v.numel()) * q.element_size() + 3 * g.numel() * g.element_size()
    return Cost(bytes=bytes_moved, flops=18 * v.numel() * q.shape[-1])


def _variant(name: str, cases: Sequence[InputCase]) -> OpVariant:
    return OpVariant(
        name,
        reference,
        cases,
        ("query", "key", "value", "g", "beta"),
        _cost,
        # A chunked kernel reads keys and values rounded to the input's dtype into every matmul of a chunk, where the
        # reference rounds once at the end.
        tolerance_ulps={"bfloat16": 4, "float16": 4, "float32": 64},
        compiles=False,
    )


OP = OpSpec(
    name="chunk_gated_delta_rule",
    description="linear attention with a gated delta rule",
    variants={"standard": _variant("standard", CASES), "per_channel": _variant("per_channel", PER_CHANNEL_CASES)},
)
