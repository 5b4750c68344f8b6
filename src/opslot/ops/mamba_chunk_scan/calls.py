"""What generated modules call for their scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.by_document import each_document, join_documents
from opslot.ops.mamba_chunk_scan.op import OPTIONS, Scan


def scan_by_document(scan: Callable[..., Any], chunk_size: int, *arguments: Any) -> Any:
    """Transformers' scan `scan` of the op's `arguments`, of each document alone if there are several."""
    given = Scan(*arguments)
    options = {name: getattr(given, name) for name in OPTIONS}

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Any:
        return scan(x, dt, given.A, B, C, chunk_size=chunk_size, initial_states=state, **options)

    tokens = given.x, given.dt, given.B, given.C
    if given.cu_seqlens is None:
        return run(*tokens, given.initial_states)
    results = each_document(run, given.cu_seqlens, *tokens, state=given.initial_states)
    return _joined(results, given.x, given.return_final_states)


def _joined(results: list[Any], x: Tensor, with_states: bool) -> Any:
    """Outputs of all documents like x [B, S, ...], with their states if the results have some."""
    if not with_states:
        return join_documents(results, x)
    outputs, states = zip(*results, strict=True)
    return join_documents(outputs, x), torch.cat(states)


def scan_channels(scan: Callable[..., Any], *arguments: Any) -> Any:
    """Mamba-1's scan and gate, with a channel as a head of the slot's scan.

    Of x, dt, B, C and z, tokens are the last dim.
    """
    x, dt, A, B, C, D, z, dt_bias, softplus, want_state, cu_seqlens = arguments
    tokens, steps = x.transpose(1, 2)[..., None], dt.transpose(1, 2)
    B, C = (tensor.transpose(1, 2)[:, :, None].to(x.dtype) for tensor in (B, C))
    limit = (0.0, float("inf"))
    found = scan(tokens, steps, A, B, C, D, dt_bias, None, softplus, limit, want_state, cu_seqlens)
    out = (found[0] if want_state else found).squeeze(-1).transpose(1, 2) * F.silu(z)
    return (out, found[1].squeeze(2).to(x.dtype)) if want_state else out


def scan_channels_by_document(scan: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Transformers' scan of Mamba-1 `scan`, of each document alone if there are several."""
    x, dt, A, B, C, D, z, dt_bias, softplus, want_state, cu_seqlens = arguments
    options |= {"delta_bias": dt_bias, "delta_softplus": softplus, "return_last_state": want_state}
    if cu_seqlens is None:
        return scan(x, dt, A, B, C, D=D, z=z, **options)

    def run(*tokens: Tensor) -> Any:
        x, dt, B, C, z = (tensor.transpose(1, 2) for tensor in tokens)
        found = scan(x, dt, A, B, C, D=D, z=z, **options)
        return (found[0].transpose(1, 2), found[1]) if want_state else found.transpose(1, 2)

    tokens = [tensor.transpose(1, 2) for tensor in (x, dt, B, C, z)]
    found = _joined(each_document(run, cu_seqlens, *tokens), tokens[0], want_state)
    return (found[0].transpose(1, 2), found[1]) if want_state else found.transpose(1, 2)


def mixer_by_document(
    mixer: Any,
    kernel: Any,
    original: Callable[..., Tensor],
    with_kernels: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: Any,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """A mixer's output with the slot's `kernel`, else Transformers', of each document alone if there are several.

    `original` computes everything in Transformers, also from a state, which `with_kernels` does not take.
    """
    has_state = cache_params is not None and cache_params.has_previous_state(mixer.layer_idx)
    if kernel is not None and not has_state:
        return with_kernels(mixer, hidden_states, cache_params, attention_mask, cu_seqlens)
    if cu_seqlens is None:
        return original(hidden_states, cache_params, attention_mask)
    outputs = each_document(lambda tokens: original(tokens, None, None), cu_seqlens, hidden_states)
    return join_documents(outputs, hidden_states)


def lightning_attention(
    scan: Callable[..., Any],
    slope_rate: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    want_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Output and last state of lightning attention, computed by a scan with steps of 1."""
    x, B, C = (tensor.transpose(1, 2) for tensor in (value, key, query))
    dt = torch.ones(x.shape[:3], dtype=torch.float32, device=x.device)
    found = scan(x, dt, -slope_rate.flatten().float(), B, C, return_final_states=want_state, cu_seqlens=cu_seqlens)
    out, state = found if want_state else (found, None)
    return out.transpose(1, 2), None if state is None else state.mT.to(value.dtype)


def lightning_by_document(attention: Any, hidden_states: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Transformers' lightning attention of each document alone."""
    outputs = each_document(lambda tokens: attention.forward(tokens, None, None)[0], cu_seqlens, hidden_states)
    return join_documents(outputs, hidden_states)
