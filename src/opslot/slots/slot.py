"""A slot: the place in a module class where a kernel may stand, and what stands there once bound.

The protocol is two class attributes, so that generated modules need no import:
`_opslot_slots` maps a slot's name to (op, variant), and `_opslot_<name>` is None until an instance is bound.
Binding writes a `BoundKernel` into the instance's `__dict__`; reading it is an ordinary attribute lookup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from opslot._base.errors import KernelError
from opslot.slots.registry import KERNEL_REGISTRY

SLOTS_ATTRIBUTE = "_opslot_slots"
PREFIX = "_opslot_"
_LOSS_ONLY = "_opslot_loss_only"


class BoundKernel:
    """A kernel in a slot.

    Pickles as its name and loads again from the registry, so a model that was bound on another machine tells
    what is missing here instead of running something else.

    Attributes:
        op_name, variant, name: which kernel.
        explicit: a person named it, so what it cannot serve is an error and never a fallback.
        kernel: the callable, with the signature of the op's contract.
    """

    def __init__(self, op_name: str, variant: str, name: str, explicit: bool, kernel: Callable[..., Any]) -> None:
        self.op_name = op_name
        self.variant = variant
        self.name = name
        self.explicit = explicit
        self.kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.op_name}/{self.variant}: {self.name}>"

    def __copy__(self) -> BoundKernel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundKernel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebind, (self.op_name, self.variant, self.name, self.explicit)

    def serves_norm(self, norm: Any) -> bool:
        """Whether a fused residual sum and norm may stand for the sum and a call of `norm`.

        It may when `norm` is bound to the same kernel, or `auto` chose both, and nobody listens to its call.
        """
        bound = norm.__dict__.get(PREFIX + self.op_name)
        if bound is None or (bound.name != self.name and (bound.explicit or self.explicit)):
            return False
        return not ("forward" in norm.__dict__ or _has_hooks(norm))

    def serves_head(self, model: Any, head: Any) -> bool:
        """Whether a fused linear + loss kernel computes what `model`'s own head and loss would.

        It does when `head` is a bias-free nn.Linear with its own forward and the loss is upstream's. It makes no
        logits, which callers read in evaluation (in eval mode without gradients, outside `loss_only`): not then.

        Raises:
            KernelError: it does not compute the same, and the kernel was named explicitly.
        """
        if not (model.training or _grad_enabled() or model.__dict__.get(_LOSS_ONLY)):
            return False
        problem = _head_problem(model, head)
        if problem is None:
            return True
        if self.explicit:
            raise KernelError(
                f"cross_entropy_loss_implementation={self.name!r} cannot be used here: {problem}",
                hint="set cross_entropy_loss_implementation to eager or auto, or keep the head a plain nn.Linear",
            )
        return False


@contextlib.contextmanager
def loss_only(model: Any) -> Iterator[None]:
    """Within it, `model` evaluates for the loss alone: a fused loss makes no logits there, as in training.

    Without it, a model in eval mode and without gradients returns logits beside the loss as Transformers' does, which
    takes rows x vocabulary of memory.
    """
    models = [module for _, module, _, op_name, _ in walk_slots(model) if op_name == "cross_entropy_loss"]
    for module in models:
        module.__dict__[_LOSS_ONLY] = True
    try:
        yield
    finally:
        for module in models:
            module.__dict__.pop(_LOSS_ONLY, None)


def _grad_enabled() -> bool:
    import torch

    return torch.is_grad_enabled()


def _rebind(op_name: str, variant: str, name: str, explicit: bool) -> BoundKernel:
    return BoundKernel(op_name, variant, name, explicit, KERNEL_REGISTRY.load(op_name, variant, name))


def _has_hooks(module: Any) -> bool:
    """Whether a call of `module` runs more than its forward."""
    from torch.nn.modules import module as base

    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or base._global_forward_hooks
        or base._global_forward_pre_hooks
        or base._global_backward_hooks
        or base._global_backward_pre_hooks
    )


def _head_problem(model: Any, head: Any) -> str | None:
    from torch import nn

    if type(head).forward is not nn.Linear.forward or "forward" in head.__dict__:
        return f"the output head is a {type(head).__name__}, whose forward is more than a product with its weight"
    if head.bias is not None:
        return "the output head has a bias"
    if getattr(model, "_loss_function", None) is not None:
        return "the model's loss_function was replaced by one of your own"
    return None


class OpSlot:
    """Declares a slot in a module class written by hand.

    Example:
        class Norm(nn.Module):
            rms_norm = OpSlot("rms_norm", "standard")

            def forward(self, x):
                if self.rms_norm is not None:
                    return self.rms_norm(x, self.weight, self.eps)
                ...

    `self.rms_norm` is None until `opslot.bind` binds the instance to a kernel other than eager.
    """

    def __init__(self, op_name: str, variant: str = "standard") -> None:
        self.op_name = op_name
        self.variant = variant
        self._attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = PREFIX + name
        declared = {**getattr(owner, SLOTS_ATTRIBUTE, {}), name: (self.op_name, self.variant)}
        setattr(owner, SLOTS_ATTRIBUTE, declared)
        setattr(owner, self._attribute, None)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return instance.__dict__.get(self._attribute)

    def __repr__(self) -> str:
        return f"OpSlot({self.op_name!r}, {self.variant!r})"


def declared_slots(module: Any) -> dict[str, tuple[str, str]]:
    """Slots of a module's class: name -> (op, variant)."""
    return getattr(type(module), SLOTS_ATTRIBUTE, {})


def walk_slots(model: Any) -> Iterator[tuple[str, Any, str, str, str]]:
    """Every slot of a model as (module path, module, slot name, op, variant)."""
    for path, module in model.named_modules():
        for name, (op_name, variant) in declared_slots(module).items():
            yield path, module, name, op_name, variant
