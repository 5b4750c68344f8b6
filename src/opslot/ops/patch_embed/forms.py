"""Transformers code that patch_embed replaces: calls of convolutions whose stride is their kernel size.

Does not import torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView
from opslot.patchgen.upstream import nodes_below

_SLOT = Slot("patch_embed", "standard")
_ARGUMENTS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias")
_ALLOWED = {"in_channels", "out_channels", "kernel_size", "stride", "padding", "bias"}


def find_patch_convolutions(module: ModuleView) -> Iterator[Match]:
    """Calls of an attribute that the constructor sets to nn.Conv1d, 2d or 3d, with the same kernel size and stride."""
    for name, constructor in module.methods("__init__"):
        embeds = _patch_convolutions(module.function(constructor))
        calls = {
            (method, attribute): len(found)
            for method in module.own_methods(name)
            for attribute in embeds
            if (found := module.calls(f"{name}.{method}", f"self.{attribute}"))
            and all(len(call.args) == 1 and not call.keywords for call in found)
        }
        if calls:
            yield Match(name, _SLOT.op, _SLOT.variant, partial(_write, name, calls))


def _write(name: str, calls: dict[tuple[str, str], int], patch: PatchConfig) -> None:
    """Route calls of class `name` through the slot; `calls` counts them by method and attribute."""
    kernel = f"self.{_SLOT.attribute}"
    for (method, attribute), count in calls.items():
        conv = f"self.{attribute}"
        patch.replace(
            f"{name}.{method}",
            f"{conv}($x)",
            f"({kernel}($x, {conv}.weight, {conv}.bias)"
            f" if {kernel} is not None and {kernel}.can_serve({conv}) else $match)",
            count=count,
            slot=_SLOT,
        )


def _patch_convolutions(init: ast.AST) -> list[str]:
    """Attributes that a constructor sets to a convolution with stride = kernel size, without padding."""
    found = []
    for node in nodes_below(init):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(ast.Name(id="self"), attribute)],
                value=ast.Call(ast.Attribute(ast.Name(id="nn"), "Conv1d" | "Conv2d" | "Conv3d")) as call,
            ) if _embeds_patches(call):
                found.append(attribute)
    return found


def _embeds_patches(call: ast.Call) -> bool:
    if len(call.args) > len(_ARGUMENTS) or any(keyword.arg is None for keyword in call.keywords):
        return False
    given = {name: ast.unparse(value) for name, value in zip(_ARGUMENTS, call.args, strict=False)}
    given |= {str(keyword.arg): ast.unparse(keyword.value) for keyword in call.keywords}
    size, padding = given.get("kernel_size"), given.get("padding", "0")
    return (
        size not in (None, "1")
        and size == given.get("stride")
        and padding in ("0", "'valid'")
        and given.keys() <= _ALLOWED
    )


FORMS = (find_patch_convolutions,)
