"""`triton`: two launches over the streams in each pass of a collapse, one in each pass of the way back; deterministic.

Forward of a collapse reads the streams for the projection and again for the weighted sum; backward reads them for the
gradient of pre and again for their own. Coefficients (24 numbers of a token for four streams) are computed in
registers, Sinkhorn's iterations included, where eager code launches a kernel for each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv, sm_count
from opslot.ops._common.arguments import reject, require_floats, zero
from opslot.ops._common.custom_op import differentiable_op, empty_gradients, launch_op, once_differentiable
from opslot.ops._common.row_tiles import aligned_rows
from opslot.ops.hyper_connection.kernels import collapse
from opslot.ops.hyper_connection.kernels import mix as mixing
from opslot.ops.hyper_connection.op import unsupported_streams

_LABEL = "hyper_connection_implementation='triton'"
_HEAD, _INDEPENDENT, _SINKHORN = 1, 2, 3
_COEFFICIENT_ROWS = 32
_STREAM_ROWS, _STREAM_COLUMNS = 64, 64
# Elements of all streams of a token that one warp takes at once. With several warps, sums over streams would be sums
# over warps.
_TOKEN_COLUMNS, _MIXED_COLUMNS = 2048, 512
# Programs of an SM that share the tokens of the gradient of fn.
_PROGRAMS = 4

_project = KernelLauncher(collapse.project_kernel)
_coefficients = KernelLauncher(collapse.coefficients_kernel)
_weighted_sum = KernelLauncher(collapse.weighted_sum_kernel)
_pre_gradient = KernelLauncher(collapse.pre_gradient_kernel)
_coefficients_gradient = KernelLauncher(collapse.coefficients_gradient_kernel)
_streams_gradient = KernelLauncher(collapse.streams_gradient_kernel)
_mix_forward = KernelLauncher(mixing.mix_kernel)
_mix_backward = KernelLauncher(mixing.mix_gradient_kernel)


class _Options(NamedTuple):
    """Of a collapse, with the names of `op.py`.

    Attributes:
        post_eps: added to post.
        parts: 1 for pre alone, 2 with post, 3 with comb.
    """

    norm_eps: float
    eps: float
    magnitude: float
    post_eps: float
    iterations: int
    parts: int


def sinkhorn(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
    iterations: int = 20,
) -> tuple[Tensor, Tensor, Tensor]:
    """`op.sinkhorn` for float32, bfloat16 and float16, and 2, 4 or 8 streams."""
    collapsed, post, comb = _collapse(
        streams, fn, base, scale, _Options(norm_eps, eps, 2.0, 0.0, iterations, _SINKHORN)
    )
    return post, comb, collapsed


def independent(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
    magnitude: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """`op.independent` for the same."""
    collapsed, post, _ = _collapse(streams, fn, base, scale, _Options(norm_eps, eps, magnitude, eps, 0, _INDEPENDENT))
    return post, collapsed


def head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float = 1e-6, eps: float = 1e-6) -> Tensor:
    """`op.head` for the same."""
    collapsed, _, _ = _collapse(streams, fn, base, scale, _Options(norm_eps, eps, 0.0, 0.0, 0, _HEAD))
    return collapsed


def mix(post: Tensor, comb: Tensor, output: Tensor, streams: Tensor) -> Tensor:
    """`op.mix` for the same."""
    _check(streams, output=output, post=post, comb=comb)
    return _mix(post.contiguous(), comb.contiguous(), output, streams.contiguous())


def add(post: Tensor, output: Tensor, streams: Tensor) -> Tensor:
    """`op.add` for the same."""
    _check(streams, output=output, post=post)
    return _Add.apply(post.contiguous(), output, streams.contiguous())


def _check(streams: Tensor, **tensors: Tensor) -> None:
    require_floats(_LABEL, streams=streams, **tensors)
    if (found := unsupported_streams(streams.shape[-2])) is not None:
        reject(_LABEL, "streams", found, "use eager")
    # Narrower under autocast.
    if (output := tensors.get("output")) is not None and torch.promote_types(
        output.dtype, streams.dtype
    ) != streams.dtype:
        reject(_LABEL, "output", f"its dtype is {output.dtype}, that of streams {streams.dtype}", "use eager")


def _collapse(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    _check(streams, fn=fn, base=base, scale=scale)
    # Autograd rounds the gradients to the dtypes of parameters in 16 bits.
    parameters = [x.float().contiguous() for x in (fn, base, scale)]
    return _collapse_op(streams.contiguous(), *parameters, *map(float, options[:4]), *options[4:])


def _sizes(streams: Tensor, fn: Tensor) -> tuple[int, int, int, int]:
    """Tokens, streams, hidden size and coefficients."""
    count, width = streams.shape[-2:]
    return streams.shape[:-2].numel(), count, width, fn.shape[0]


def _allocate(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, ...]:
    parts = _Options(*options).parts
    lead, (count, width) = streams.shape[:-2], streams.shape[-2:]

    def empty(*shape: int) -> Tensor:
        return streams.new_empty(shape, dtype=torch.float32)

    return (
        streams.new_empty(*lead, width),
        empty(*lead, count) if parts >= _INDEPENDENT else empty(0),
        empty(*lead, count, count) if parts == _SINKHORN else empty(0),
        empty(*lead, fn.shape[0]),
        empty(*lead),
        empty(*lead, count),
    )


def _columns(width: int, most: int) -> int:
    """Elements of a row that a program takes at once: a power of two."""
    return min(most, 1 << (width - 1).bit_length())


def _run_forward(
    outputs: tuple[Tensor, ...], streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *options: Any
) -> None:
    norm_eps, eps, magnitude, post_eps, iterations, parts = _Options(*options)
    collapsed, post, comb, raw, rstd, pre = outputs
    rows, count, width, coefficients = _sizes(streams, fn)
    if not rows:
        return
    block = max(16, 1 << (coefficients - 1).bit_length())
    tile = 16
    while tile < 64 and cdiv(rows, 2 * tile) >= sm_count(streams.device):
        tile *= 2
    _project(
        (cdiv(rows, tile), 1, 1),
        (streams, fn, raw, rstd),
        (),
        (rows, norm_eps),
        (count * width, coefficients, block, tile, 128),
        4,
    )
    _coefficients(
        (cdiv(rows, _COEFFICIENT_ROWS), 1, 1),
        (raw, rstd, base, scale, pre, post, comb),
        (),
        (rows, iterations, eps, post_eps, magnitude),
        (count, coefficients, parts, _COEFFICIENT_ROWS),
        1,
    )
    columns = _columns(width, _TOKEN_COLUMNS // count)
    _weighted_sum((rows, cdiv(width, columns), 1), (streams, pre, collapsed), (), (), (width, count, columns), 1)


def _run_backward(
    gradients: tuple[Tensor | None, ...],
    dcollapsed: Tensor | None,
    dpost: Tensor | None,
    dcomb: Tensor | None,
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    raw: Tensor,
    rstd: Tensor,
    pre: Tensor,
    *rest: Any,
) -> None:
    """`rest`: the options, and whether each gradient is needed."""
    dstreams, dfn, dbase, dscale = gradients
    _, eps, magnitude, _, iterations, parts = _Options(*rest[:-4])
    rows, count, width, coefficients = _sizes(streams, fn)
    if not rows:
        zero(dfn, dbase, dscale)
        return
    dcollapsed, dpost, dcomb = (None if x is None else x.contiguous() for x in (dcollapsed, dpost, dcomb))
    dpre = torch.zeros_like(pre) if dcollapsed is None else torch.empty_like(pre)
    if dcollapsed is not None:
        columns = _columns(width, _TOKEN_COLUMNS // count)
        _pre_gradient((rows, 1, 1), (streams, dcollapsed, dpre), (), (), (width, count, columns), 1)
    dlogits, dscaled, draw = raw.new_empty(3, rows, coefficients)
    dx_factor = torch.empty_like(rstd)
    divisors = raw.new_empty(2 * iterations, rows, count) if dcomb is not None else raw
    _coefficients_gradient(
        (cdiv(rows, _COEFFICIENT_ROWS), 1, 1),
        (raw, rstd, base, scale, dpre, dpost, dcomb, divisors, dlogits, dscaled, draw, dx_factor),
        (),
        (rows, iterations, eps, magnitude),
        (count * width, count, coefficients, parts, dpost is not None, dcomb is not None, _COEFFICIENT_ROWS),
        1,
    )
    if dbase is not None:
        torch.sum(dlogits, 0, out=dbase)
    if dscale is not None:
        sums = dscaled.sum(0).split([count, count, count * count][:parts])
        torch.stack([x.sum() for x in sums], out=dscale)
    if dstreams is None and dfn is None:
        return
    columns = _columns(width, _STREAM_COLUMNS)
    blocks = count * cdiv(width, columns)
    programs = max(1, min(cdiv(rows, _STREAM_ROWS), cdiv(_PROGRAMS * sm_count(streams.device), blocks)))
    per_program = cdiv(cdiv(rows, programs), _STREAM_ROWS) * _STREAM_ROWS
    programs = cdiv(rows, per_program)
    partial = fn.new_empty(programs, *fn.shape) if dfn is not None else None
    _streams_gradient(
        (blocks, programs, 1),
        (streams, fn, pre, dcollapsed, draw, dx_factor, dstreams, partial),
        (),
        (rows, per_program),
        (
            width,
            count,
            coefficients,
            max(16, 1 << (coefficients - 1).bit_length()),
            _STREAM_ROWS,
            columns,
            dcollapsed is not None,
            dstreams is not None,
            dfn is not None,
        ),
        4,
    )
    if partial is not None:
        torch.sum(partial, 0, out=dfn)


_collapse_op = differentiable_op(
    "hyper_connection(Tensor streams, Tensor fn, Tensor base, Tensor scale, float norm_eps, float eps, "
    "float magnitude, float post_eps, int iterations, int parts)"
    " -> (Tensor collapsed, Tensor post, Tensor comb, Tensor raw, Tensor rstd, Tensor pre)",
    allocate=_allocate,
    launch=_run_forward,
    launch_backward=_run_backward,
    kept=("streams", "fn", "base", "scale", "raw", "rstd", "pre"),
    returned=3,
)


def _allocate_next(post: Tensor, *others: Tensor) -> Tensor:
    """The next streams; the present ones are the last of `others`."""
    return torch.empty_like(others[-1])


def _run_mix(out: Tensor, post: Tensor, comb: Tensor | None, output: Tensor, streams: Tensor) -> None:
    rows, (count, width) = streams.shape[:-2].numel(), streams.shape[-2:]
    if not rows:
        return
    columns = _columns(width, _MIXED_COLUMNS // count)
    output, stride = aligned_rows(output)
    _mix_forward(
        (rows, cdiv(width, columns), 1),
        (post, comb, output, streams, out),
        (stride,),
        (),
        (width, count, comb is not None, columns),
        1,
    )


def _run_mix_backward(
    gradients: tuple[Tensor | None, ...],
    dnext: Tensor,
    post: Tensor,
    comb: Tensor | None,
    output: Tensor,
    streams: Tensor,
    *_: bool,
) -> None:
    """Write all gradients: they cost no more than the loads of what they share."""
    dpost, dcomb, doutput, dstreams = gradients
    rows, (count, width) = streams.shape[:-2].numel(), streams.shape[-2:]
    if not rows:
        return
    columns = _columns(width, _MIXED_COLUMNS // count)
    output, stride = aligned_rows(output)
    _mix_backward(
        (rows, 1, 1),
        (post, comb, output, streams, dnext.contiguous(), dpost, dcomb, doutput, dstreams),
        (stride,),
        (),
        (width, count, comb is not None, columns),
        1,
    )


_mix = differentiable_op(
    "hyper_connection_mix(Tensor post, Tensor comb, Tensor output, Tensor streams) -> Tensor",
    allocate=_allocate_next,
    launch=_run_mix,
    launch_backward=_run_mix_backward,
    # All, in any case.
    allocate_gradients=lambda dnext, *arguments: empty_gradients(arguments[:4], [True] * 4),
)


_add_forward = launch_op(
    "hyper_connection_add(Tensor post, Tensor output, Tensor streams) -> Tensor",
    _allocate_next,
    lambda out, post, output, streams: _run_mix(out, post, None, output, streams),
)
_add_backward = launch_op(
    "hyper_connection_add_backward(Tensor dnext, Tensor post, Tensor output) -> (Tensor, Tensor)",
    lambda dnext, *tensors: empty_gradients(tensors, (True, True)),
    lambda gradients, dnext, post, output: _run_mix_backward(
        (gradients[0], None, gradients[1], None), dnext, post, None, output, dnext
    ),
)


class _Add(torch.autograd.Function):
    """The gradient of the streams is that of the sum, without a copy."""

    @staticmethod
    def forward(ctx: Any, post: Tensor, output: Tensor, streams: Tensor) -> Tensor:
        ctx.save_for_backward(post, output)
        return _add_forward(post, output, streams)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnext: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dnext = dnext.contiguous()
        return *_add_backward(dnext, *ctx.saved_tensors), dnext
