"""Checks of cu_seqlens, for kernels that write nothing outside the documents."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject

_INSTEAD = "let it begin with 0, never fall and end with the number of tokens; padding is a document too"
# cu_seqlens checked last on a device, of which a model gives the same to every layer: the tensor, its version, rows,
# length and longest.
_asked: list[tuple[weakref.ref[Tensor], int, int, int, int | None]] = []
_REMEMBERED = 8


def check_cu_seqlens(
    kernel: str, argument: str, cu_seqlens: Tensor, rows: int, length: int, longest: int | None = None
) -> None:
    """Reject cu_seqlens that leave tokens out, or let a document continue in the next row: kernels write
    nothing where no document is, and what is read there is old memory.

    cu_seqlens on a CPU are read here. Those on a device are never waited for: a kernel on the device looks at them, and
    ends the process's work there with an assertion that names the kernel. Under torch.compile nobody looks.

    Args:
        kernel: its configuration, e.g. "attn_implementation='flash_attention_4'".
        argument: name of `cu_seqlens` [documents + 1].
        rows, length: of the tokens; the last boundary must be rows * length.
        longest: what the caller says of the longest document; a kernel leaves out what is longer.

    Raises:
        KernelError: the boundaries are known not to cover the tokens.
    """
    tokens = rows * length
    if torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor:
        return
    if cu_seqlens.is_cuda:
        _assert_on_device(kernel, argument, cu_seqlens, rows, length, longest)
    elif cu_seqlens.device.type == "cpu":
        boundaries = cu_seqlens.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(boundaries)]
        if not boundaries or boundaries[0] != 0 or min(lengths, default=0) < 0:
            reject(kernel, argument, f"it is {_shown(boundaries)}, not rising from 0", _INSTEAD)
        if boundaries[-1] != tokens:
            reject(kernel, argument, f"it ends with {boundaries[-1]} where there are {tokens} tokens", _INSTEAD)
        crossed = [end for end in range(length, tokens, max(length, 1)) if end not in boundaries]
        if crossed:
            found = f"a document crosses token {crossed[0]}, where a row of {length} ends"
            reject(kernel, argument, found, "end documents with their rows, or give one row")
        if longest is not None and max(lengths, default=0) > longest:
            found = f"its longest document has {max(lengths)} tokens, the longest is said to have {longest}"
            reject(kernel, argument, found, "give the true max_length, or leave it out")


def _shown(boundaries: list[int]) -> str:
    return str(boundaries) if len(boundaries) <= 8 else f"[{', '.join(map(str, boundaries[:7]))}, ...]"


def _assert_on_device(
    kernel: str, argument: str, cu_seqlens: Tensor, rows: int, length: int, longest: int | None
) -> None:
    for tensor, *about in _asked:
        if tensor() is cu_seqlens and about == [cu_seqlens._version, rows, length, longest]:
            return
    lengths = cu_seqlens.diff()
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == rows * length) & (lengths >= 0).all()
    if rows > 1:
        ends = torch.arange(1, rows, device=cu_seqlens.device) * length
        right &= torch.isin(ends, cu_seqlens).all()
    if longest is not None:
        right &= (lengths <= longest).all()
    found = f"does not cover {rows} rows of {length} tokens with documents of at most {longest or length}"
    torch._assert_async(right, f"{kernel}: {argument} {found}; {_INSTEAD}")
    _asked.append((weakref.ref(cu_seqlens), cu_seqlens._version, rows, length, longest))
    del _asked[:-_REMEMBERED]
