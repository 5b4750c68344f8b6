"""Importing changes nothing, and adding an op or an architecture touches one folder."""

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

import opslot

SOURCE = Path(opslot.__file__).parent

NEW_OP = {
    "op.py": """
        import torch
        from opslot.slots import InputCase, OpSpec, OpVariant

        def reference(x):
            return x / 2

        def make(dtype, device, generator):
            return {"x": torch.randn(3, generator=generator).to(device, dtype)}

        OP = OpSpec("halve", {"standard": OpVariant("standard", reference, [InputCase("three", make)], ("x",))})
        """,
    "quick.py": """
        def halve(x):
            return x * 0.5
        """,
    "__init__.py": """
        from opslot.ops.halve.op import OP
        from opslot.slots import KERNEL_REGISTRY, KernelSpec

        KERNEL_REGISTRY.register_op(OP)
        KERNEL_REGISTRY.register(KernelSpec("quick", "halve", "standard", "opslot.ops.halve.quick:halve", priority=1))
        """,
}
# A patch extends what discovery finds: it only states the difference.
NEW_ARCHITECTURE = {
    "__init__.py": """
        from opslot.models._registry import register_architecture

        register_architecture("mistral")
        """,
    "patch.py": """
        from opslot.patchgen import PatchConfig

        patch = PatchConfig("transformers.models.mistral.modeling_mistral")
        patch.exclude_from_output("MistralForTokenClassification", "MistralForQuestionAnswering")
        """,
}
NEW_FORM = {
    "forms.py": """
        from opslot.patchgen import Slot
        from opslot.patchgen.forms import Match

        def find_mlps(module):
            for name, forward in module.methods():
                if name.endswith("MLP") and module.count(forward, "self.act($x)") == 1:
                    slot = Slot("gelu_mlp", "standard")
                    yield Match(
                        name, slot.op, slot.variant,
                        lambda patch, at=forward: patch.slot_expr(at, slot, "self.act($x)", args="$x"))

        FORMS = (find_mlps,)
        """,
}
USE = """
    import importlib.util, json, sys
    import transformers.models.qwen3.modeling_qwen3 as upstream
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def state():
        values = {name: id(value) for name, value in vars(upstream).items()}
        return values, list(ALL_ATTENTION_FUNCTIONS), list(map(id, sys.meta_path))

    before, loaded = state(), set(sys.modules)
    import opslot
    found = {"unchanged": state() == before, "modules": sorted(set(sys.modules) - loaded)}

    def add(package, folder):
        spec = importlib.util.find_spec(package)
        spec.submodule_search_locations.append(folder)
        module = sys.modules[package] = importlib.util.module_from_spec(spec)
        return spec, module

    ops, ops_module = add("opslot.ops", FOLDER + "/ops")
    models, models_module = add("opslot.models", FOLDER + "/models")
    ops.loader.exec_module(ops_module)

    from opslot import KERNEL_REGISTRY, OpsImplementationConfig
    from opslot._base.device import CPU
    from opslot.slots import KernelRequest
    OpsImplementationConfig()
    for spec in KERNEL_REGISTRY.specs():
        spec.unsupported(KernelRequest(spec.op_name, spec.variant, CPU))
    vendors = {"triton", "liger_kernel", "quack", "fla", "mamba_ssm", "flash_attn", "kernels", "torch_npu"}
    found["vendors"] = sorted(vendors & (set(sys.modules) - loaded))

    models.loader.exec_module(models_module)
    assert OpsImplementationConfig(halve_implementation="quick").halve_implementation == "quick"
    from opslot import verify_kernels
    from opslot.cli.kernels import kernel_rows
    rows = [(r["name"], r["usable"]) for r in kernel_rows("halve")]
    found["op"] = [rows, all(r.ok for r in verify_kernels("halve"))]

    from transformers import MistralConfig
    model = models_module.build_foundation_model(MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8), ops_implementation="eager")
    import opslot.generated.mistral as generated
    found["architecture"] = [
        f"{type(model).__module__} {type(model).__name__}", generated.MistralMLP._opslot_slots,
        hasattr(generated, "MistralForTokenClassification")]

    from opslot.models.discovery import discover
    from opslot.generated.gpt2 import GPT2MLP
    found["form"] = [[(match.symbol, str(match)) for match in discover("gpt2").matches], GPT2MLP._opslot_slots]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """What importing opslot and listing its kernels changes in a new process, and what it finds where an op, an
    architecture and a form are added, each as one folder."""
    root = tmp_path_factory.mktemp("added")
    for name, files in {"ops/halve": NEW_OP, "models/mistral": NEW_ARCHITECTURE, "ops/gelu_mlp": NEW_FORM}.items():
        (root / name).mkdir(parents=True)
        for file, text in files.items():
            (root / name / file).write_text(textwrap.dedent(text))
    script = textwrap.dedent(USE).replace("FOLDER", repr(str(root)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_no_other_package_and_does_not_change_transformers(added):
    assert added["unchanged"]
    assert all(m == "opslot" or m.startswith("opslot.") for m in added["modules"]), added["modules"]


def test_listing_kernels_imports_no_vendor(added):
    assert added["vendors"] == []


def test_new_op_is_one_folder(added):
    assert added["op"] == [[["eager", True], ["quick", True]], True]


def test_architecture_additions_are_one_folder(added):
    assert added["architecture"] == [
        "opslot.generated.mistral MistralForCausalLM",
        {"swiglu_mlp": ["swiglu_mlp", "standard"]},
        False,
    ]


def test_new_form_is_one_file(added):
    assert added["form"] == [
        [
            ["GPT2Attention", "attention/causal"],
            ["GPT2LMHeadModel", "cross_entropy_loss/causal"],
            ["GPT2MLP", "gelu_mlp/standard"],
        ],
        {"gelu_mlp": ["gelu_mlp", "standard"]},
    ]


@pytest.mark.parametrize(
    "command", [["--help"], ["kernels", "--help"], ["verify", "--help"], ["explain", "--help"], ["train", "--help"]]
)
def test_help_has_examples_and_succeeds(command):
    done = subprocess.run([sys.executable, "-m", "opslot", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout.lower()


# Names of modules in higher layers or beside them, which are no imports of the module that has them.
NAMED_MODULES = {
    ("slots/registry.py", "opslot.ops"): "packages that register kernels, imported when kernels are first asked for",
    ("slots/registry.py", "opslot.optim"): "as opslot.ops",
    ("patchgen/materialization.py", "opslot.generated"): "the package that patchgen fills",
    (
        "patchgen/indexed_attention.py",
        "opslot.ops.attention.calls",
    ): "in generated code; forms cannot import each other",
    ("patchgen/indexed_attention.py", "opslot.ops.attention.indexed"): "as opslot.ops.attention.calls",
    ("patchgen/packed_documents.py", "opslot.ops._common.documents"): "in generated code of the forms of several ops",
}


def test_modules_named_in_text_are_in_lower_layers():
    """As import-linter checks of imports, which does not see modules that are imported by name."""
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    layer_of = {package: i for i, layer in enumerate(reversed(layers)) for package in layer.split(" | ")}
    found = set()
    for path in SOURCE.glob("*/**/*.py"):
        file = str(path.relative_to(SOURCE))
        own, _, _ = file.partition("/")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.match(r"opslot\.(\w+)[\w.:]*$", node.value)
                if named and named[1] in layer_of and named[1] != own and layer_of[named[1]] >= layer_of[own]:
                    found.add((file, node.value))
    assert found == NAMED_MODULES.keys()


def test_no_import_cycles():
    """Between files, also under TYPE_CHECKING."""
    from graphlib import TopologicalSorter

    import grimp

    graph = grimp.build_graph("opslot", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


def test_slots_name_no_op():
    """`protocol` has attributes of attention, whose implementation is selected for a model rather than in slots."""
    ops = {path.name for path in (SOURCE / "ops").iterdir()}
    for path in (SOURCE / "slots").glob("*.py"):
        found = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert found & ops <= ({"attention"} if path.name == "protocol.py" else set()), path.name


def body_of(function):
    """The statements of a function without its docstring, the names of local variables numbered."""
    body = [node for node in function.body if not isinstance(getattr(node, "value", None), ast.Constant)]
    names = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    arguments = [node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    local = {*arguments, *(name.id for name in names if isinstance(name.ctx, ast.Store))}
    order = list(dict.fromkeys(name.id for name in names if name.id in local))
    for name in names:
        name.id = f"local{order.index(name.id)}" if name.id in local else name.id
    return tuple(map(ast.dump, body))


def test_ops_have_no_function_twice():
    found = defaultdict(list)
    for path in (SOURCE / "ops").rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            body = body_of(function)
            if len(body) > 1:
                found[body].append(f"{path.relative_to(SOURCE)}: {function.name}")
    assert [names for names in found.values() if len(names) > 1] == []


def test_patterns_of_quick_parameters_match(unmatched_patterns):
    assert unmatched_patterns == {}
