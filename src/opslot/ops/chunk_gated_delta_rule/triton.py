"""The gated delta rule in Triton: chunks of 64 tokens, forward and backward, deterministic.

Forward: divide queries and keys by their norms; solve every chunk's triangular system for its inverse, in float32, and
multiply keys and values by it; walk along each document's chunks with the state in registers, writing down the state
that each chunk finds and its correction; then all outputs at once. Backward computes all of this again from the
arguments, which are all that is saved, walks back with the state's gradient, and ends in two kernels over all chunks.
`triton_kernels.py` has the formulas. No chunk holds tokens of two documents: a table of chunks is made on the device,
as long as the documents could need, so that the host never waits for `cu_seqlens`.

Floor on an H200 (4.3 TB/s, 790 TFLOP/s) in bf16 at 16384 tokens, 16 key and 32 value heads 128 wide: forward reads q, k
and v and writes the output, 403 MB or 0.09 ms; backward reads these, writes three gradients, 671 MB or 0.16 ms. The
recurrence alone is 52 GFLOP forward and 103 backward, 0.07 and 0.13 ms. This form does 100 and 239 GFLOP and moves its
intermediates through memory, 2.3 and 6.0 GB in all or 0.55 and 1.4 ms, of which the L2 cache may spare some. Counted,
not timed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from opslot.ops._common.library import once_differentiable, opaque_op, refuse
from opslot.ops._common.specs import FLOATS
from opslot.ops._common.triton import Launcher, cdiv
from opslot.ops.chunk_gated_delta_rule import triton_kernels as kernels
from opslot.ops.chunk_gated_delta_rule.op import check_shapes

_LABEL = "chunk_gated_delta_rule_implementation='triton'"
_CHUNK = 64
# A state's block of columns holds all its rows in registers.
_WIDEST_KEY = 256

_launch_chunk_table = Launcher(kernels.chunk_table_kernel)
_launch_normalize = Launcher(kernels.normalize_kernel)
_launch_solve = Launcher(kernels.solve_kernel)
_launch_reads_writes = Launcher(kernels.reads_writes_kernel)
_launch_states = Launcher(kernels.states_kernel)
_launch_output = Launcher(kernels.output_kernel)
_launch_local = Launcher(kernels.local_kernel)
_launch_dstates = Launcher(kernels.dstates_kernel)
_launch_dvalue = Launcher(kernels.dvalue_kernel)
_launch_dkey = Launcher(kernels.dkey_kernel)
_launch_fold = Launcher(kernels.fold_kernel)


@dataclass(frozen=True)
class Plan:
    """How the kernels cut widths.

    Attributes:
        key: all of a key, a power of two.
        key_block, value_block: columns that the kernels over all chunks take at a time.
        grad_block: columns of values that the two last kernels of backward take at a time.
        state_block: columns of a state that one walk along a document carries.
        stages: chunks that a walk has loads in flight for.
    """

    key: int
    key_block: int
    value_block: int
    grad_block: int
    state_block: int
    stages: int


@functools.cache
def plan_for(key: int, value: int, element_bytes: int) -> Plan:
    """Sized to what ptxas says of registers and shared memory on Hopper, not measured.

    A walk is bound by its chain of small products, so its blocks are narrow: 128 wide values make four walks a head.
    The last kernels of backward hold three accumulators; 64 columns of values would spill twice as many registers.
    """
    key_full, value_full = (max(16, triton.next_power_of_2(n)) for n in (key, value))
    most = 64 if element_bytes == 2 else 32
    narrow_state = element_bytes > 2 or key_full > 128
    return Plan(
        key=key_full,
        key_block=min(most, key_full),
        value_block=min(most, value_full),
        grad_block=min(32, value_full),
        state_block=min(16 if narrow_state else 32, value_full),
        stages=1 if element_bytes > 2 else 2,
    )


@dataclass(frozen=True)
class _Chunks:
    """The table of chunks.

    Attributes:
        cu_seqlens: [documents + 1].
        first: int32 [documents + 1], the first chunk of each document.
        start, length: int32 [count], first token and number of tokens of each chunk; trailing ones may have none.
    """

    cu_seqlens: Tensor
    first: Tensor
    start: Tensor
    length: Tensor
    count: int
    documents: int


def _chunks(cu_seqlens: Tensor | None, batch: int, length: int, device: torch.device) -> _Chunks:
    if cu_seqlens is None:
        documents, count = batch, batch * cdiv(length, _CHUNK)
        cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    else:
        documents = cu_seqlens.numel() - 1
        # Every document may end in a chunk of one token.
        count = min((length + (_CHUNK - 1) * documents) // _CHUNK, length)
        cu_seqlens = cu_seqlens.contiguous()
    first = torch.empty(documents + 1, dtype=torch.int32, device=device)
    start, tokens = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    rows = 32
    _launch_chunk_table(
        (cdiv(count, rows), 1, 1), (cu_seqlens, first, start, tokens), (), (documents, count), (_CHUNK, rows, 128), 4
    )
    return _Chunks(cu_seqlens, first, start, tokens, count, documents)


def _tokens(x: Tensor) -> Tensor:
    """[B, S, heads, width] as [B * S, heads, width] with adjacent columns: a view where the strides have one."""
    rows = x.reshape(-1, *x.shape[2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _scalars(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[2]).contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _norm_shape(width: int) -> tuple[int, int]:
    """Rows and columns of a program of the norm and of its backward: 16 elements a thread of four warps."""
    columns = triton.next_power_of_2(width)
    return max(1, 2048 // columns), columns


def _normalized(x: Tensor) -> Tensor:
    tokens, heads, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, columns = _norm_shape(width)
    grid = (cdiv(tokens * heads, rows), 1, 1)
    _launch_normalize(grid, (x, out), _strides(x), (tokens * heads,), (heads, width, rows, columns), 4)
    return out


class _Pass:
    """One call's tensors as the kernels see them, and what forward and backward compute alike.

    Attributes:
        q, k, v: tokens [T, heads, width]; q and k divided by their norms where that is asked for.
        cumulated, inverse, reads, correction: by chunk; `states` [chunks * V_heads, K, V].
        final: the last states, if asked for.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        normalize: bool,
        want_final: bool,
    ) -> None:
        batch, length, self.heads, self.value = value.shape
        self.key_heads, self.key = key.shape[2:]
        self.group = self.heads // self.key_heads
        self.scale = self.key**-0.5
        self.plan = plan_for(self.key, self.value, key.element_size())
        self.chunks = _chunks(cu_seqlens, batch, length, value.device)
        self.raw_q, self.raw_k, self.v = _tokens(query), _tokens(key), _tokens(value)
        self.q, self.k = (_normalized(x) if normalize else x for x in (self.raw_q, self.raw_k))
        self.rate = _scalars(beta)
        self._walk(self._solve(_scalars(g)), initial_state, want_final)

    @property
    def per_chunk(self) -> int:
        """Programs of a kernel over all chunks and value heads."""
        return self.chunks.count * self.heads

    def by_chunk(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.k.new_empty((self.per_chunk, *shape), dtype=dtype)

    def _solve(self, log_decay: Tensor) -> Tensor:
        """What each token would write if its chunk found an empty state, by chunk."""
        plan, table = self.plan, (self.chunks.start, self.chunks.length)
        self.cumulated = self.by_chunk(_CHUNK, dtype=torch.float32)
        self.inverse = self.by_chunk(_CHUNK, _CHUNK)
        self.reads, writes = self.by_chunk(_CHUNK, self.key), self.by_chunk(_CHUNK, self.value)
        _launch_solve(
            (self.per_chunk, 1, 1),
            (self.k, log_decay, self.rate, *table, self.cumulated, self.inverse),
            _strides(self.k),
            (),
            (self.heads, self.group, self.key, plan.key_block, _CHUNK),
            1,
        )
        _launch_reads_writes(
            (self.per_chunk, 1, 1),
            (self.k, self.v, self.rate, *table, self.cumulated, self.inverse, self.reads, writes),
            _strides(self.k, self.v),
            (),
            self._cut(plan.value_block),
            4,
        )
        return writes

    def _walk(self, writes: Tensor, initial_state: Tensor | None, want_final: bool) -> None:
        plan, chunks = self.plan, self.chunks
        self.states = self.by_chunk(self.key, self.value)
        self.correction = self.by_chunk(_CHUNK, self.value)
        shape = (chunks.documents, self.heads, self.key, self.value)
        self.final = self.k.new_empty(shape, dtype=torch.float32) if want_final else None
        _launch_states(
            (chunks.documents * self.heads, cdiv(self.value, plan.state_block), 1),
            (
                self.k,
                self.reads,
                writes,
                self.cumulated,
                chunks.cu_seqlens,
                chunks.first,
                None if initial_state is None else initial_state.contiguous(),
                self.states,
                self.correction,
                self.final,
            ),
            _strides(self.k),
            (),
            (
                self.heads,
                self.group,
                self.key,
                self.value,
                initial_state is not None,
                want_final,
                plan.key,
                plan.state_block,
                _CHUNK,
                plan.stages,
            ),
            4,
        )

    def _cut(self, value_block: int) -> tuple[int, ...]:
        return self.heads, self.group, self.key, self.value, self.plan.key_block, value_block, _CHUNK

    def write_output(self, out: Tensor) -> None:
        chunks = self.chunks
        _launch_output(
            (self.per_chunk, cdiv(self.value, self.plan.value_block), 1),
            (self.q, self.k, chunks.start, chunks.length, self.cumulated, self.states, self.correction, out),
            _strides(self.q, self.k),
            (self.scale,),
            self._cut(self.plan.value_block),
            4,
        )

    def write_gradients(
        self, dout: Tensor, dfinal: Tensor | None, grads: tuple[Tensor, ...], dinitial: Tensor | None, normalize: bool
    ) -> None:
        """Fill `grads` of query, key, value, g and beta, and `dinitial` if it is wanted."""
        dq, dk, dv, dg, dbeta = grads
        dout = _tokens(dout)
        dstates, dcorrection = self._walk_back(dout, dfinal, dinitial)
        table = (self.chunks.start, self.chunks.length)
        x = self.by_chunk(_CHUNK, self.value)
        dwithin, dsystem = (self.by_chunk(_CHUNK, _CHUNK) for _ in range(2))
        drate = self.by_chunk(_CHUNK, dtype=torch.float32)
        _launch_dvalue(
            (self.per_chunk, 1, 1),
            (
                self.v,
                self.rate,
                dout,
                *table,
                self.cumulated,
                self.inverse,
                self.correction,
                dcorrection,
                x,
                dwithin,
                dsystem,
                dv,
                drate,
            ),
            _strides(self.v, dout),
            (self.scale,),
            (self.heads, self.value, self.plan.grad_block, _CHUNK),
            4,
        )
        fold = normalize or self.group > 1
        of_heads = [dx.new_empty(dout.shape[0], self.heads, self.key) if fold else dx for dx in (dq, dk)]
        _launch_dkey(
            (self.per_chunk, 1, 1),
            (
                self.q,
                self.k,
                self.rate,
                dout,
                *table,
                self.cumulated,
                self.states,
                dstates,
                self.correction,
                x,
                dwithin,
                dsystem,
                drate,
                *of_heads,
                dbeta,
                dg,
            ),
            _strides(self.q, self.k, dout),
            (self.scale,),
            self._cut(self.plan.grad_block),
            4,
        )
        if fold:
            self._fold(self.raw_q, of_heads[0], dq, normalize)
            self._fold(self.raw_k, of_heads[1], dk, normalize)

    def _walk_back(self, dout: Tensor, dfinal: Tensor | None, dinitial: Tensor | None) -> tuple[Tensor, Tensor]:
        plan, chunks = self.plan, self.chunks
        strides = _strides(self.q, self.k, dout)
        local, dcorrection = (self.by_chunk(_CHUNK, self.value) for _ in range(2))
        dstates = self.by_chunk(self.key, self.value)
        _launch_local(
            (self.per_chunk, 1, 1),
            (self.q, self.k, dout, chunks.start, chunks.length, self.cumulated, local),
            strides,
            (self.scale,),
            self._cut(self.plan.value_block),
            4,
        )
        _launch_dstates(
            (chunks.documents * self.heads, cdiv(self.value, plan.state_block), 1),
            (
                self.q,
                self.k,
                dout,
                self.reads,
                local,
                self.cumulated,
                chunks.cu_seqlens,
                chunks.first,
                None if dfinal is None else dfinal.contiguous(),
                dstates,
                dcorrection,
                dinitial,
            ),
            strides,
            (self.scale,),
            (
                self.heads,
                self.group,
                self.key,
                self.value,
                dfinal is not None,
                dinitial is not None,
                plan.key,
                plan.state_block,
                _CHUNK,
                plan.stages,
            ),
            4,
        )
        return dstates, dcorrection

    def _fold(self, raw: Tensor, of_heads: Tensor, dx: Tensor, normalize: bool) -> None:
        total = raw.shape[0] * self.key_heads
        rows, columns = _norm_shape(self.key)
        _launch_fold(
            (cdiv(total, rows), 1, 1),
            (raw, of_heads, dx),
            _strides(raw),
            (total,),
            (self.key_heads, self.group, self.key, normalize, rows, columns),
            4,
        )


def _fake_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    want_final: bool,
) -> tuple[Tensor, Tensor | None]:
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    documents = value.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (documents, value.shape[2], key.shape[3], value.shape[3])
    return out, value.new_empty(shape, dtype=torch.float32) if want_final else None


@opaque_op(
    "chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state,"
    " Tensor? cu_seqlens, bool normalize, bool want_final) -> (Tensor, Tensor)",
    fake=_fake_forward,
)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    want_final: bool,
) -> tuple[Tensor, Tensor | None]:
    out, final = _fake_forward(query, key, value, g, beta, initial_state, cu_seqlens, normalize, want_final)
    if value.numel() == 0:
        if final is not None:
            final.copy_(initial_state) if initial_state is not None else final.zero_()
        return out, final
    call = _Pass(query, key, value, g, beta, initial_state, cu_seqlens, normalize, want_final)
    call.write_output(out)
    return out, call.final


def _fake_backward(
    dout: Tensor,
    dfinal: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    want_dinitial: bool,
) -> tuple[Tensor | None, ...]:
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, g, beta)]
    dinitial = None
    if want_dinitial and initial_state is not None:
        dinitial = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    return *grads, dinitial


@opaque_op(
    "chunk_gated_delta_rule_backward(Tensor dout, Tensor? dfinal, Tensor query, Tensor key, Tensor value, Tensor g,"
    " Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, bool normalize, bool want_dinitial)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def _backward(
    dout: Tensor,
    dfinal: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    want_dinitial: bool,
) -> tuple[Tensor | None, ...]:
    arguments = (query, key, value, g, beta, initial_state, cu_seqlens, normalize)
    *grads, dinitial = _fake_backward(dout, dfinal, *arguments, want_dinitial)
    if value.numel() == 0:
        if dinitial is not None:
            dinitial.copy_(dfinal) if dfinal is not None else dinitial.zero_()
    else:
        call = _Pass(*arguments, want_final=False)
        call.write_gradients(dout, dfinal, tuple(grads), dinitial, normalize)  # type: ignore[arg-type]
    return *grads, dinitial


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        normalize: bool,
        want_final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(query, key, value, g, beta, initial_state, cu_seqlens)
        ctx.set_materialize_grads(False)
        ctx.normalize = normalize
        out, final = _forward(query, key, value, g, beta, initial_state, cu_seqlens, normalize, want_final)
        return out, final if want_final else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dfinal is None:
            return (None,) * 9
        saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[2])
        needed = ctx.needs_input_grad
        grads = _backward(dout, dfinal, *saved, ctx.normalize, needed[5])
        return *(grad if need else None for grad, need in zip(grads, needed, strict=False)), None, None, None


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`op.reference` for float32, bfloat16 and float16, and keys up to 256 wide; the last state in float32.

    Query, key and value have one dtype; the others any of the three. Heads are read where they lie, if their columns
    are adjacent and rows of the batch follow each other; else they are copied first.

    Raises:
        KernelError: another dtype, wider keys, or what the reference refuses.
    """
    named = {"query": query, "key": key, "value": value, "g": g, "beta": beta, "initial_state": initial_state}
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            found = f"its dtype is {tensor.dtype}, not float32, bfloat16 or float16"
            refuse(_LABEL, name, found, "use torch_chunked")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            refuse(_LABEL, name, f"its dtype is {tensor.dtype}, query's is {query.dtype}", "give all three the same")
    if key.shape[3] > _WIDEST_KEY:
        refuse(_LABEL, "key", f"its heads are {key.shape[3]} wide, the limit is {_WIDEST_KEY}", "use torch_chunked")
    check_shapes(_LABEL, key, value, initial_state, cu_seqlens)
    out, final = _GatedDeltaRule.apply(
        query, key, value, g, beta, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, output_final_state
    )
    return out, final
