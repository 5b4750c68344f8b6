"""What is read of modules outside Transformers, and what is generated for them."""

import importlib
import sys

import pytest
import torch
from torch import nn

import opslot
from opslot._base.errors import ConfigError, PatchError
from opslot.models._own_classes import own_slots, with_slots
from opslot.models.discovery import discover
from opslot.patchgen import materialize
from opslot.patchgen.names import architecture_from
from opslot.patchgen.source import installed_release
from tests.own_code import HERE

ROTARY = (HERE / "rotary_finch.py").read_text().partition("def rotate_half")[2]
ROTARY = f"import torch\nfrom torch import nn\n\n\ndef rotate_half{ROTARY}"
ROTATES = '''

class Rotates(nn.Module):
    """Rotates and adds."""

    def forward(self, q, k, cos, sin):
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q + k


class RotatesTwice(Rotates):
    def forward(self, q, k, cos, sin):
        from . import SCALE

        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return super().forward(q, k, cos, sin) * SCALE


class Inherits(RotatesTwice):
    def forward(self, *tensors):
        return super().forward(*tensors) + 1
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Imports a module with a text: `module(text, name)`, where the name may be that of a package."""
    monkeypatch.syspath_prepend(tmp_path)
    before = {*sys.modules}

    def make(text, name, file=""):
        path = tmp_path / (file or f"{name.replace('.', '/')}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in {*sys.modules} - before:
        if name.startswith(("made_", "opslot.generated.from__made_")):
            del sys.modules[name]


def text_of(module):
    return materialize(architecture_from(module.__name__)).read_text()


def test_methods_of_a_class_hierarchy(module):
    made = module(ROTARY + "\nSCALE = 0.5\n" + ROTATES, "made_package", "made_package/__init__.py")
    text = text_of(made)
    assert "super(_opslot_original.RotatesTwice, self).forward" in text
    assert "from made_package import SCALE" in text
    assert "Rotates and adds" not in text
    assert with_slots(made.Rotates).forward.__qualname__ == "Rotates.forward"
    assert "def rotate_half" not in text
    x = torch.randn(4, 1, 2, 3, 8)
    cos, sin = torch.randn(2, 1, 3, 8)
    models = nn.ModuleList([made.Rotates(), made.RotatesTwice(), made.Inherits()])
    wanted = [model(x[0], x[1], cos, sin) for model in models]
    opslot.apply(models)
    assert {row.slot.partition(" ")[0] for row in opslot.explain(models)} == {
        "Rotates.rotary_pos_emb",
        "RotatesTwice.rotary_pos_emb",
        "Inherits.rotary_pos_emb",
    }
    assert {row.chosen for row in opslot.explain(models)} == {"torch_fused"}
    for model, expected in zip(models, wanted, strict=True):
        torch.testing.assert_close(model(x[0], x[1], cos, sin), expected)
    opslot.apply(models, "eager")
    assert all(torch.equal(m(x[0], x[1], cos, sin), w) for m, w in zip(models, wanted, strict=True))


@pytest.mark.parametrize("base", ["nn.Module", "Module"])
def test_class_with_the_name_of_its_base(module, base):
    body = ROTATES.replace("class Rotates(nn.Module)", f"class Module({base})").replace("(Rotates)", "(Module)")
    made = module(f"from torch.nn import Module\n{ROTARY}\nSCALE = 0.5\n{body}", "made_alike", "made_alike/__init__.py")
    x = torch.randn(4, 1, 2, 3, 8)
    cos, sin = torch.randn(2, 1, 3, 8)
    model = made.RotatesTwice()
    expected = model(x[0], x[1], cos, sin)
    opslot.apply(model)
    assert [row.op for row in opslot.explain(model)] == ["rotary_pos_emb"]
    torch.testing.assert_close(model(x[0], x[1], cos, sin), expected)


def test_functions_of_other_packages_are_not_reported_as_replaced(module, caplog):
    body = """

class Rotates(nn.Module):
    def forward(self, q, k, cos, sin):
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q + k if self.name() == parse("1") else self.named(k)

    @staticmethod
    def name():
        return parse("1")

    @classmethod
    def named(cls, k):
        return parse(k)
"""
    made = module(f"from packaging.version import parse\n{ROTARY}{body}", "made_parsing")
    model = made.Rotates()
    opslot.apply(model)
    opslot.apply(model)
    assert caplog.records == []
    assert "replaced" not in str(opslot.explain(model))
    made.apply_rotary_pos_emb = lambda q, k, cos, sin: (q, k)
    assert "Rotates.forward, or a function that it calls, was replaced" in str(opslot.explain(model))


def test_statements_run_once(module):
    counter = "\nimport made_counter\n\nmade_counter.runs += 1\nTABLE = made_counter.fill()\n"
    module("runs = 0\n\ndef fill():\n    global runs\n    runs += 1\n    return {}\n", "made_counter")
    made = module(ROTARY + counter + ROTATES.replace("from . import SCALE", "SCALE = 1"), "made_script")
    opslot.apply(made.Rotates())
    assert sys.modules["made_counter"].runs == 2
    assert with_slots(made.Rotates).forward.__globals__["TABLE"] is made.TABLE


def test_globals_that_change_after_the_import(module):
    body = ROTATES.replace("from . import SCALE", "pass")
    made = module(ROTARY + body, "made_later")
    x, angles = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 8)
    model = made.RotatesTwice()
    opslot.apply(model)
    for scale in (3.0, 5.0):
        made.SCALE = scale
        assert model(x, x, angles, angles * 0).mean() == 2 * scale


def test_unknown_decorators_keep_a_class_as_it_is(module):
    text = (HERE / "layers_finch.py").read_text().partition("class FinchNorm")[2].partition("\n\n\nclass")[0]
    made = module(
        f"import torch\nfrom torch import nn\n\n\ndef known(cls):\n    return cls\n\n\n@known\nclass FinchNorm{text}",
        "made_decorated",
    )
    (skip,) = discover(architecture_from("made_decorated")).skips
    assert skip.reason == "has the decorator known, which may change its methods"
    with pytest.raises(opslot.OpslotError, match="FinchNorm: it has the decorator known"):
        opslot.apply(made.FinchNorm(4, 1e-6))


def test_module_imported_again_has_slots_for_its_new_classes(module):
    text = ROTARY + ROTATES.replace("from . import SCALE", "SCALE = 1")
    first = module(text, "made_again")
    old = first.Rotates
    opslot.apply(old())
    del sys.modules["made_again"]
    second = module(text, "made_again")
    assert second.Rotates is not old
    assert issubclass(with_slots(second.Rotates), second.Rotates)
    reloaded = importlib.reload(second)
    assert issubclass(with_slots(reloaded.Rotates), reloaded.Rotates)
    # Of another size: Python compares that and the second of the change with its bytecode.
    module(text.replace("return q + k", "return q - 1.0 * k"), "made_again")
    reloaded = importlib.reload(second)
    model = reloaded.Rotates()
    opslot.apply(model)
    x, angles = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 8)
    assert not model(x, x, angles, angles * 0).any()


def test_layers_of_several_models_are_not_judged_by_one(module):
    for file in ("rotary_finch", "layers_finch", "configuration_sparrow"):
        module((HERE / f"{file}.py").read_text(), f"made_models.{file}")
    for name in ("modeling_finch", "modeling_other"):
        module((HERE / "modeling_finch.py").read_text(), f"made_models.{name}")
    found = discover(architecture_from("made_models.layers_finch"))
    assert [skip.reason for skip in found.skips] == ["gets masks from no function of transformers.masking_utils"]
    assert {match.symbol for match in found.matches} >= {"FinchNorm", "FinchExperts"}


def test_missing_source():
    release = installed_release()
    with pytest.raises(PatchError, match="made_missing is not imported"):
        release.module("made_missing")
    with pytest.raises(PatchError, match="math has no Python source file"):
        release.module("math")
    assert own_slots(nn.Linear) == own_slots(int) == (None, "")


def test_long_names_of_modules(module):
    name = "made_" + "x" * 200
    made = module(ROTARY + ROTATES.replace("from . import SCALE", "SCALE = 1"), name)
    opslot.apply(made.Rotates())
    assert all(len(part) < 200 for part in materialize(architecture_from(name)).parts[:-1])


def test_models_of_a_package_of_kernels_are_reported(module):
    """Their layers call kernels already, so their code is not read."""
    made = module(ROTARY + ROTATES.replace("from . import SCALE", "SCALE = 1"), "fla.made_models")
    with pytest.raises(ConfigError, match="classes of fla call its own kernels, and are not searched"):
        opslot.apply(made.Rotates())
