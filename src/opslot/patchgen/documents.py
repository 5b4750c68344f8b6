"""Slots on calls that upstream makes without the boundaries of packed documents. Text only, as all of patchgen."""

from __future__ import annotations

import ast

from opslot.patchgen.config import PatchConfig
from opslot.patchgen.forms import ModuleView

_CU_SEQLENS = '''
def _opslot_cu_seqlens(kwargs):
    """Boundaries of packed documents in a forward's keyword arguments, over the flattened tokens; None without."""
    cu_seqlens, seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if cu_seqlens is not None or seq_idx is None:
        return cu_seqlens
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx.diff(dim=1) != 0
    return nn.functional.pad(starts.flatten().nonzero().flatten(), (0, 1), value=seq_idx.numel()).to(torch.int32)
'''


def bound_arguments(call: ast.Call, parameters: tuple[str, ...], ignored: tuple[str, ...]) -> dict[str, str] | None:
    """The source text of a call's arguments by parameter, without `ignored` ones and `**kwargs`.

    None if the call has others, or the first of `parameters` is missing.
    """
    if len(call.args) > len(parameters) or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg not in (None, *ignored)}
    if not set(named) <= set(parameters[len(call.args) :]):
        return None
    found = dict(zip(parameters, call.args, strict=False)) | {str(name): value for name, value in named.items()}
    return {name: ast.unparse(value) for name, value in found.items()} if parameters[0] in found else None


def documents_of(module: ModuleView, method: str, call: ast.Call) -> str:
    """Source text of the boundaries of packed documents at a call, "None" where they do not reach the method."""
    definition = module.upstream.find(method)
    assert isinstance(definition, ast.FunctionDef)
    if definition.args.kwarg is not None:
        return f"_opslot_cu_seqlens({definition.args.kwarg.arg})"
    passed = next((keyword.value for keyword in call.keywords if keyword.arg == "seq_idx"), None)
    return "None" if passed is None else f'_opslot_cu_seqlens({{"seq_idx": {ast.unparse(passed)}}})'


def add_helpers(patch: PatchConfig, *texts: str) -> None:
    """Add functions to the generated module, each once."""
    for text in (_CU_SEQLENS, *texts):
        if text.strip("\n") not in (helper.strip("\n") for helper in patch.helpers):
            patch.add_helper(text.strip("\n") + "\n")


def undecorated(module: ModuleView, patch: PatchConfig, function: str) -> str:
    """The name of upstream's function without decorators, which may replace it by another package's."""
    definition = module.upstream.find(function)
    assert isinstance(definition, ast.FunctionDef)
    if not definition.decorator_list:
        return function
    name = f"_opslot_{function}"
    patch.copy_undecorated(function, name)
    return name
