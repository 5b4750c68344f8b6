"""Whether a fused linear + loss kernel can replace a model's head and loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.loss import loss_utils

from opslot._base.errors import KernelError
from opslot._base.wrapper_tensors import wrapper_class
from opslot.ops._common.hooks import has_own_hooks
from opslot.ops.cross_entropy_loss.low_rank import has_low_rank, layers_of, low_rank_problem
from opslot.slots import BoundKernel, protocol, walk_slots


def can_serve(kernel: BoundKernel, model: Any, head: Any, *around: Any) -> bool:
    """Whether a fused linear + loss kernel computes the same as the model's head and loss.

    True if `head` is an nn.Linear whose forward is not replaced, without hooks, and the loss is Transformers', except
    in evaluation (eval mode without gradients, outside `loss_only`), where callers may read the logits. The head may
    be the trained copy of PEFT's `modules_to_save`, have trained tokens, and have LoRA adapters if the kernel adds
    them. The forwards of the modules `around` it, which do not run, must not be replaced either.

    Raises:
        KernelError: it does not compute the same, and the kernel was named explicitly.
    """
    if not (model.training or torch.is_grad_enabled() or protocol.loss_only(model)):
        return False
    problem = _head_problem(kernel, model, head, around)
    if problem is not None and kernel.explicit:
        raise KernelError(
            f"cross_entropy_loss_implementation={kernel.name!r} cannot be used here: {problem}",
            hint="set cross_entropy_loss_implementation to eager or auto, or keep the head a plain nn.Linear",
        )
    return problem is None


def _head_problem(kernel: BoundKernel, model: Any, head: Any, around: tuple[Any, ...]) -> str | None:
    *_, linear = layers = layers_of(head)
    if "linear" in protocol.attached(linear):
        if kernel.name != "batch_invariant":
            return "the output head is bound by linear_implementation, which only batch_invariant computes too"
    elif type(linear).forward is not nn.Linear.forward or "forward" in linear.__dict__:
        return f"the output head is a {type(head).__name__}, whose forward is more than a linear layer's"
    # A parametrized weight is computed each time it is read, and spectral norm updates its buffers with it.
    if not is_parametrized(linear, "weight") and (stored := wrapper_class(linear.weight)) is not None:
        return f"the output head's weight is stored as {stored}"
    if any("forward" in module.__dict__ for module in around):
        return "the forward of a module around the output head was replaced"
    if any(map(has_own_hooks, (*layers, *around))):
        return "the output head has hooks, which need its output"
    if has_low_rank(head) and not getattr(kernel.kernel, "adds_adapters", False):
        return "the output head has LoRA adapters, which this kernel does not add"
    if problem := low_rank_problem(head):
        return problem
    if getattr(model, "_loss_function", None) is not None:
        return "the model's loss_function was replaced by one of your own"
    # Transformers selects the function by the model's `loss_type`, from a mapping to which functions can be added.
    computed = getattr(type(model), protocol.LOSS_FUNCTION, None)
    if computed is not None and model.loss_function is not getattr(loss_utils, computed):
        return f"the model's loss_function is another than Transformers' {computed}"
    return None


@contextlib.contextmanager
def loss_only(model: Any) -> Iterator[None]:
    """Context in which `model` computes only the loss in evaluation, and no logits, as in training.

    Otherwise a model in eval mode without gradients also returns logits, as in Transformers, which take memory for
    tokens x vocabulary.
    """
    models = [slot.module for slot in walk_slots(model) if slot.op_name == "cross_entropy_loss"]
    for module in models:
        protocol.loss_only.set(module, True)
    try:
        yield
    finally:
        for module in models:
            protocol.loss_only.set(module, False)
