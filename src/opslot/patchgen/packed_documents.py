"""Slots on calls that upstream makes without the boundaries of packed documents. Text only, as all of patchgen."""

from __future__ import annotations

import ast
from collections import Counter
from functools import lru_cache

from opslot.patchgen.config import PatchConfig
from opslot.patchgen.edits import Anchored, ClassAttribute, TakeKeywords
from opslot.patchgen.forms import ModuleView, names_in
from opslot.patchgen.upstream import find_nodes

# Set on classes that `by_document` runs, which take the boundaries of documents whatever their forward takes.
_BY_DOCUMENT = "_opslot_by_document"

# Functions that a generated module calls.
_FUNCTIONS = "opslot.ops._common.documents", ("cu_seqlens_in", "documents_in", "documents_for")


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
    kwargs = module.keywords(method)
    if kwargs is not None:
        return f"cu_seqlens_in({kwargs})"
    passed = next((keyword.value for keyword in call.keywords if keyword.arg == "seq_idx"), None)
    return "None" if passed is None else f'cu_seqlens_in({{"seq_idx": {ast.unparse(passed)}}})'


def pass_documents(module: ModuleView, patch: PatchConfig) -> None:
    """Let heads pass the boundaries of documents to a backbone that they call without their keyword arguments."""
    for method, calls in module.callers("self.backbone", "self.model").items():
        for call in calls:
            if _takes_any(module, method, call):
                _pass(module, patch, method, call)


@lru_cache(maxsize=64)
def callers_of(module: ModuleView, owner: str) -> list[tuple[str, ast.Call]]:
    """The calls of the instances of a class, in the forwards of those whose constructors make them."""
    found = []
    for name in module.classes:
        constructor, forward = (module.upstream.find(f"{name}.{method}") for method in ("__init__", "forward"))
        if constructor is None or forward is None:
            continue
        lists = _lists_of(module, constructor, owner)
        for node in find_nodes(ast.Assign, constructor):
            if _makes(module, node.value, owner) or lists & names_in(node.value):
                called = _names_of(forward, ast.unparse(node.targets[0]))
                found += [(f"{name}.forward", call) for call in _calls_of(forward, called)]
    return found


def _lists_of(module: ModuleView, constructor: ast.AST, owner: str) -> set[str]:
    """The local lists to which a constructor appends instances of a class."""
    return {
        call.func.value.id
        for call in find_nodes(ast.Call, constructor)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "append"
        and isinstance(call.func.value, ast.Name)
        and any(_makes(module, argument, owner) for argument in call.args)
    }


def _makes(module: ModuleView, value: ast.expr, owner: str) -> bool:
    """Whether an expression calls a class, or what it takes from a table of classes with it."""
    made = {owner, *(name for name, classes in module.tables.items() if owner in classes)}
    calls = (call.func for call in find_nodes(ast.Call, value))
    return any(ast.unparse(f.value if isinstance(f, ast.Subscript) else f) in made for f in calls)


def _names_of(forward: ast.AST, attribute: str) -> set[str]:
    """What a method calls the modules of an attribute: the attribute, and variables of loops over it."""
    loops = (node for node in find_nodes(ast.For, forward) if attribute in ast.unparse(node.iter))
    return {attribute}.union(*(names_in(loop.target) for loop in loops))


def _calls_of(forward: ast.AST, names: set[str]) -> list[ast.Call]:
    return [call for call in find_nodes(ast.Call, forward) if ast.unparse(call.func) in names]


def documents_reach(module: ModuleView, owner: str) -> bool:
    """Whether the callers of a class's instances have the boundaries of documents to pass, up to a model."""
    callers = callers_of(module, owner)
    if not callers:
        return _layers_get_keywords(module)
    for method, _ in callers:
        if module.keywords(method) is None:
            return False
        if not _is_model(module, method) and not documents_reach(module, method.partition(".")[0]):
            return False
    return True


def takes_documents(module: ModuleView, owner: str) -> bool:
    """Whether the instances of a class are called, and each call can pass the boundaries of documents."""
    callers = callers_of(module, owner)
    # Other edits may copy a call that a method makes several times, such as that of a DropPath.
    made = Counter((method, ast.unparse(call)) for method, call in callers)
    return bool(callers) and all(made[m, ast.unparse(call)] == 1 or _takers(module, m, call) for m, call in callers)


def _layers_get_keywords(module: ModuleView) -> bool:
    """Whether models pass their keyword arguments to all layers: those that are made by a table of classes."""
    models = [name for name, forward in module.methods() if _is_model(module, forward)]
    forwards = [module.upstream.find(f"{name}.forward") for name in models]
    called = [call for f in forwards if f is not None for call in _calls_of(f, _names_of(f, "self.layers"))]
    return bool(called) and all(any(keyword.arg is None for keyword in call.keywords) for call in called)


def pass_documents_to(module: ModuleView, patch: PatchConfig, owner: str) -> None:
    """Let the callers of a class's instances, up to heads, pass the boundaries of documents where they do not.

    Instances of other classes that are called there get them if they take any keyword argument.
    """
    attributes = [e.attribute for e in patch.edits if isinstance(e, ClassAttribute) and e.target == owner]
    own = [owner] if TakeKeywords(f"{owner}.forward") in patch.edits else []
    for method, call in callers_of(module, owner):
        takers = _takers(module, method, call) + own
        if not _pass_as_seq_idx(module, patch, method, call) and (takers or _BY_DOCUMENT in attributes):
            _pass(module, patch, method, call, takers)
        pass_documents_to(module, patch, method.partition(".")[0])


def _is_model(module: ModuleView, method: str) -> bool:
    return bool(set(module.bases(method.partition(".")[0])) & set(module.models))


def _takers(module: ModuleView, method: str, call: ast.Call) -> list[str]:
    """The classes that a call may be of and whose forward takes any keyword argument."""
    text = ast.unparse(call)
    takers = [name for name, forward in module.methods() if module.keywords(forward) is not None]
    return [n for n in takers if any((m, ast.unparse(c)) == (method, text) for m, c in callers_of(module, n))]


def _pass(module: ModuleView, patch: PatchConfig, method: str, call: ast.Call, takers: list[str] | None = None) -> None:
    """Let a call pass the boundaries of documents; with `takers`, to modules of these classes alone."""
    kwargs = module.keywords(method)
    text = ast.unparse(call)
    passed_already = any(isinstance(e, Anchored) and e.target == method and text in e.patterns for e in patch.edits)
    if any(k.arg is None for k in call.keywords) or kwargs is None or passed_already:
        return
    given = f"documents_in({kwargs})"
    if takers is not None:
        classes = "".join(f"{name}, " for name in takers)
        given = f"documents_for({ast.unparse(call.func)}, ({classes}), {kwargs})"
    passed = ast.Call(call.func, call.args, [*call.keywords, ast.keyword(None, ast.Name("_PASSED"))])
    count = sum(ast.unparse(call) == text for call in find_nodes(ast.Call, module.function(method)))
    patch.replace(method, text, ast.unparse(passed).replace("_PASSED", given), count=count)
    add_imports(patch)


def _pass_as_seq_idx(module: ModuleView, patch: PatchConfig, method: str, call: ast.Call) -> bool:
    """Let a call that passes only its seq_idx pass the boundaries of documents as it, and return whether it does."""
    kwargs = module.keywords(method)
    passed = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "seq_idx"]
    if kwargs is None or any(keyword.arg is None for keyword in call.keywords):
        return False
    text = f"{kwargs}.get('seq_idx')"
    if passed != [text]:
        return False
    if not any(isinstance(e, Anchored) and e.target == method and text in e.patterns for e in patch.edits):
        count = sum(ast.unparse(call) == text for call in find_nodes(ast.Call, module.function(method)))
        patch.replace(method, text, f"cu_seqlens_in({kwargs})", count=count)
        add_imports(patch)
    return True


def _takes_any(module: ModuleView, method: str, call: ast.Call) -> bool:
    """Whether the class that a method's class assigns to the attribute it calls takes any keyword argument."""
    owner = method.partition(".")[0]
    target = ast.unparse(call.func)
    for node in find_nodes(ast.Assign, module.upstream.find(f"{owner}.__init__")):
        if ast.unparse(node.targets[0]) == target and isinstance(node.value, ast.Call):
            forward = f"{ast.unparse(node.value.func)}.forward"
            return module.upstream.find(forward) is not None and module.keywords(forward) is not None
    return False


def add_imports(patch: PatchConfig, module: str = "", *names: str) -> None:
    """Import what generated modules call: the functions for the boundaries of documents, and `names` of `module`."""
    patch.add_import(*_FUNCTIONS)
    if names:
        patch.add_import(module, names)


def undecorated(module: ModuleView, patch: PatchConfig, function: str) -> str:
    """The name of upstream's function without decorators, which may replace it by another package's."""
    if not module.function(function).decorator_list:
        return function
    name = f"_opslot_{function}"
    patch.copy_undecorated(function, name)
    return name
