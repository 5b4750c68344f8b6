"""The forward hooks that `apply` adds and `restore` removes: functions and callables of `opslot.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def add_pre_hook(module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> None:
    """Register a forward pre-hook that gets keyword arguments, unless the module has it."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks from all modules of `model`, which may be a copy of the one that they were added to."""
    for module in model.modules():
        hooks = {**module._forward_pre_hooks, **module._forward_hooks}
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("opslot.models.")]:
            for name in ("pre_hooks", "pre_hooks_with_kwargs", "hooks", "hooks_with_kwargs", "hooks_always_called"):
                getattr(module, f"_forward_{name}").pop(key, None)
