"""In modules where mypy allows untyped Triton kernels, all other functions are annotated."""

import ast
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def exempt_files():
    """Source files of the modules for which pyproject.toml allows untyped definitions."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    patterns = [name for given in settings if given.get("disallow_untyped_defs") is False for name in given["module"]]
    files = sorted((ROOT / "src").rglob("*.py"))
    names = {".".join(file.relative_to(ROOT / "src").with_suffix("").parts): file for file in files}
    return [file for name, file in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]


def is_kernel(function):
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def untyped(tree):
    """(name, line) of each non-kernel function without a return type or a parameter type."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or is_kernel(node):
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        named = [arg for arg in given if arg is not None and arg.arg not in ("self", "cls")]
        inits = node.name == "__init__" and named
        if any(arg.annotation is None for arg in named) or (node.returns is None and not inits):
            yield node.name, node.lineno


def test_some_modules_have_kernels():
    assert len(exempt_files()) > 10


@pytest.mark.parametrize("file", exempt_files(), ids=lambda file: str(file.relative_to(ROOT / "src/opslot")))
def test_other_functions_in_kernel_modules_are_annotated(file):
    assert not list(untyped(ast.parse(file.read_text())))


def test_check_finds_missing_annotations():
    tree = ast.parse(
        "@triton.jit\ndef kernel(x): ...\n"
        "@triton.jit(do_not_specialize=['n'])\ndef other(x): ...\n"
        "def bare(x): ...\n"
        "def half(x: int): ...\n"
        "def whole(x: int, *rest: int) -> None: ...\n"
    )
    assert [name for name, _ in untyped(tree)] == ["bare", "half"]
