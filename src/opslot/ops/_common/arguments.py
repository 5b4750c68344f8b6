"""What kernels do with the arguments of a call: reject what they do not serve, and lay out rows."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from opslot._base.errors import KernelError


def reject(kernel: str, argument: str, found: str, hint: str) -> NoReturn:
    """Raise the KernelError for an argument that a kernel does not serve.

    Args:
        kernel: its configuration, e.g. "rms_norm_implementation='triton'".
        argument: the argument's name.
        found: what it is, and what the kernel takes.
        hint: what serves it.
    """
    raise KernelError(f"{kernel} cannot take {argument}: {found}", hint=hint)


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` as rows with adjacent columns, and their stride: `x` itself if contiguous, else a view or, last, a copy."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)
