"""Forwards that were replaced on an instance or its class after its slots were bound, mostly by other libraries.

TRL's trainers compute losses from the weight of the head in such a forward, Liger-Kernel sets its own on each norm and
MLP, and Accelerate sets one that calls the original under autocast. Only a call shows whether a slot is still read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from opslot._base.logging import get_logger
from opslot.slots.protocol import ModuleSlot, bound_kernel, replaced_forward, set_kernel, walk_slots
from opslot.slots.registry import KERNEL_REGISTRY
from opslot.slots.replaced_methods import replaced_on_generated
from opslot.slots.slot import BoundKernel

logger = get_logger(__name__)


def replaced_by(module: Any) -> str:
    """The function that the forward of an instance, or of its generated class, was replaced by, e.g.
    "trl.trainer.utils.add_fused_lm_head"; "" if none.

    `functools.wraps` gives it the name of the function that it replaces, so the name is that in its code.
    """
    forward = _replacement(module)
    if forward is None:
        return ""
    if isinstance(forward, functools.partial):
        # That of Accelerate's hooks.
        forward = forward.func
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    return f"{function.__globals__.get('__name__', '?')}.{code.co_qualname.partition('.<locals>')[0]}"


def _replacement(module: Any) -> Any:
    on_instance = module.__dict__.get("forward")
    return on_instance if on_instance is not None else replaced_on_generated(type(module), "forward")


def replaced_since_binding(model: Any) -> dict[str, str]:
    """By the path of each module with slots whose forward was replaced since they were bound, what replaced it."""
    return {
        at.path: found
        for at in walk_slots(model)
        if replaced_forward(at.module) is None and (found := replaced_by(at.module))
    }


class _Watching(BoundKernel):
    """A named kernel in a slot whose module's forward was replaced, which notes whether a call of the model calls it.

    Attributes:
        at: the slot.
        watched: the kernel that is in the slot at other times.
    """

    def __init__(self, at: ModuleSlot, kernel: BoundKernel) -> None:
        super().__init__(kernel.op_name, kernel.variant, kernel.name, kernel.explicit, kernel.kernel, kernel.path)
        self.at, self.watched = at, kernel
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return super().__call__(*args, **kwargs)

    def other_variant(self, variant: str) -> BoundKernel:
        self.called = True
        return super().other_variant(variant)


def watch_named_kernels(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Log, after the call of `model` that begins now, each named kernel that a replaced forward did not call.

    Args:
        arguments: those of the call.

    Returns:
        Whether no later call has to be watched.
    """
    found = []
    for at in walk_slots(model):
        kernel = bound_kernel(at.module, at.name)
        if _replacement(at.module) is None or type(kernel) is not BoundKernel or not kernel.explicit:
            continue
        is_called = KERNEL_REGISTRY.op(kernel.op_name).is_called
        if is_called is not None and not is_called(arguments):
            return False
        found.append(_Watching(at, kernel))
    if not found:
        return True
    for kernel in found:
        set_kernel(kernel.at.module, kernel.at.name, kernel)

    def report(model: Any, args: Any, output: Any) -> None:
        hook.remove()
        for kernel in found:
            set_kernel(kernel.at.module, kernel.at.name, kernel.watched)
        # A call that failed has no output.
        if output is not None:
            # A kernel that computes two ops runs instead of that of one, in another slot of the same op.
            called = {(kernel.at.path, kernel.op_name) for kernel in found if kernel.called}
            _log([kernel for kernel in found if (kernel.at.path, kernel.op_name) not in called])

    hook = model.register_forward_hook(report, always_call=True)
    return True


def _log(unused: list[_Watching]) -> None:
    groups = Counter((x.name, x.op_name, type(x.at.module).__name__, replaced_by(x.at.module)) for x in unused)
    for (name, op_name, owner, by), count in groups.items():
        logger.warning(
            "%s, the named kernel of %s, does not run in %s%s: %s replaced its forward after opslot bound it, and does "
            "not call the original; hint: leave out one of the two",
            name,
            op_name,
            owner,
            f" x{count}" if count > 1 else "",
            by,
        )
