"""Parts of an architecture that got no slot: a kernel named for them is an error, and explain lists them."""

import pytest
import torch
from torch import nn

from opslot import bind, explain
from opslot._base.errors import ConfigError

from .conftest import Doubler

FAST = {"toy_double_implementation": "fast"}


class Odd(nn.Module):
    _opslot_skipped = (("toy_double", "Odd.forward", "triples its input"),)

    def forward(self, x):
        return x


class OddOther(Odd):
    _opslot_skipped = (("toy_double/other", "OddOther.forward", "halves its input"),)


def test_named_kernel_for_a_skipped_part_raises(toy):
    model = nn.Sequential(nn.Linear(2, 2), Odd())
    with pytest.raises(ConfigError) as caught:
        bind(model, FAST)
    assert (
        "- 1: toy_double_implementation='fast': Odd.forward has no slot: triples its input; use eager or auto"
        in str(caught.value)
    )
    for ops in ("auto", "eager"):
        assert bind(model, ops).chosen("toy_double") == ()


def test_named_kernel_for_an_op_without_any_part_is_absent(toy):
    assert bind(nn.Linear(2, 2), FAST).chosen("toy_double") == ("absent",)


def test_named_kernel_serves_the_parts_with_a_slot(toy):
    model = nn.Sequential(Doubler(), Odd())
    report = bind(model, FAST)
    assert report.chosen("toy_double") == ("fast",)
    (skipped,) = report.skipped
    assert (skipped.symbol, skipped.op, skipped.reason, skipped.modules) == (
        "Odd.forward",
        "toy_double",
        "triples its input",
        ("1",),
    )
    text = str(explain(model))
    assert "without a slot" in text
    assert "triples its input" in text
    assert report.to_dict()["skipped"][0]["symbol"] == "Odd.forward"


def test_override_of_a_skipped_part_raises(toy):
    model = nn.Sequential(Doubler(), Odd())
    with pytest.raises(
        ConfigError, match=r"1: toy_double_implementation='fast': Odd.forward has no slot.*overrides\['1'\]"
    ):
        bind(model, {"overrides": {"1": FAST}})
    report = bind(model, {"overrides": {"1": {"toy_double_implementation": "eager"}}})
    assert report.chosen("toy_double") == ("fast",)


def test_subclass_has_the_skipped_parts_of_its_bases(toy):
    report = bind(nn.Sequential(OddOther()))
    assert [(row.op, row.symbol) for row in report.skipped] == [
        ("toy_double/other", "OddOther.forward"),
        ("toy_double", "Odd.forward"),
    ]


def test_error_binds_nothing(toy):
    model = nn.Sequential(Doubler(), Odd())
    bind(model)
    with pytest.raises(ConfigError):
        bind(model, {"toy_double_implementation": "unranked", "overrides": {"1": FAST}})
    assert model[0].toy.name == "fast"
    torch.testing.assert_close(model[0](torch.ones(3)), torch.full((3,), 2.0))
