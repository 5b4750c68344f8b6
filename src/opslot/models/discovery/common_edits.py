"""Edits that every generated module gets beside its slots, so that Transformers treats its classes as its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from opslot.models.discovery.sequences import calls_to_give_positions, methods_that_pad
from opslot.patchgen import PatchConfig
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.upstream import find_nodes
from opslot.slots.protocol import UPSTREAM_GLOBALS

# Heads that Transformers' `Generic<head>` mixins implement.
_GENERIC_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def add_common_edits(patch: PatchConfig, module: ModuleView) -> None:
    """Add to a patch what every generated module needs."""
    # Generated classes outside Transformers derive from the originals, from which they have the rest.
    whole = module.upstream.own is None
    if whole:
        _hold_generated_backbones(patch, module)
        _define_globals(patch, module)
    _separate_documents(patch, module)
    _select_frequencies_per_document(patch, module)
    if not whole:
        return
    _record_outputs(patch)
    for name in module.models:
        _convert_checkpoints(patch, name)


def _hold_generated_backbones(patch: PatchConfig, module: ModuleView) -> None:
    """Let a generic head that is constructed directly hold the generated backbone; AutoModel builds the original."""
    for name in module.classes:
        head = next((head for head in _GENERIC_HEADS if name.endswith(head)), None)
        if head is None or f"Generic{head}" not in module.bases(name) or module.own_methods(name):
            continue
        backbone = f"{name.removesuffix(head)}Model"
        if backbone in module.classes:
            patch.inherit_method(f"{name}.__init__", "transformers.modeling_layers", f"Generic{head}.__init__")
            patch.replace(f"{name}.__init__", "AutoModel.from_config(config)", f"{backbone}(config)")


def _define_globals(patch: PatchConfig, module: ModuleView) -> None:
    """Define the globals that only constructors in Transformers' module assign, which an instance moved here never ran.

    Before 5.15, Mamba's constructors assign the functions of mamba_ssm, and whether there are any. `apply` copies the
    values that Transformers' module has.
    """
    declared = {name for node in find_nodes(ast.Global, module.tree) for name in node.names}
    names = sorted(declared - {node.id for top in module.tree.body for node in _assigned(top)})
    if names:
        patch.add_final_block(
            f"""
            {UPSTREAM_GLOBALS} = {names!r}
            for _name in {UPSTREAM_GLOBALS}:
                globals().setdefault(_name, None)
            """
        )


def _separate_documents(patch: PatchConfig, module: ModuleView) -> None:
    """Let masks separate packed documents where upstream makes them without position_ids.

    They are made with the padding mask that the method got, not with one of ones that it made.
    """
    pads = methods_that_pad(module)
    for method, calls in calls_to_give_positions(module).items():
        made = pads.get(method, "")
        for text, count in calls.items():
            given = text.replace(f"attention_mask={made})", "attention_mask=_opslot_padding)") if made else text
            given = given.replace(f"attention_mask={made},", "attention_mask=_opslot_padding,") if made else given
            patch.replace(method, text, f"{given.removesuffix(')')}, position_ids=position_ids)", count=count)
        if made:
            patch.insert_before(method, _first_statement(module, method), f"_opslot_padding = {made}")


def _first_statement(module: ModuleView, method: str) -> str:
    """Source text of a method's first statement after its docstring."""
    definition = module.function(method)
    return ast.unparse(definition.body[1 if ast.get_docstring(definition) else 0])


def _select_frequencies_per_document(patch: PatchConfig, module: ModuleView) -> None:
    """Let frequencies that depend on a length depend on that of each document, not of the longest one in a batch."""
    for _, forward in module.methods():
        if "dynamic_rope_update" in map(ast.unparse, module.function(forward).decorator_list):
            patch.decorate(forward, "opslot.ops.rotary_pos_emb.by_length", "per_document")


def _assigned(statement: ast.stmt) -> Iterator[ast.Name]:
    """The names that a statement of a module assigns, outside of functions and classes."""
    if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield from (node for node in find_nodes(ast.Name, statement) if isinstance(node.ctx, ast.Store))


def _record_outputs(patch: PatchConfig) -> None:
    """Let Transformers capture router logits and hidden states of instances that never ran `__init__` of their class.

    Transformers registers in `__init__` what a class can record. An instance moved here from its class, or one
    unpickled in another process, would silently record nothing, and its load-balancing loss would be zero.
    """
    patch.add_import("transformers.utils.output_capturing", names=["_CAN_RECORD_REGISTRY"])
    patch.add_final_block(
        """
        # Keys are the classes' names, as upstream writes them for the first instance.
        for _model_class in [value for value in globals().values() if isinstance(value, type)]:
            if issubclass(_model_class, PreTrainedModel) and _model_class.__module__ == __name__:
                dict.__setitem__(_CAN_RECORD_REGISTRY, str(_model_class), _model_class._can_record_outputs)
        """
    )
    patch.depends_on("transformers.utils.output_capturing", "install_all_output_capturing_hooks")


def _convert_checkpoints(patch: PatchConfig, name: str) -> None:
    """Let Transformers convert checkpoints for the generated classes as it does for its own.

    Newer releases convert nothing for classes outside Transformers: `from_pretrained` would draw experts at random
    where the checkpoint has a tensor for each, and `save_pretrained` would write them in another layout than the hub's.
    """
    patch.add_final_block(
        f"""
        # A subclass in another module stays custom code, as a subclass of Transformers' class is.
        {name}.is_custom_code = classmethod(lambda cls: cls.__module__ != __name__)
        """
    )
