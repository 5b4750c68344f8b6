"""Linear head + cross entropy: references and costs. Shapes are those of contract.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opslot._base.wrapper_tensors import wrapper_class
from opslot.ops._common.arguments import upcast
from opslot.ops._common.contract import takes, variants_of
from opslot.ops.cross_entropy_loss import contract
from opslot.ops.cross_entropy_loss.cases import CAUSAL_CASES, CLASSIFICATION_CASES, TOKEN_CASES, benchmark_case
from opslot.ops.cross_entropy_loss.contract import LOSSES, LossInputs
from opslot.ops.cross_entropy_loss.heads import can_serve
from opslot.ops.cross_entropy_loss.low_rank import linear_of, low_rank_problem
from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant


def log_probs_of(logits: Tensor, shift_labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy) of logits [..., V] for labels [...] in place."""
    everything = upcast(logits).view(*shift_labels.shape, logits.shape[-1]).log_softmax(-1)
    ignored = shift_labels == ignore_index
    log_probs = everything.gather(-1, shift_labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    return log_probs.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def _logits(inputs: LossInputs) -> Tensor:
    logits = F.linear(inputs.hidden_states, inputs.weight, inputs.bias)
    return scaled_and_capped(logits, inputs.softcap, inputs.logit_scale)


def scaled_and_capped(logits: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def _loss(inputs: LossInputs) -> Tensor:
    num_items = inputs.num_items_in_batch
    logits = _logits(inputs)
    logits = upcast(logits).reshape(-1, logits.shape[-1])
    labels = inputs.labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items is None else "sum"
    loss = F.cross_entropy(
        logits, labels, ignore_index=inputs.ignore_index, reduction=reduction, label_smoothing=inputs.label_smoothing
    )
    if num_items is None:
        return loss
    # Some callers pass a tensor of shape [1], which would give the loss that shape.
    return loss / (num_items.to(loss.device).reshape(()) if isinstance(num_items, Tensor) else num_items)


@takes(contract.token_log_probs)
def token_log_probs(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    return log_probs_of(_logits(inputs), inputs.labels.to(inputs.hidden_states.device), inputs.ignore_index)


causal, sequence_classification = variants_of(_loss, LOSSES)


def head_of(module: Any) -> Any:
    """The module that computes the logits: the output embeddings or a classifier's `score`, or None."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return head if head is not None else getattr(module, "score", None)


def _head_problem(module: Any) -> str | None:
    """Check the head, since a fused kernel uses only its weight and bias."""
    head = head_of(module)
    if head is None:
        return None
    if not isinstance(linear_of(head), nn.Linear):
        kind = f"{type(head).__module__}.{type(head).__name__}"
        return f"the head is a {kind}, whose output is more than a linear layer's"
    if problem := low_rank_problem(head):
        return problem
    stored = wrapper_class(head.weight) or (None if head.weight.is_floating_point() else head.weight.dtype)
    return None if stored is None else f"the head's weight is stored as {stored}"


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    weight = getattr(head_of(request.module), "weight", None)
    return None if weight is None else {"hidden": weight.shape[1], "vocab": weight.shape[0]}


def _cost(arguments: Mapping[str, Any], matmuls: int = 3) -> Cost:
    """Reads weight and hidden states, writes their gradients; three matmuls, for logits and both gradients."""
    hidden, weight = arguments["hidden_states"], arguments["weight"]
    rows = hidden.numel() // hidden.shape[-1]
    return Cost(
        bytes=2 * (hidden.numel() + weight.numel()) * hidden.element_size(),
        flops=2 * matmuls * rows * weight.numel(),
    )


def _token_cost(arguments: Mapping[str, Any]) -> Cost:
    """The gradients of the tokens are known only in backward, so the logits are computed twice."""
    return _cost(arguments, matmuls=4)


def _variant(
    reference: Callable[..., Any], cases: list[InputCase], description: str, cost: Callable[..., Cost] = _cost
) -> OpVariant:
    return OpVariant(
        reference.__name__,
        reference,
        cases,
        ("hidden_states", "weight", "bias"),
        cost,
        _head_problem,
        static_shape=_static_shape,
        benchmark_case=benchmark_case,
        description=description,
    )


_VARIANTS = (
    _variant(causal, CAUSAL_CASES, "next-token loss, shifted inside"),
    _variant(sequence_classification, CLASSIFICATION_CASES, "labels in place"),
    _variant(token_log_probs, TOKEN_CASES, "log-probability and entropy per token", _token_cost),
)


def _is_called(arguments: Mapping[str, Any]) -> bool:
    """Without labels, a model computes no loss."""
    return any(arguments.get(name) is not None for name in ("labels", "shift_labels"))


OP = OpSpec(
    name="cross_entropy_loss",
    description="linear head and cross entropy",
    can_serve=can_serve,
    is_called=_is_called,
    variants={variant.name: variant for variant in _VARIANTS},
)
