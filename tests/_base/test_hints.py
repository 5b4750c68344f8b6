"""Every error for users has a hint, except where its text has one, or it passes on another error."""

import ast
import inspect
from pathlib import Path

import opslot
from opslot._base import errors

SOURCE = Path(opslot.__file__).parent
LIST = "each problem of the list says what to do"
PASSED = "passes on the text of an error, which has the hint"
INSIDE = "its text says what to do, since it is also shown as an item of a list"
WRAPPED = "caught by a caller, which adds the hint"
WITHOUT_HINT = {
    ("bench/baselines/__init__.py", "check_baselines"): LIST,
    ("checkpoint/_report.py", "raise_if_any"): LIST,
    ("checkpoint/safetensors_file.py", "_corrupt"): INSIDE,
    ("data/tokenizing.py", "check"): PASSED,
    ("distributed/consensus.py", "fail_together"): "names the rank whose error has the hint, or that was killed",
    ("distributed/parallel_state.py", "_wait_for_start"): "names the rank whose error has the hint",
    ("optim/selection.py", "_adamw_8bit"): INSIDE,
    ("patchgen/edited_module.py", "fail"): WRAPPED,
    ("slots/binding.py", "_resolve"): LIST,
    ("slots/binding.py", "_resolve_at"): INSIDE,
    ("slots/config.py", "__init__"): LIST,
    ("slots/profile.py", "_as_a_profile"): WRAPPED,
    ("slots/profile.py", "_machines"): WRAPPED,
    ("slots/registry.py", "get"): INSIDE,
    ("slots/registry.py", "resolve"): INSIDE,
    ("slots/spec.py", "__post_init__"): "says which values are valid",
    ("trainer/parse.py", "load_config"): LIST,
    ("trainer/prepare.py", "_parallelize"): PASSED,
    ("trainer/run_data.py", "_inspect"): LIST,
    ("trainer/validate.py", "_cannot_start"): LIST,
    ("verify/media.py", "_raised"): "the result of a check, which is printed in a table",
    ("verify/two_processes.py", "_rank_step"): "the result of a check, which is printed in a table",
}


def error_names(trees):
    """Names of the classes of errors for users, and of the function that formats them."""
    names = {name for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, errors.OpslotError)}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names |= {cls.name for cls in classes if any(getattr(base, "id", "") in names for base in cls.bases)}
    return names | {"error_text"}


def without_hint(function, names):
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(
        getattr(call.func, "id", "") in names and all(keyword.arg != "hint" for keyword in call.keywords)
        for call in calls
    )


def test_errors_have_hints():
    trees = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    names = error_names(trees)
    found = {
        (path, node.name)
        for path, tree in trees.items()
        if path != "_base/errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and without_hint(node, names)
    }
    assert found - WITHOUT_HINT.keys() == set()
    assert WITHOUT_HINT.keys() - found == set()
