"""A kernel in a slot, and the declaration of slots in classes written by hand.

Binding writes a `BoundKernel` into the instance's `__dict__`; reading it is an ordinary attribute lookup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from opslot._base.errors import KernelError
from opslot.slots.protocol import declare_slot, slot_attribute
from opslot.slots.registry import KERNEL_REGISTRY


class BoundKernel:
    """A kernel in a slot.

    Pickles as its name and loads again from the registry, so a model that was bound on another machine raises where
    the kernel is missing instead of running something else.

    Attributes:
        op_name, variant, name: which kernel.
        explicit: the user named it, so what it cannot serve is an error and never a fallback.
        kernel: the callable, with the signature of the op's contract.
        path: FQN of the slot's module in the model that was bound.
    """

    def __init__(
        self, op_name: str, variant: str, name: str, explicit: bool, kernel: Callable[..., Any], path: str = ""
    ) -> None:
        self.op_name = op_name
        self.variant = variant
        self.name = name
        self.explicit = explicit
        self.kernel = kernel
        self.path = path
        self._can_serve = KERNEL_REGISTRY.op(op_name).can_serve

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel's result, also inside `grad` and `vjp` of torch.func.

        Raises:
            KernelError: inside another transform of torch.func.
        """
        try:
            return self.kernel(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            return self.in_transform(error, args, kwargs)

    def in_transform(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result where the kernel raised `error` because of a transform of torch.func; else raises `error`."""
        if isinstance(error, KernelError) or not _in_transform():
            raise error
        from opslot.slots.transforms import call_in_transform

        try:
            return call_in_transform(self.kernel, args, kwargs)
        except (RuntimeError, NotImplementedError) as problem:
            if isinstance(problem, KernelError):
                raise
            field = KERNEL_REGISTRY.op(self.op_name).field_of(self.variant)
            raise KernelError(
                f"{self.name}, a kernel of {self.op_name}, failed inside torch.func (vmap, jvp, ...) or forward-mode "
                "differentiation, which most kernels do not support",
                found=str(problem).partition("\n")[0],
                hint=f"set {field} to eager",
            ) from problem

    def as_function(self) -> Callable[..., Any]:
        """A function that calls this kernel, with the attributes of the kernel itself."""

        @functools.wraps(self.kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return call

    def can_serve(self, *modules: Any) -> bool:
        """Whether this kernel may run in place of a call of `modules`, as generated code checks; see `OpSpec`."""
        return self._can_serve is None or self._can_serve(self, *modules)

    def other_variant(self, variant: str) -> BoundKernel:
        """The kernel of the same name for another variant of the op.

        Raises:
            KernelError: it has none.
        """
        usable = [spec.name for spec in KERNEL_REGISTRY.specs(self.op_name, variant)]
        if self.name not in usable:
            raise KernelError(
                f"{self.op_name}_implementation={self.name!r} has no {variant}",
                hint=f"set {self.op_name}_implementation to auto, eager or one of {', '.join(usable)}",
            )
        return _load(self.op_name, variant, self.name, self.explicit, self.path)

    def __repr__(self) -> str:
        return f"<{self.op_name}/{self.variant}: {self.name}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundKernel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.op_name, self.variant, self.name, self.explicit, self.path)


def _in_transform() -> bool:
    # Discovery imports this file, and does not need torch.
    import torch
    from torch.autograd import forward_ad

    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _load(op_name: str, variant: str, name: str, explicit: bool, path: str = "") -> BoundKernel:
    return BoundKernel(op_name, variant, name, explicit, KERNEL_REGISTRY.load(op_name, variant, name), path)


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
        self._attribute = slot_attribute(name)
        declare_slot(owner, name, self.op_name, self.variant)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else instance.__dict__.get(self._attribute)

    def __repr__(self) -> str:
        return f"OpSlot({self.op_name!r}, {self.variant!r})"
