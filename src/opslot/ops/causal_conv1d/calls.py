"""What generated modules call for their convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from opslot.ops._common.by_document import each_document, join_documents
from opslot.slots.protocol import slot_attribute


def conv_by_document(
    convolve: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Transformers' convolution `convolve` of [B, C, S], of each document alone if there are several."""
    if cu_seqlens is None:
        return convolve(hidden_states, weight, bias, activation)
    states = hidden_states.transpose(1, 2)
    outputs = each_document(
        lambda tokens: convolve(tokens.transpose(1, 2), weight, bias, activation).transpose(1, 2), cu_seqlens, states
    )
    return join_documents(outputs, states).transpose(1, 2)


def mixer_conv(mixer: Any, hidden_states: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The convolution and activation of a mixer with a slot, before Transformers 5.15."""
    kernel = getattr(mixer, slot_attribute("causal_conv1d"))
    if kernel is not None:
        return kernel(hidden_states, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.activation, cu_seqlens)

    def convolve(x: Tensor, *_: Any) -> Tensor:
        return mixer.act(mixer.conv1d(x)[..., : x.shape[-1]])

    return conv_by_document(convolve, hidden_states, None, None, None, cu_seqlens)
