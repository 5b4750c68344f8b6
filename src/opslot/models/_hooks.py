"""The forward hooks that `apply` adds and `restore` removes: functions and callables of `opslot.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opslot._base.errors import ConfigError
from opslot.slots.bind import config_holders


def add_pre_hook(module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> None:
    """Register a forward pre-hook that gets keyword arguments, unless the module has it."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def require_log_probs(model: nn.Module) -> None:
    """Let models whose forward ignores `return_log_probs`, such as encoders and classifiers, raise for it."""
    for holder in [*config_holders(model)] or [model]:
        if _check_log_probs not in holder._forward_hooks.values():
            holder.register_forward_hook(_check_log_probs, with_kwargs=True)


def _check_log_probs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if kwargs.get("return_log_probs") and getattr(output, "log_probs", None) is None:
        raise ConfigError(
            f"{type(module).__name__} cannot return log_probs",
            found="its forward ignores return_log_probs",
            hint="compute them from its logits",
        )


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks from all modules of `model`, which may be a copy of the one that they were added to."""
    for module in model.modules():
        hooks = {**module._forward_pre_hooks, **module._forward_hooks}
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("opslot.models.")]:
            for name in ("pre_hooks", "pre_hooks_with_kwargs", "hooks", "hooks_with_kwargs", "hooks_always_called"):
                getattr(module, f"_forward_{name}").pop(key, None)
