"""The attributes that generated modules and bound models have for opslot.

Every name that begins with `_opslot_` is defined here (and in the text that `opslot.patchgen` writes). On a class:

- `_opslot_slots`: slot name -> (op, variant); `_opslot_<slot>` is None, so that an unbound slot reads as None.
- `_opslot_skipped`: (op, symbol, reason) of each part that an op might compute and that got no slot.
- `_opslot_attention_options`: of an attention class, its variant, and option -> the attribute that holds it.
- `_opslot_cu_seqlens_for_flash`: whether the class gives cu_seqlens only to FlashAttention.
- `_opslot_masks_of`: the implementation of attention whose masks the class reads, whichever is selected.
- `_opslot_computes_attention`: whether an attention class computes it itself, without Transformers' interface.
- `_opslot_reads_padding`: where the class reads hidden states that may be padding's: "first" position, or "all".
- `_opslot_keeps_sequences`: why tokens may see each other elsewhere than in causal attention.
- `_opslot_unknown_layers`: why the layers of a model were not searched for that, and may do so too.
- `_opslot_by_document`: an instance runs once for each document where a module in it keeps sequences unsplit, or where
  no kernel serves its attention.
- `_opslot_on_global_sequences`: whether an instance that mixes tokens may run on the tokens of all ranks.
- `_opslot_takes_earlier_tokens`: the arguments of a class that may also have tokens before those of position_ids.
- `_opslot_masks_without_positions`: why Transformers' own attention would let packed documents see each other.
- `_opslot_activation`: the name of the activation of a gated MLP that calls a function and holds no module for it.
- `_opslot_loss_function`: the name of Transformers' function that computes the loss of the class.
- `_opslot_adopt`: method that `apply` calls on an instance of another class that it moved to this one.
- `_opslot_derived_from`: of a class that `apply` made for instances of a user's class, that class.
- `_opslot_sub_model`: of a model that holds the model that trains, `SubModel` as a dict.

On a generated module `_opslot_lost_slots`: which expected slots it lacks in this release of Transformers;
`_opslot_upstream_globals`: the globals that only constructors of the original assign; and, from the first `apply` on,
`_opslot_upstream`: the module of Transformers that it was generated from. On that of a module outside Transformers
`_opslot_original`, that module; `_opslot_source`, the hash of what was read of it; and `_opslot_classes`, its changed
classes by name.

On an instance, in its `__dict__` alone, so that state_dict and parameters do not include it: the kernel in
`_opslot_<slot>`, its wrappers, what undoes a binding, and the `AttributeOfInstance`s below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

PREFIX = "_opslot_"
# Of the names of attention in `AttentionInterface` that kernels have.
ATTENTION_PREFIX = "opslot_"
SLOTS = PREFIX + "slots"
SKIPPED = PREFIX + "skipped"
KEEPS_SEQUENCES = PREFIX + "keeps_sequences"
UNKNOWN_LAYERS = PREFIX + "unknown_layers"
BY_DOCUMENT = PREFIX + "by_document"
ON_GLOBAL_SEQUENCES = PREFIX + "on_global_sequences"
TAKES_EARLIER_TOKENS = PREFIX + "takes_earlier_tokens"
MASKS_WITHOUT_POSITIONS = PREFIX + "masks_without_positions"
ATTENTION_OPTIONS = PREFIX + "attention_options"
CU_SEQLENS_FOR_FLASH = PREFIX + "cu_seqlens_for_flash"
MASKS_OF = PREFIX + "masks_of"
COMPUTES_ATTENTION = PREFIX + "computes_attention"
READS_PADDING = PREFIX + "reads_padding"
ACTIVATION = PREFIX + "activation"
LOSS_FUNCTION = PREFIX + "loss_function"
FIRST_PADDING, ALL_PADDING = "first", "all"
LOST_SLOTS = PREFIX + "lost_slots"
UPSTREAM_GLOBALS = PREFIX + "upstream_globals"
_ORIGINAL = PREFIX + "original"
_SOURCE = PREFIX + "source"
_UPSTREAM = PREFIX + "upstream"
_CLASSES = PREFIX + "classes"
ADOPT = PREFIX + "adopt"
SUB_MODEL = PREFIX + "sub_model"
DERIVED_FROM = PREFIX + "derived_from"


class Skipped(NamedTuple):
    """A part of an architecture that an op might compute and that got no slot.

    Attributes:
        op: "rms_norm", or "rms_norm/gated" where the variant is known.
        symbol: the class, method or function in Transformers' module.
        reason: why it keeps Transformers' implementation.
    """

    op: str
    symbol: str
    reason: str


class SubModel(NamedTuple):
    """The part of a model that trains, where the other parts are not built.

    Attributes:
        name: the attribute that holds it, such as "thinker".
        config: the attribute of the model's config that holds its config.
        excluded: attributes of the parts that are not built; their weights are skipped.
        settings: values of the model's config without these parts.
        files: files of a checkpoint that only the other parts read.
    """

    name: str
    config: str
    excluded: tuple[str, ...]
    settings: dict[str, Any]
    files: tuple[str, ...] = ()


class ModuleSlot(NamedTuple):
    """A slot of one module of a model; `path` is the module's name in the model."""

    path: str
    module: Any
    name: str
    op_name: str
    variant: str


def slot_attribute(slot: str) -> str:
    """The attribute that holds the kernel of a slot."""
    return PREFIX + slot


def declare_slot(cls: type, slot: str, op_name: str, variant: str) -> None:
    """Add a slot to a class."""
    setattr(cls, SLOTS, {**getattr(cls, SLOTS, {}), slot: (op_name, variant)})
    setattr(cls, slot_attribute(slot), None)


def declared_slots(module: Any) -> dict[str, tuple[str, str]]:
    """Slots of a module's class: name -> (op, variant)."""
    return getattr(type(module), SLOTS, {})


def walk_slots(model: Any) -> Iterator[ModuleSlot]:
    """Every slot of a model."""
    for path, module in model.named_modules():
        for name, (op_name, variant) in declared_slots(module).items():
            yield ModuleSlot(path, module, name, op_name, variant)


def skipped_parts(cls: type) -> tuple[Skipped, ...]:
    """The skipped parts of a class and of those that it derives from, its own first."""
    found: dict[Skipped, None] = {}
    for base in cls.__mro__:
        found |= dict.fromkeys(Skipped(*part) for part in base.__dict__.get(SKIPPED, ()))
    return tuple(found)


def skip_reason(module: Any, op_name: str) -> str | None:
    """Why discovery skipped that op in the class of `module`; None where it did not."""
    return next((part.reason for part in skipped_parts(type(module)) if part.op.split("/")[0] == op_name), None)


def attention_skip(module: Any) -> str | None:
    """Why attention that calls Transformers' interface has no kernel; None for other classes and where it may have one.

    An implementation that is selected for a model does not reach classes that compute attention themselves.
    """
    return None if computes_attention(module) else skip_reason(module, "attention")


def is_own_attention(implementation: Any) -> bool:
    """Whether a value of `_attn_implementation` names a kernel of opslot."""
    return str(implementation).startswith(ATTENTION_PREFIX)


def reads_padding(model: Any) -> str | None:
    """Where the modules of a model read hidden states that may be padding's: FIRST_PADDING, ALL_PADDING or None.

    Not those of models of another config in it, such as an image encoder, which have attention of their own.
    """
    config = type(model.config)
    return _padding_read(model, lambda part: type(part.__dict__.get("config", model.config)) is config)


def padding_read_around(root: Any, model: Any) -> str | None:
    """As `reads_padding`, where the modules of `root` outside of a model in it read that model's hidden states.

    Not those of the other Transformers models in `root`.
    """
    names = next(name for name, module in root.named_modules() if module is model).split(".")
    around = {id(root.get_submodule(".".join(names[:depth]))) for depth in range(len(names))}
    return _padding_read(
        root, lambda part: part is not model and (id(part) in around or part.__dict__.get("config") is None)
    )


def _padding_read(root: Any, is_searched: Callable[[Any], bool]) -> str | None:
    found, modules = set(), [root]
    while modules:
        module = modules.pop()
        found.add(getattr(type(module), READS_PADDING, None))
        modules.extend(filter(is_searched, module.children()))
    return most_padding(found)


def most_padding(found: Collection[str | None]) -> str | None:
    """Where padding is read by modules of which each reads it there: ALL_PADDING, FIRST_PADDING or None."""
    return next((where for where in (ALL_PADDING, FIRST_PADDING) if where in found), None)


def original_of(cls: type) -> type | None:
    """The class of Transformers that a generated class stands for; None for another class, or without instances of
    it that `opslot.apply` moved."""
    upstream = getattr(sys.modules.get(cls.__module__), _UPSTREAM, None)
    return getattr(upstream, cls.__qualname__, None)


def copy_upstream_globals(original: str, generated: str) -> None:
    """Give a generated module the globals that its original has now, such as those that constructors assigned."""
    source, target = (vars(sys.modules[name]) if name in sys.modules else {} for name in (original, generated))
    target[_UPSTREAM] = sys.modules.get(original)
    target.update({name: source[name] for name in target.get(UPSTREAM_GLOBALS, ()) if name in source})


def changed_classes(generated: Any) -> dict[str, type]:
    """The classes of a generated module of code outside Transformers, each derived from the original of its name."""
    return getattr(generated, _CLASSES)


def is_generated_for(generated: Any, cls: type, digest: str) -> bool:
    """Whether such a module was generated for a class, from the source with that hash."""
    made = changed_classes(generated).get(cls.__qualname__)
    original = made.__bases__[0] if made is not None else getattr(getattr(generated, _ORIGINAL), cls.__qualname__, None)
    return getattr(generated, _SOURCE) == digest and original is cls


def derived_from(cls: type) -> Any:
    """The user's class that `cls` was made from, to have slots; None for other classes."""
    return getattr(cls, DERIVED_FROM, None)


def sub_model(cls: type) -> SubModel | None:
    """The sub-model of a class that trains; None for a model that trains as a whole."""
    found = getattr(cls, SUB_MODEL, None)
    return None if found is None else SubModel(**found)


def trained_model(model: Any) -> Any:
    """The sub-model of `model` that trains, or `model` itself."""
    found = sub_model(type(model))
    return model if found is None else getattr(model, found.name)


def keeps_sequences(model: Any, by_kernel: bool = False) -> str | None:
    """Why tokens of `model` may see each other elsewhere than in causal attention; None where they can't.

    Such a model takes no packed documents, and no parts of sequences. The model may be inside a wrapper.

    Args:
        by_kernel: attention gets the boundaries of documents, and modules that may run on the tokens of all ranks do;
            else only where a kernel is bound to it, and modules that run once for each document take packed ones.
    """
    alone = set() if by_kernel else {id(part) for _, outer in modules_by_document(model) for part in outer.modules()}
    alone |= {id(part) for part in indexers(model, by_kernel)}
    if by_kernel:
        whole = (x for x in model.modules() if runs_on_global_sequences(x) or takes_earlier_tokens(x))
        alone |= {id(part) for outer in whole for part in outer.modules()}
    for module in model.modules():
        reason = None if id(module) in alone else keeps_itself(module)
        if not by_kernel and not is_own_attention(getattr(module.__dict__.get("config"), "_attn_implementation", "")):
            reason = reason or masks_ignore_positions(module)
        if reason:
            return reason
    return None


def indexers(model: Any, by_kernel: bool = False) -> Iterator[Any]:
    """The modules in attention to the keys that an indexer selects. With a kernel it selects within documents; without
    one, attention runs once for each document where the indexer would not.

    Args:
        by_kernel: whether all attention has a kernel; else only where one is bound to it.
    """
    for module in model.modules():
        if (attention_options(module) or ("",))[0] != "indexed":
            continue
        if by_kernel or is_own_attention(module.config._attn_implementation):
            yield from (part for part in module.modules() if part is not module)


def keeps_itself(module: Any) -> str | None:
    """Why tokens may see each other in the code of a module's class."""
    return mixes_documents(module) or unknown_layers(module)


def modules_by_document(model: Any) -> Iterator[tuple[str, Any]]:
    """The outermost modules of a model, with their names in it, that run once for each packed document."""
    found: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in found) or why_by_document(module) is None:
            continue
        found.append(path)
        yield path, module


def why_by_document(module: Any) -> str | None:
    """Why a module runs once for each packed document; None for a module that takes all of them in one call."""
    if not getattr(type(module), BY_DOCUMENT, False):
        return None
    alone = {id(part) for part in indexers(module)}
    # A loop: torch.compile of torch 2.11 takes no generator that reads a variable of the function.
    for part in module.modules():
        if id(part) not in alone and (reason := keeps_itself(part)):
            return reason
    without_kernel = attention_skip(module)
    return None if without_kernel is None else f"{type(module).__name__} {without_kernel}"


def bound_kernel(module: Any, slot: str) -> Any:
    """What is in a slot of an instance: a kernel, or None where Transformers' implementation runs."""
    return module.__dict__.get(PREFIX + slot)


def _set(module: Any, attribute: str, value: Any) -> None:
    """Set an attribute of an instance; None removes it."""
    if value is None:
        module.__dict__.pop(attribute, None)
    else:
        module.__dict__[attribute] = value


def set_kernel(module: Any, slot: str, kernel: Any) -> None:
    """Put a kernel into a slot; None clears it."""
    _set(module, PREFIX + slot, kernel)


def wrappers_of(module: Any, slot: str) -> tuple[Any, ...]:
    """What is applied to any kernel in a slot (of a per-model op: under the op's name), innermost first."""
    return _wrappers(module).get(slot, ())


def set_wrappers(module: Any, slot: str, wrappers: tuple[Any, ...]) -> None:
    _wrappers.set(module, {name: held for name, held in {**_wrappers(module), slot: wrappers}.items() if held})


def is_wrapped(model: Any) -> bool:
    """Whether any slot of `model` has wrappers, which is so once it is parallelized."""
    return any(map(_wrappers, model.modules()))


class AttributeOfClass(Generic[T]):
    """An attribute of classes; a call returns that of a module's class, or the default."""

    def __init__(self, name: str, default: T) -> None:
        self._name = name
        self._default = default

    def __call__(self, module: Any) -> T:
        found = getattr(type(module), self._name, None)
        return self._default if found is None else found


# Whether a class computes attention itself, without Transformers' interface.
computes_attention = AttributeOfClass(COMPUTES_ATTENTION, False)
# The variant of an attention class, and option -> the module's attribute that holds it; None for other classes.
attention_options: AttributeOfClass[tuple[str, dict[str, str]] | None] = AttributeOfClass(ATTENTION_OPTIONS, None)
# Whether a module passes cu_seqlens only to FlashAttention, or to a kernel bound with them. For any other it makes a
# mask, or one call for each sequence.
cu_seqlens_for_flash = AttributeOfClass(CU_SEQLENS_FOR_FLASH, False)
# The implementation, "eager" or "sdpa", whose masks a module's own code reads; None where it takes those of any.
# Eager attention's are added to scores; those of sdpa are bools, and None where it is causal by itself.
masks_of: AttributeOfClass[str | None] = AttributeOfClass(MASKS_OF, None)
# Whether a module mixes tokens, and gets those of all ranks where these hold shards of sequences.
runs_on_global_sequences = AttributeOfClass(ON_GLOBAL_SEQUENCES, False)
# The arguments of a module that may also have tokens before those of position_ids, whose outputs it returns; empty for
# a module without. A rank that holds shards of sequences passes them the tokens of earlier ranks.
takes_earlier_tokens: AttributeOfClass[tuple[str, ...]] = AttributeOfClass(TAKES_EARLIER_TOKENS, ())
# Why documents of one sequence see each other in the code of a module's class, whatever its attention is.
mixes_documents: AttributeOfClass[str | None] = AttributeOfClass(KEEPS_SEQUENCES, None)
# Why masks of Transformers would let packed documents of a model see each other; None where positions do not.
masks_ignore_positions: AttributeOfClass[str | None] = AttributeOfClass(MASKS_WITHOUT_POSITIONS, None)
# Why it is unknown whether tokens see each other elsewhere than in the attention of a model's layers.
unknown_layers: AttributeOfClass[str | None] = AttributeOfClass(UNKNOWN_LAYERS, None)


class AttributeOfInstance(Generic[T]):
    """An attribute of instances; a call returns that of a module, or the default."""

    def __init__(self, name: str, default: T) -> None:
        self._name = PREFIX + name
        self._default = default

    def __call__(self, module: Any) -> T:
        return module.__dict__.get(self._name, self._default)

    def set(self, module: Any, value: T) -> None:
        """Set the attribute of a module; a false value removes it."""
        _set(module, self._name, value or None)


# What is applied to any kernel, by slot.
_wrappers: AttributeOfInstance[dict[str, tuple[Any, ...]]] = AttributeOfInstance("wrappers", {})
# What `write` left on the model that it was called with.
binding_state: AttributeOfInstance[Any] = AttributeOfInstance("binding", None)
# By op, what undoes the op's preparation of a module.
attached: AttributeOfInstance[dict[str, Any]] = AttributeOfInstance("attached", {})
# What `padding_read_around` found when a model was bound.
padding_read_outside: AttributeOfInstance[str | None] = AttributeOfInstance("padding_read_outside", None)
# Whether a module's Transformers config is a copy that no other model shares.
owns_config = AttributeOfInstance("owns_config", False)
# Why the slots of an instance are never read, where its forward was replaced before `opslot.apply`.
replaced_forward: AttributeOfInstance[str | None] = AttributeOfInstance("replaced_forward", None)
# Whether a model in evaluation computes its loss alone, without logits.
loss_only = AttributeOfInstance("loss_only", False)
# Whether the parameters of a module itself have adapters (LoRA).
is_adapted = AttributeOfInstance("adapted", False)
# By parameter of a module, how many of its last experts expert parallelism removed, since nothing reads them.
removed_experts: AttributeOfInstance[Mapping[str, int]] = AttributeOfInstance("removed_experts", {})
