"""Transformers code that attention replaces: classes that call its attention interface. Does not import torch.

Each class is matched by what it computes: its eager function, and the arguments of its call. The kernel is selected
for all classes that share a config, so one skipped class keeps the implementation of its sub-model.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from opslot.patchgen import PatchConfig, Slot, indexed_attention
from opslot.patchgen.forms import OTHER_STATES, ClassFact, Match, ModuleView, Reviewed, Skip
from opslot.patchgen.packed_documents import documents_reach, pass_documents_to
from opslot.patchgen.upstream import find_nodes
from opslot.slots.protocol import ATTENTION_OPTIONS, COMPUTES_ATTENTION

OP = "attention"
_PLAIN = "softmax(scale q k + mask) v"

# Eager functions that compute what the interface's other implementations do, up to rounding. `variant` is replaced by
# that of the class; `args` are the options that the function reads.
EAGER = {
    row.hash: row
    for row in (
        Reviewed("3a13cdc4bee1", "causal", f"{_PLAIN} over grouped heads", "169 architectures"),
        Reviewed("5ac7b22b0b39", "causal", "with the mask cut to the keys", "code for Transformers 4.48 to 4.57"),
        Reviewed("edb55e7d9a29", "causal", "with softcap", "gemma2, gemma3, gemma4, t5gemma", args="softcap"),
        Reviewed("7799c037ee39", "causal", "with sinks", "gpt_oss, deepseek_v4, hy_v4", args="s_aux"),
        Reviewed("ca53760136dc", "causal", "with sinks or None", "mimo_v2_flash", args="s_aux"),
        Reviewed("0b9571feb18f", "causal", "times sigmoid(lse - sink)", "granite_swa, granitemoe_swa", args="s_aux"),
        Reviewed("481378eb715d", "causal", "with sinks, in fp32", "flint", args="s_aux"),
        Reviewed("0bed41a99be9", "causal", "with sinks, fp32 softmax", "openai_privacy_filter", args="s_aux"),
        Reviewed("4030935c25dd", "causal", "softmax in the dtype of the scores", "llama4"),
        Reviewed("ba62ea5c133a", "causal", "without grouped heads", "gpt_neox, align, clap and 16 more"),
        Reviewed("6397c34dff35", "causal", "softmax in the dtype of the scores", "bert, bart and 75 more"),
        Reviewed(
            "b1bdcc45fc52", "causal", "without grouped heads, key transposed otherwise", "clip, siglip and 16 more"
        ),
        Reviewed("18d6063cb91c", "causal", "without grouped heads", "vit, deit and 9 more"),
        Reviewed("d189a4ebb46d", "causal", "softmax in the dtype of the scores", "blip_2, kosmos2 and 5 more"),
        Reviewed("2d05e887b63f", "causal", "softmax in the dtype of the scores", "gpt2, decision_transformer"),
        Reviewed("4d2acfefb393", "causal", "softmax in the dtype of the scores", "internvl, qianfan_ocr"),
        # Classes that pass a bias are skipped.
        Reviewed("d6b840f2a5aa", "causal", "with a bias or None", "pp_doclayout_v2 from 5.24"),
        Reviewed("44940f1bb796", "causal", "grouped heads where the module has them", "idefics2"),
        Reviewed("2ed27278a5e5", "causal", "with the default scale over grouped heads", "llama4's vision"),
        Reviewed("d75c170d6a11", "causal", "without a mask", "vjepa2"),
    )
}

# Transformers' functions whose masks opslot can read. The last is for recurrent layers.
_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
    "create_masks_for_generate",
    "create_recurrent_attention_mask",
}
# Arguments of the interface that kernels support or that do not change the result; None is `**kwargs`.
_ARGUMENTS = {
    "query",
    "key",
    "value",
    "attention_mask",
    "dropout",
    "scaling",
    "sliding_window",
    "softcap",
    "s_aux",
    "is_causal",
    # Of FlashAttention's backward; other kernels ignore it, as Transformers' do.
    "deterministic",
    "position_ids",
    "output_attentions",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    None,
}
# Options that the kernel reads from the module when it is bound.
_OPTIONS = ("sliding_window", "softcap", "s_aux", "dropout")
_SPARSE = {"indices", "block_indices"}
# Of attention that a class computes itself: matmuls of queries and keys, functions that compute all of it, and one way
# to read a mask.
_MATMULS = {"matmul", "bmm", "baddbmm", "einsum"}
_FUSED = {"scaled_dot_product_attention", "_flash_attention_forward", "multi_head_attention_forward"}
READS_BOOLS = "attention_mask.logical_not()"


# Before 5.20, Pixtral makes a mask of the images' lengths, and none where a FlashAttention of Transformers runs.
_BLOCK_MASK = "generate_block_attention_mask([p.shape[-2] * p.shape[-1] for p in patch_embeds_list], patch_embeds)"
_NO_MASK = "attention_mask = None"
_FLASH_REQUESTED = "is_flash_attention_requested(self.config)"
_IMAGE_BOUNDARIES = """
lengths = [p.shape[-2] * p.shape[-1] for p in patch_embeds_list]
cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(patch_embeds.device)
kwargs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
kwargs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
attention_mask = None
"""


def find_attention(module: ModuleView) -> Iterator[Match | Skip]:
    """Each class that calls Transformers' attention interface."""
    maker = _makes_masks_for_parts(module)
    if maker:
        # Its config has an implementation too, which decides how its masks look.
        yield Skip(maker, OP, "makes masks for parts with configs of their own")
    for name, forward in module.methods():
        # Those with a compressor are in compressed_forms.py.
        if "ALL_ATTENTION_FUNCTIONS" not in module.text(forward) or "self.compressor(" in module.text(forward):
            continue
        eager = _eager_function(module, forward)
        indexed = _indexed(module, name)
        variant = _variant(module, name) if indexed is None else indexed_attention.VARIANT
        reason = _unsupported(module, name, eager, variant)
        if not reason and maker:
            reason = f"gets masks that {maker} makes with another config"
        if reason:
            yield Skip(name, OP, reason)
        else:
            yield _match(module, name, forward, Slot(OP, variant), eager, indexed)


def _match(
    module: ModuleView,
    name: str,
    forward: str,
    slot: Slot,
    eager: str,
    indexed: indexed_attention.IndexedForm | None,
) -> Match:
    """The attention of class `name`; of its text, only calls that may be cross attention change."""
    options, cross = _options(module, forward), _cross_calls(module, forward)
    is_decoder = slot.variant == "causal" and bool(module.callers("create_causal_mask"))
    # They do not pass the boundaries of images.
    block_masks = [method for _, method in module.methods() if _NO_MASK in cu_seqlens_branches(module, method)]

    def write(patch: PatchConfig) -> None:
        if indexed is not None:
            indexed.write(patch, name)
        patch.slot_config([name], slot, depends=[eager])
        patch.set_attribute(name, ATTENTION_OPTIONS, (slot.variant, options))
        for method in block_masks:
            patch.replace(method, _NO_MASK, _IMAGE_BOUNDARIES)
        if is_decoder and module.keywords(forward) is not None and documents_reach(module, name):
            # Compiled code cannot read documents from the mask.
            pass_documents_to(module, patch, name)
        if cross is None:
            return
        condition, calls = cross
        for call, count in calls.items():
            marked = f"{call.removesuffix(')')}, **cross_attention_argument(self.config, {condition}))"
            patch.replace(forward, call, marked, count=count)
        patch.add_import("opslot.ops.attention.calls", ["cross_attention_argument"])

    return Match(name, OP, slot.variant, write)


def find_own_attention(module: ModuleView) -> Iterator[Skip | ClassFact]:
    """Classes that compute attention themselves: no kernel that is selected for a model reaches them."""
    for name in module.classes:
        if _computes_attention(module, name):
            yield ClassFact(name, COMPUTES_ATTENTION, True)
            yield Skip(name, OP, "computes attention itself, without Transformers' attention interface")


def _computes_attention(module: ModuleView, name: str) -> bool:
    """Whether an attention class calls softmax between two matmuls, or a function that does both."""
    text = module.text(name)
    if not re.search(r"Attention|Attn", name) or "ALL_ATTENTION_FUNCTIONS" in text or READS_BOOLS in text:
        return False
    definition = module.classes[name]
    called = [ast.unparse(call.func).rpartition(".")[2].lower() for call in find_nodes(ast.Call, definition)]
    operators = sum(isinstance(node.op, ast.MatMult) for node in find_nodes(ast.BinOp, definition))
    # Also modules that wrap them, such as self.matmul_qk.
    matmuls = operators + sum(function in _MATMULS or function.startswith("matmul_") for function in called)
    return not _FUSED.isdisjoint(called) or ("softmax" in called and matmuls > 1)


def is_sparse(module: ModuleView, forward: str) -> bool:
    """Whether a method attends to the keys that an indexer selects."""
    calls = module.calls(forward, "attention_interface")
    return bool({keyword.arg for call in calls for keyword in call.keywords} & _SPARSE)


def adds_given_masks(module: ModuleView) -> bool:
    """Whether a class's forward adds attention_mask to something where it is not None, whatever its dtype."""
    branches = find_nodes(ast.If, *(module.upstream.find(forward) for _, forward in module.methods()))
    given = (node.body for node in branches if ast.unparse(node.test) == "attention_mask is not None")
    return any(ast.unparse(statement).endswith(" + attention_mask") for body in given for statement in body)


def cu_seqlens_branches(module: ModuleView, forward: str) -> list[str]:
    """The text of each branch of a method that passes cu_seqlens to a FlashAttention of Transformers."""
    if "is_flash_attention_requested" not in module.text(forward):
        return []
    definition = module.upstream.find(forward)
    branches = (node for node in find_nodes(ast.If, definition) if ast.unparse(node.test) == _FLASH_REQUESTED)
    texts = ("\n".join(map(ast.unparse, node.body)) for node in branches)
    blocks = any(ast.unparse(call) == _BLOCK_MASK for call in find_nodes(ast.Call, definition))
    return [text for text in texts if "cu_seq_lens_q" in text or (blocks and text == _NO_MASK)]


def _has_cu_seqlens_for_mask(module: ModuleView) -> bool:
    """Whether a class passes cu_seqlens and no mask where a FlashAttention of Transformers runs."""
    texts = (text for _, forward in module.methods() for text in cu_seqlens_branches(module, forward))
    return any("attention_mask = None" in text for text in texts)


def _eager_function(module: ModuleView, forward: str) -> str:
    """The function that runs for attn_implementation="eager"."""
    names = re.findall(r"\b\w*eager\w*forward\b", module.text(forward))
    return names[0] if len(set(names)) == 1 else "eager_attention_forward"


def _variant(module: ModuleView, name: str) -> str:
    """ "bidirectional" for a class that is never causal; of another one, instances have an attribute for it."""
    calls = module.calls(f"{name}.forward", "attention_interface")
    given = [_argument(call, "is_causal") for call in calls]
    if calls and all(_is_false(value) for value in given):
        return "bidirectional"
    never = re.search(r"self\.is_causal = False\b", module.text(f"{name}.__init__"))
    return "bidirectional" if never else "causal"


def _indexed(module: ModuleView, name: str) -> indexed_attention.IndexedForm | None:
    """How a class attends to the keys that an indexer selects, by a form of it; None for other classes."""
    # After the forms of all ops are loaded: an import of its package would import torch.
    from opslot.ops.indexer_scores.forms import selects_keys

    return indexed_attention.form_of(module, name, selects_keys)


def _unsupported(module: ModuleView, name: str, eager: str, variant: str) -> str:
    """Why a class's attention can't be replaced, starting with a verb, or ""."""
    forward = f"{name}.forward"
    calls = module.calls(forward, "attention_interface")
    if not calls:
        return "does not call attention_interface(self, query, key, value, attention_mask, ...)"
    given = {keyword.arg for call in calls for keyword in call.keywords}
    indexed = variant == indexed_attention.VARIANT
    if indexed:
        given -= _SPARSE
    elif is_sparse(module, forward):
        leaks = "; with Transformers' sdpa it would see later tokens" if adds_given_masks(module) else ""
        return f"attends to the keys that an indexer selects (sparse attention{leaks})"
    if given - _ARGUMENTS:
        return f"passes {', '.join(sorted(map(str, given - _ARGUMENTS)))} to attention"
    row = EAGER.get(module.fingerprint(eager) or "")
    if row is None:
        return f"has an eager attention that is not reviewed ({eager})"
    unread = {"softcap", "s_aux"} & given - set(row.args.split())
    if unread:
        return f"passes {', '.join(sorted(unread))}, which its eager attention does not read"
    if OTHER_STATES & {*module.parameters(forward)} and _cross_calls(module, forward) is None:
        return "attends to other states than its own, in another way than cross attention"
    # Queries of other cross attention, such as that of images' query tokens, may be broadcast over the batch.
    given_by = _is_given if variant == "causal" else _is_unchanged
    if not indexed and any((text := mask_of(call)) and not given_by(module, forward, text) for call in calls):
        return "changes the attention mask"
    if variant == "causal" and "self.is_causal" not in module.text(f"{name}.__init__"):
        return "does not state whether it is causal"
    if variant == "causal" and _is_causal_by_mask(module, name):
        return "is causal by its mask alone: nothing that makes it passes is_causal"
    reader = _reads_masks_too(module)
    if reader:
        return f"gets masks that {reader} reads too"
    adder = _adds_to_masks(module)
    if adder:
        return f"gets masks that {adder} adds to"
    maker = next((name for name in module.classes if "ALL_MASK_ATTENTION_FUNCTIONS" in module.text(name)), None)
    if maker is not None:
        # Without a mask its layers with a window attend to all keys, as Transformers' sdpa does (DiffusionGemma).
        return f"gets masks that {maker} makes by the implementation's name"
    by_mask = any(mask_of(call) for call in calls) and not _has_cu_seqlens_for_mask(module)
    return other_masks(module, needed=variant != "bidirectional", by_mask=by_mask)


def _is_causal_by_mask(module: ModuleView, name: str) -> bool:
    """Whether instances state that they are not causal, while their model makes causal masks (PegasusX, NLLB-MoE).

    Kernels get no causal mask and read `is_causal` instead, so that tokens would see later ones.
    """
    constructor = module.upstream.find(f"{name}.__init__")
    if not isinstance(constructor, ast.FunctionDef) or not module.callers("create_causal_mask"):
        return False
    names = [argument.arg for argument in constructor.args.args]
    defaults = dict(zip(reversed(names), reversed(constructor.args.defaults), strict=False))
    if "is_causal" not in names or not _is_false(defaults.get("is_causal")):
        return False
    place = names.index("is_causal") - 1
    made = [call for call in find_nodes(ast.Call, module.tree) if ast.unparse(call.func) == name]
    given = (
        len(call.args) > place or any(keyword.arg in ("is_causal", None) for keyword in call.keywords) for call in made
    )
    return bool(made) and not any(given)


def _reads_masks_too(module: ModuleView) -> str:
    """A class beside attention that reads which tokens its masks hide, such as the convolution of LASR, or ""."""
    for name, forward in module.methods():
        text = module.text(forward)
        if "attention_interface" not in text and re.search(r"torch\.all\(~\(?attention_mask\b", text):
            return name
    return ""


def _adds_to_masks(module: ModuleView) -> str:
    """A class beside attention that adds to the masks it passes on, such as Beit's position bias, or ""."""
    for name, forward in module.methods():
        if "attention_interface" in module.text(forward):
            continue
        for node in find_nodes(ast.Assign, module.upstream.find(forward)):
            masks = {text for target in node.targets if (text := ast.unparse(target)).endswith("mask")}
            sums = [part for part in find_nodes(ast.BinOp, node.value) if isinstance(part.op, ast.Add)]
            if any(masks & {ast.unparse(part.left), ast.unparse(part.right)} for part in sums):
                return name
    return ""


def _cross_calls(module: ModuleView, forward: str) -> tuple[str, Counter[str]] | None:
    """The condition under which a method attends to the states in a parameter, and its calls; None if unknown."""
    definition = module.upstream.find(forward)
    given = sorted(OTHER_STATES & {*module.parameters(forward)})
    # The first concatenates keys of its own and other states; the second may not be given the other states.
    if len(given) != 1 or re.search(r"torch\.cat\(|self\.is_cross_attention", module.text(forward)):
        return None
    (states,) = given
    calls = Counter(map(ast.unparse, module.calls(forward, "attention_interface")))
    if not any(ast.unparse(node.left) == states for node in find_nodes(ast.Compare, definition)):
        return "True", calls
    return (f"{states} is not None", calls) if _is_unchanged(module, forward, states) else None


def mask_of(call: ast.Call) -> str:
    """The source text of a call's mask, or "" for none."""
    value = call.args[4] if len(call.args) > 4 else _argument(call, "attention_mask")
    return "" if value is None or (isinstance(value, ast.Constant) and value.value is None) else ast.unparse(value)


def _is_given(module: ModuleView, forward: str, mask: str) -> bool:
    """Whether a mask is a parameter of the method, or the other parameter that masks the states of cross attention."""
    if _is_unchanged(module, forward, mask):
        return True
    definition = module.upstream.find(forward)
    conditions = {f"{states} is not None" for states in OTHER_STATES}
    assigned = [*find_nodes(ast.Assign, definition)]
    conditions |= {ast.unparse(node.targets[0]) for node in assigned if ast.unparse(node.value) in conditions}
    branches = [node.body for node in find_nodes(ast.If, definition) if ast.unparse(node.test) in conditions]
    other = {ast.unparse(node) for body in branches for node in body}
    changes = [node for node in assigned if any(ast.unparse(target) == mask for target in node.targets)]
    stores = [n for n in find_nodes(ast.Name, definition) if n.id == mask and isinstance(n.ctx, ast.Store)]
    return (
        mask in module.parameters(forward)
        and len(stores) == len(changes)
        and all(
            ast.unparse(node) in other and _is_unchanged(module, forward, ast.unparse(node.value)) for node in changes
        )
    )


def _is_unchanged(module: ModuleView, forward: str, text: str) -> bool:
    """Whether an expression is a parameter of the method that the method does not assign."""
    names = find_nodes(ast.Name, module.upstream.find(forward))
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return text in module.parameters(forward) and text not in assigned


def _options(module: ModuleView, forward: str) -> dict[str, str]:
    """The attribute of the module that each option of its calls is read from."""
    found: dict[str, str] = {}
    for call in module.calls(forward, "attention_interface"):
        for option in _OPTIONS:
            value = _argument(call, option)
            if value is not None and not isinstance(value, ast.Constant):
                # Dropout is that of a module, `self.dropout.p if self.training else 0.0`, or a number.
                attribute = re.search(r"self\.(?!training\b)(?:config(?:\.|, ['\"]))?(\w+)", ast.unparse(value))
                found[option] = attribute.group(1) if attribute else option
    return found


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _makes_masks_for_parts(module: ModuleView) -> str:
    """The class that makes masks with its own config for parts that each have another one (BLT), or ""."""
    for method, calls in module.callers(*_MASKS, "mask_function").items():
        owner = method.partition(".")[0]
        constructor = module.upstream.find(f"{owner}.__init__")
        configs = {ast.unparse(keyword.value) for call in calls for keyword in call.keywords if keyword.arg == "config"}
        if "self.config" not in configs or constructor is None:
            continue
        made = [call for call in find_nodes(ast.Call, constructor) if call.args]
        given = {ast.unparse(call.args[0]) for call in made if ast.unparse(call.func) in module.classes}
        layers = [call for call in made if re.search(r"(Layer|Block|Attention)$", ast.unparse(call.func))]
        if not layers and sum(bool(re.fullmatch(r"(self\.)?config\.\w+_config", config)) for config in given) > 1:
            return owner
    return ""


def _assigns_masks(module: ModuleView) -> bool:
    """Whether a name for the mask of attention is assigned anything but None."""
    assigned = (node for node in find_nodes(ast.Assign, module.tree) if ast.unparse(node.value) != "None")
    return any(re.search(r"(attention|attn)_mask", ast.unparse(target)) for node in assigned for target in node.targets)


def other_masks(module: ModuleView, needed: bool = True, by_mask: bool = False) -> str:
    """Why the masks of a module can't be read, or "".

    Args:
        needed: attention is causal by its masks, so they have to be known.
        by_mask: it applies those that it gets. A module that makes none gets none, or a dense one from its caller.
    """
    makers = {name for name in module.names if re.fullmatch(r"create_\w*mask\w*", name)}
    own = {name for name in makers if module.text(name) or name not in _MASKS}
    if makers & _MASKS or not (needed or (by_mask and (makers or _assigns_masks(module)))):
        return ""
    return f"gets masks from {', '.join(sorted(own)) or 'no function of transformers.masking_utils'}"


FORMS = (find_attention, find_own_attention)
