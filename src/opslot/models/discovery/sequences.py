"""Which models must not be packed or sharded along the sequence: tokens may mix elsewhere than in attention.

A decoder layer and what it consists of must act per token, except for its attention and for recurrences with slots that
take the boundaries of documents. Code is judged by the functions that it calls. Does not import torch.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache

from packaging.version import Version

from opslot.patchgen.forms import OTHER_STATES, ClassFact, ModuleView, names_in
from opslot.patchgen.upstream import find_nodes, nodes_below
from opslot.slots.protocol import KEEPS_SEQUENCES, MASKS_WITHOUT_POSITIONS, ON_GLOBAL_SEQUENCES, UNKNOWN_LAYERS

# Transformers' masks of tokens that see earlier tokens of their document.
_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
}
# The first release whose masks count chunks from the start of each document.
_CHUNKS = Version("5.23")
# Functions and methods that act per token on [..., tokens, channels], or on none. Sums are those of channels or
# experts, and indices those of experts.
_KINDS_PER_TOKEN = {
    "elementwise": (
        "abs add add_ clamp clamp_ cos dropout exp gelu greater log log1p logical_and logical_not logical_or "
        "logsigmoid masked_fill maximum mul multiply pow relu relu2 rsqrt sigmoid silu sin softplus sqrt square "
        "tanh where"
    ),
    "of channels or experts": "argmax layer_norm linear logsumexp max mean min norm softmax sort sum topk var",
    "of indices of experts": (
        "bincount gather histc index_add index_add_ index_select nonzero one_hot repeat_interleave scatter scatter_"
    ),
    "of shapes": (
        "chunk clone contiguous copy_ detach expand expand_as flatten permute repeat reshape split squeeze stack "
        "t transpose unbind unflatten unsqueeze view"
    ),
    "of dtypes": "bool float int long to type type_as",
    "of new tensors": (
        "empty empty_like exponential_ full_like new_empty new_zeros ones_like rand_like tensor uniform_ zeros "
        "zeros_like"
    ),
    "of autograd and modules": (
        "forward get_autocast_dtype is_autocast_enabled is_grad_enabled maybe_autocast no_grad save_for_backward"
    ),
    "of Transformers": "_cast _cast_if_autocast_enabled force_accelerate_hooks is_torch_greater_or_equal",
    "of Python": (
        "append dict enumerate finfo get getattr hasattr isinstance item len list numel range size super tuple zip"
    ),
}
_PER_TOKEN = frozenset(" ".join(_KINDS_PER_TOKEN.values()).split())
# With parameters they act per token, with other activations they may not.
_MATMULS = {"matmul", "bmm", "einsum", "mm", "baddbmm"}
_CONCATENATIONS = {"cat", "concat", "concatenate"}
# Methods that act per token although they call functions that may not, by fingerprint.
_REVIEWED: dict[str, str] = {
    "5f7476165cc4": "deepseek_v4: the residual streams of a token",
    "5a25b15ba663": "deepseek_v4: a linear layer for each group of heads",
    "29e7c076ef7c": "glm5_next: the residual streams of a token",
    "6a7a143ebd16": "glm5_next before 5.24",
    "73491a0814c3": "gemma3n: AltUp mixes the copies of a token",
    "efd7625dc435": "gemma3n: zeroes what is below a quantile of a token's channels",
    "12f4be591cf9": "ernie4_5_vl_moe: experts of text and of images",
    "5632453c85b1": "dbrx: an expert's MLP, with its weights as arguments",
    "817a0a3e1019": "dbrx before 5.17",
    "9c794733c86a": "jetmoe: tokens sorted by expert",
    "d7f3c4c77cc4": "jetmoe: the order of tokens by expert",
}
# Forwards of modules of few layers that mix tokens of [B, S, ...] and return such a tensor, by fingerprint.
_ON_GLOBAL_SEQUENCES = {"b0e6cf3fee9d": "qwen4_exp: embeddings of n-grams, and a convolution"}
# Methods that get no activations.
_SETUP = ("compute_default_rope_parameters",)
# Modules that act per token.
_MODULES = (
    {"Buffer", "Identity", "ModuleDict", "ModuleList", "Parameter", "ParameterList", "Sequential"}
    | {"Dropout", "Embedding", "LayerNorm", "Linear", "RMSNorm"}
    | {"GELU", "ReLU", "SiLU", "Sigmoid", "Tanh"}
)
# Classes of images and audio.
_ENCODERS = re.compile("(?i)vision|image|audio|qformer|perceiver|resampler")
# Classes of the features of images and audio, before they are placed between embeddings.
_PROJECTORS = re.compile("(?i)multimodal|projector|merger|connector")
# Ends of the expressions that mask scores.
_MASKED = (".masked_fill(~attention_mask, float('-inf'))", " + attention_mask")
# In an attention class, what mixes tokens outside of its call of the interface. Transformers' Conv1D is a linear layer.
_MIXES = re.compile(
    r"(?i)\b(?!(?-i:Conv1D)\b)(\w*conv\w*1d\w*|cumsum|roll|\w*scan\w*|rfft|fft|\w*delta_rule\w*|\w*short_conv\w*)\b"
)


def find_unsplit_sequences(module: ModuleView) -> Iterator[ClassFact]:
    """Classes that keep a model from being packed and sharded, with the reason."""
    layers = decoder_layers(module)
    for name in module.classes:
        if name.endswith("ForConditionalGeneration"):
            yield ClassFact(name, UNKNOWN_LAYERS, "its language model is not separate from its encoder")
        elif not layers and name in module.models:
            yield ClassFact(name, UNKNOWN_LAYERS, "it has no decoder layers")
        elif name in module.models and (reason := masks_without_positions(module)):
            # Without the interface no kernel is bound that would separate documents.
            bound = any("ALL_ATTENTION_FUNCTIONS" in module.text(cls) for cls in module.classes)
            own = not bound and any(_made_for_padding_only(module))
            yield ClassFact(name, KEEPS_SEQUENCES if own else MASKS_WITHOUT_POSITIONS, reason)
    parts = parts_of(module, layers)
    for name in parts:
        if reason := _mixes(module, name):
            yield ClassFact(name, KEEPS_SEQUENCES, f"{name} {reason}")
        if module.fingerprint(f"{name}.forward") in _ON_GLOBAL_SEQUENCES:
            yield ClassFact(name, ON_GLOBAL_SEQUENCES, True)
    yield from _mixing_around_layers(module, parts)
    for name in _counting_rows(module):
        yield ClassFact(name, KEEPS_SEQUENCES, f"{name} counts the positions of each row, and takes no position_ids")
    for name, forward in module.methods():
        if name.endswith("Embeddings") and _pads_shifted(module, forward):
            yield ClassFact(name, KEEPS_SEQUENCES, f"{name} concatenates the embeddings of neighboring tokens")
        if name not in parts and not _ENCODERS.search(name) and _attends_to_others(module, forward):
            yield ClassFact(name, KEEPS_SEQUENCES, f"{name} attends to other states than its own")


@lru_cache(maxsize=8)
def decoder_layers(module: ModuleView) -> list[str]:
    """Classes called DecoderLayer; in a module of language models without such classes, those called Block or Layer,
    else those with attention that a causal model has a list of."""
    layers = [name for name in module.classes if name.endswith("DecoderLayer")]
    if layers or "Vision" in " ".join(module.classes) or _sees_later_tokens(module):
        return layers
    layers = [
        name
        for name in module.classes
        if name.endswith(("Block", "Layer")) and "GradientCheckpointingLayer" in module.bases(name)
    ]
    return layers or (_listed_layers(module) if any(_calls_of(module, _MASKS)) else [])


def _listed_layers(module: ModuleView) -> list[str]:
    """Classes with attention that models of the module put in a ModuleList."""
    constructors = [module.upstream.find(f"{name}.__init__") for name in module.classes if module.is_model(name)]
    calls = find_nodes(ast.Call, *(node for node in constructors if node is not None))
    lists = [names_in(call) for call in calls if ast.unparse(call.func).endswith("ModuleList")]
    listed = [name for name in module.classes if any(name in names for names in lists)]
    return [
        name for name in listed if any("ALL_ATTENTION_FUNCTIONS" in module.text(x) for x in parts_of(module, [name]))
    ]


def _sees_later_tokens(module: ModuleView) -> bool:
    """Whether a model's own tokens may see later ones, by masks other than those of cross attention and causal ones."""
    calls = list(_calls_of(module, {"create_bidirectional_mask"}))
    own = [call for call in calls if all(keyword.arg != "encoder_hidden_states" for keyword in call.keywords)]
    causal = any(_calls_of(module, _MASKS)) and not _calls_without_positions(module)
    return bool(own or (calls and not causal))


def parts_of(module: ModuleView, names: Iterable[str]) -> list[str]:
    """Classes of the module that some classes or tables of classes consist of, and these classes."""
    tables = dict(module.tables)
    found: list[str] = []
    waiting = [*names]
    while waiting:
        name = waiting.pop(0)
        if name in tables:
            waiting += sorted(tables.pop(name))
        if name in module.classes and name not in found:
            found.append(name)
            waiting += sorted(names_in(module.classes[name]) | set(module.bases(name)))
    return found


def _mixes(module: ModuleView, name: str) -> str:
    """Why a class may mix tokens, starting with a verb, or ""."""
    methods = [m for m in module.classes[name].body if isinstance(m, ast.FunctionDef)]
    if "ALL_ATTENTION_FUNCTIONS" in module.text(name):
        found = _MIXES.search("".join(module.text(f"{name}.{method.name}") for method in methods))
        if found:
            return f"calls {found.group(1)} outside of attention"
        counts = any(_counts_positions(method) for method in methods)
        return "counts the positions of a whole row, not those of each document" if counts else ""
    for method in methods:
        if method.name == "__init__":
            unknown = _modules(method, module) - _MODULES - set(module.classes)
            if unknown:
                return f"has a {sorted(unknown)[0]}, which may mix tokens"
        elif not _acts_per_token(module, name, method) and (reason := _mixing_call(module, method, frozenset())):
            return reason
    return ""


def _mixing_around_layers(module: ModuleView, parts: Collection[str]) -> Iterator[ClassFact]:
    """What may mix tokens outside the layers of a model that is not in Transformers.

    In Transformers, packed documents are compared with the documents alone for each architecture.
    """
    if module.upstream.own is None:
        return
    own_masks = "ALL_ATTENTION_FUNCTIONS" in module.names and not _MASKS & module.names
    for name in module.models if own_masks else ():
        yield ClassFact(name, MASKS_WITHOUT_POSITIONS, "its masks are not those of transformers.masking_utils")
    for name in module.classes:
        if name in parts or not module.upstream.is_own(name) or _ENCODERS.search(name) or _PROJECTORS.search(name):
            continue
        known = module.is_model(name) or re.search("(?i)rotary|rope", name)
        reason = _mixes_in_model(module, name) if known else _mixes(module, name)
        if reason and "forward" in module.own_methods(name):
            yield ClassFact(name, KEEPS_SEQUENCES, f"{name} {reason}")


def _mixes_in_model(module: ModuleView, name: str) -> str:
    """Why a model or the angles of its positions may mix tokens, in a module or function that does, or ""."""
    constructor = module.upstream.find(f"{name}.__init__")
    made = _modules(constructor, module) if isinstance(constructor, ast.FunctionDef) else set()
    if unknown := sorted(made - _MODULES - module.classes.keys()):
        return f"has a {unknown[0]}, which may mix tokens"
    called = (ast.unparse(call.func).rpartition(".")[2] for call in find_nodes(ast.Call, module.classes[name]))
    mixing = next(filter(_MIXES.fullmatch, called), "")
    return f"calls {mixing}, which may mix tokens" if mixing else ""


def _counting_rows(module: ModuleView) -> Iterator[str]:
    """Decoders that embed positions which they count themselves, where they cannot be given positions."""
    embeddings = {name for name in module.classes if "Position" in name and "forward" in module.own_methods(name)}
    for name, forward in module.methods():
        constructor = module.upstream.find(f"{name}.__init__")
        if (
            "Encoder" in name
            or _ENCODERS.search(name)
            or constructor is None
            or "position_ids" in module.parameters(forward)
        ):
            continue
        embeds = any(ast.unparse(call.func) in embeddings for call in find_nodes(ast.Call, constructor))
        if embeds and "embed_positions" in module.text(forward):
            yield name


def _pads_shifted(module: ModuleView, forward: str) -> bool:
    """Whether a method pads a range of tokens, so that they are shifted (MobileBERT)."""
    calls = find_nodes(ast.Call, module.upstream.find(forward))
    padded = (call.args[0] for call in calls if ast.unparse(call.func).endswith("functional.pad") and call.args)
    return any(isinstance(x, ast.Subscript) and ast.unparse(x.slice) == "(:, 1:)" for x in padded)


def _attends_to_others(module: ModuleView, forward: str) -> bool:
    """Whether attention is always to the states of another module, whose documents are unknown."""
    if "ALL_ATTENTION_FUNCTIONS" not in module.text(forward):
        return False
    others = OTHER_STATES & {*module.parameters(forward)}
    definition = module.upstream.find(forward)
    tests = [*(n.test for n in find_nodes(ast.If, definition)), *(n.test for n in find_nodes(ast.IfExp, definition))]
    return bool(others) and not others & set().union(*map(names_in, tests))


def _acts_per_token(module: ModuleView, name: str, method: ast.FunctionDef) -> bool:
    """Whether a method is known to, whatever functions it calls."""
    if method.name in _SETUP or method.name.startswith("_init"):
        return True
    return _selects_under_mask(method) or module.fingerprint(f"{name}.{method.name}") in _REVIEWED


def _counts_positions(method: ast.FunctionDef) -> bool:
    """Whether a method calls arange, other than where it gets no position_ids."""
    without = (node for node in find_nodes(ast.If, method) if ast.unparse(node.test) == "position_ids is None")
    defaults = {id(inner) for branch in without for node in branch.body for inner in nodes_below(node)}
    return any(node.attr == "arange" and id(node) not in defaults for node in find_nodes(ast.Attribute, method))


def _selects_under_mask(method: ast.FunctionDef) -> bool:
    """Whether a method only returns which keys have the highest scores among those that its attention_mask shows.

    The masks of packed documents then separate them here too, as in DeepSeek-V3.2's indexer.
    """
    masked = {
        name
        for node in find_nodes(ast.Assign, method)
        if ast.unparse(node.value).endswith(_MASKED)
        for name in _targets(iter([node]))
        if ast.unparse(node.value).startswith(name)
    }
    returned = [ast.unparse(node.value) for node in find_nodes(ast.Return, method) if node.value]
    return bool(returned) and all(text.partition(".topk(")[0] in masked for text in returned)


def _modules(method: ast.FunctionDef, module: ModuleView) -> set[str]:
    """Names of torch's modules that a constructor makes, itself or in a function that it calls."""
    calls = [*find_nodes(ast.Call, method)]
    functions = [module.upstream.find(call.func.id) for call in calls if isinstance(call.func, ast.Name)]
    calls += find_nodes(ast.Call, *(function for function in functions if isinstance(function, ast.FunctionDef)))
    attributes = [node.func for node in calls if isinstance(node.func, ast.Attribute)]
    owners = {function.attr: ast.unparse(function.value) for function in attributes}
    return {name for name, owner in owners.items() if owner in ("nn", "torch.nn") and name[:1].isupper()}


def _mixing_call(module: ModuleView, method: ast.FunctionDef, seen: frozenset[str]) -> str:
    """Why a method or function may mix tokens, or ""."""
    raised = {id(inner) for node in find_nodes(ast.Raise, method) for inner in nodes_below(node)}
    nodes = [node for statement in method.body for node in nodes_below(statement) if id(node) not in raised]
    mixing = next(filter(None, (_mixing_expression(module, node, seen) for node in nodes)), "")
    step = next(_single_steps(nodes), "")
    return mixing or (f"takes {step} in a loop, which may mix tokens" if step else "")


def _single_steps(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Where loops over a range take one step at a time of a dim after the first: of tokens, as recurrences do."""
    loops = [n for n in nodes if isinstance(n, ast.For) and ast.unparse(n.iter).startswith("range(")]
    for loop in loops:
        step = ast.unparse(loop.target)
        for node in find_nodes(ast.Subscript, loop):
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
            if step in map(ast.unparse, indices[1:]):
                yield ast.unparse(node)


def _mixing_expression(module: ModuleView, node: ast.AST, seen: frozenset[str]) -> str:
    """Why an expression itself, without those in it, may mix tokens, or ""."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        known = _has_parameter(node.left, node.right) or "position_ids" in ast.unparse(node)
        return "" if known else "multiplies activations, which may mix tokens"
    if isinstance(node, ast.Subscript) and _slices_tokens(node):
        return f"takes {ast.unparse(node)}, which may mix tokens"
    if not isinstance(node, ast.Call) or isinstance(node.func, ast.Subscript) or _is_judged(module, node.func):
        return ""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    own = module.upstream.find(name) if isinstance(function, ast.Name) else _autograd_forward(module, function)
    if isinstance(own, ast.FunctionDef) and name not in seen:
        return _mixing_call(module, own, seen | {name})
    if name in _MATMULS:
        return "" if _has_parameter(*node.args) else f"calls {name} of activations, which may mix tokens"
    if name in _CONCATENATIONS:
        last = any(ast.unparse(x) == "-1" for x in (*node.args[1:], *(k.value for k in node.keywords)))
        return "" if last else f"calls {name}, which may mix tokens"
    known = name in _PER_TOKEN or name in module.classes or name in seen
    return "" if known else f"calls {name}, which may mix tokens"


def _is_judged(module: ModuleView, function: ast.expr) -> bool:
    """Whether a called function is a child, or a method of the class or of a child, which are judged by themselves."""
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    of_child = owner.startswith("self.") and any(function.attr in module.own_methods(name) for name in module.classes)
    return owner == "self" or of_child


def _autograd_forward(module: ModuleView, function: ast.expr) -> ast.AST | None:
    """The forward of an autograd.Function of the module whose `apply` is called."""
    owner, _, method = ast.unparse(function).rpartition(".")
    return module.upstream.find(f"{owner}.forward") if method == "apply" and owner in module.classes else None


def _has_parameter(*nodes: ast.expr) -> bool:
    return any(ast.unparse(node).startswith("self.") for node in nodes)


def _slices_tokens(node: ast.Subscript) -> bool:
    """Whether an index takes a range of another dim than the last."""
    if not isinstance(node.slice, ast.Tuple):
        return False
    return any(isinstance(x, ast.Slice) and (x.lower or x.upper or x.step) for x in node.slice.elts[:-1])


@lru_cache(maxsize=8)
def masks_without_positions(module: ModuleView) -> str:
    """Why masks can't separate the documents of a packed sequence, or "".

    Documents are separated by position_ids that restart.
    """
    given = {text for calls in calls_to_give_positions(module).values() for text in calls}
    if (
        _calls_without_positions(module) <= given
        and methods_that_pad(module).keys() <= calls_to_give_positions(module).keys()
        and not any(_made_for_padding_only(module))
    ):
        if any(_calls_of(module, {"create_chunked_causal_mask"})) and Version(module.upstream.version) < _CHUNKS:
            return "its masks count chunks from the start of the row, not from that of each document"
        return ""
    return "its masks are made without position_ids, so packed documents would attend to each other"


@lru_cache(maxsize=8)
def calls_to_give_positions(module: ModuleView) -> dict[str, Counter[str]]:
    """Source text of the calls that make a decoder's masks without position_ids in a method that has them; how often.

    With position_ids, the masks are the same unless positions restart: gpt-oss's documents attend to each other there.
    """
    lacking = _calls_without_positions(module) if decoder_layers(module) else set()
    found = {}
    for method, calls in module.callers(*_MASKS).items():
        texts = Counter(text for text in map(ast.unparse, calls) if text in lacking)
        if texts and "position_ids" in module.parameters(method):
            found[method] = texts
    return found


@lru_cache(maxsize=8)
def methods_that_pad(module: ModuleView) -> dict[str, str]:
    """The methods that make a padding mask of ones where they get none, and its name.

    With one, Transformers does not look at positions.
    """
    found = {}
    for method, calls in module.callers(*_MASKS).items():
        assigned = find_nodes(ast.Assign, module.upstream.find(method))
        ones = _targets(node for node in assigned if ast.unparse(node.value).startswith("torch.ones("))
        given = {ast.unparse(k.value) for call in calls for k in call.keywords if k.arg == "attention_mask"}
        if ones & given:
            found[method] = min(ones & given)
    return found


def _made_for_padding_only(module: ModuleView) -> Iterator[str]:
    """The methods that make a mask only where they get one of padding, which packed sequences do not have."""
    for method in module.callers(*_MASKS):
        branches = find_nodes(ast.If, module.upstream.find(method))
        given = [
            node for node in branches if ast.unparse(node.test) == "attention_mask is not None" and not node.orelse
        ]
        inside = (ast.unparse(call.func) for call in find_nodes(ast.Call, *given))
        if _MASKS & {*inside}:
            yield method


@lru_cache(maxsize=8)
def _calls_without_positions(module: ModuleView) -> set[str]:
    assigned = [*find_nodes(ast.Assign, module.tree)]
    # mask_kwargs = {"position_ids": position_ids, ...}, and functions chosen by a condition before they are called.
    given = _targets(node for node in assigned if "position_ids" in _keys(node.value))
    given |= _targets(node for node in assigned if given and _copied(node.value) & given)
    chosen = _targets(node for node in assigned if isinstance(node.value, ast.IfExp) and _MASKS & names_in(node))
    found = set()
    for call in _calls_of(module, _MASKS | chosen):
        named = {keyword.arg for keyword in call.keywords}
        unpacked = set().union(*(names_in(keyword.value) for keyword in call.keywords if keyword.arg is None))
        if "position_ids" not in named and not unpacked & given:
            found.add(ast.unparse(call))
    return found


def _calls_of(module: ModuleView, functions: set[str]) -> Iterator[ast.Call]:
    for call in find_nodes(ast.Call, module.tree):
        if isinstance(call.func, ast.Name) and call.func.id in functions:
            yield call


def _targets(assigned: Iterator[ast.Assign]) -> set[str]:
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def _copied(node: ast.AST) -> set[str]:
    """The names whose `copy()` is called."""
    called = (call.func for call in find_nodes(ast.Call, node))
    return set().union(*(names_in(f) for f in called if isinstance(f, ast.Attribute) and f.attr == "copy"))


def _keys(node: ast.AST) -> set[str]:
    """The keys of a dictionary that is written out; none of anything else."""
    keys = node.keys if isinstance(node, ast.Dict) else ()
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
