from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opslot._base.errors import CheckpointError, ConfigError
from opslot.checkpoint.converter import SlicingConverter
from opslot.checkpoint.experts import (
    LAYOUTS,
    ExpertTensorConverter,
    expert_targets,
    expert_targets_of_checkpoint,
    split_target,
)
from opslot.checkpoint.tensor_slice import copy_overlap, full_region

EXPERTS = "model.layers.0.mlp.experts"
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))


def targets(experts: int, inner: int, hidden: int, layers: int = 1) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        shapes[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
        shapes[f"model.layers.{layer}.mlp.experts.down_proj"] = (experts, hidden, inner)
    return shapes


def stored(shapes: dict[str, tuple[int, ...]], layout: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random target values, and the same values in a checkpoint's layout, converted with plain torch."""
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    return values, in_layout(values, layout)


def in_layout(values: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    checkpoint: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        prefix, _, tensor = name.rpartition(".")
        if layout == "stacked":
            checkpoint[name] = value
        elif layout == "transposed":
            checkpoint[name] = value.transpose(1, 2).contiguous()
        elif tensor == "gate_up_proj":
            gates, ups = value.chunk(2, dim=1)
            for expert in range(len(value)):
                checkpoint[f"{prefix}.{expert}.gate_proj.weight"] = gates[expert].contiguous()
                checkpoint[f"{prefix}.{expert}.up_proj.weight"] = ups[expert].contiguous()
        else:
            for expert in range(len(value)):
                checkpoint[f"{prefix}.{expert}.down_proj.weight"] = value[expert]
    return checkpoint


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(LAYOUTS), st.randoms())
def test_every_layout_is_detected_and_loaded(sizes: tuple[int, int, int], layout: str, random) -> None:
    """The pair of tensors determines the layout for any sizes (also square ones) and any order."""
    shapes = targets(*sizes, layers=2)
    values, checkpoint = stored(shapes, layout)
    converter = ExpertTensorConverter(shapes)
    converter.inspect(shapes_of(checkpoint))
    assert converter.layouts == {"model.layers.*.mlp.experts": layout}
    result = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    names = list(checkpoint)
    random.shuffle(names)
    for name in names:
        assert converter.can_handle(name)
        place = converter.slice_of(name, tuple(checkpoint[name].shape))
        assert place.shape == tuple(checkpoint[name].shape)
        copy_overlap(result[place.target], full_region(shapes[place.target]), checkpoint[name], place)
    assert all(torch.equal(result[name], values[name]) for name in shapes)
    assert converter.missing(names) == []


@settings(max_examples=30, deadline=None)
@given(SIZES, st.sampled_from(LAYOUTS))
def test_splitting_is_the_inverse_of_loading(sizes: tuple[int, int, int], layout: str) -> None:
    shapes = targets(*sizes)
    values, checkpoint = stored(shapes, layout)
    for name, shape in shapes.items():
        for part, place in split_target(name, shape, layout):
            found = place.as_stored(values[name][place.region])
            assert torch.equal(found, checkpoint.pop(part))
    assert not checkpoint


@settings(max_examples=30, deadline=None)
@given(SIZES, st.sampled_from(LAYOUTS))
def test_targets_from_checkpoint_shapes(sizes: tuple[int, int, int], layout: str) -> None:
    shapes = targets(*sizes)
    assert expert_targets_of_checkpoint(shapes_of(stored(shapes, layout)[1])) == shapes
    assert expert_targets(shapes) == shapes


def test_converter_implements_the_protocol() -> None:
    assert isinstance(ExpertTensorConverter(targets(2, 3, 5)), SlicingConverter)


def test_can_handle_only_tensors_of_the_model() -> None:
    converter = ExpertTensorConverter(targets(2, 3, 5))
    assert converter.can_handle(f"{EXPERTS}.1.up_proj.weight")
    assert converter.can_handle(f"{EXPERTS}.down_proj")
    for name in (
        "model.layers.7.mlp.experts.1.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight",
        f"{EXPERTS}.1.up_proj.bias",
        f"{EXPERTS}.gate_up_proj_bias",
        "model.layers.0.mlp.gate.weight",
    ):
        assert not converter.can_handle(name), name


def test_missing_names_the_projections_of_incomplete_experts() -> None:
    shapes = targets(4, 3, 5)
    lacking = {f"{EXPERTS}.2.up_proj.weight", f"{EXPERTS}.3.gate_proj.weight", f"{EXPERTS}.3.down_proj.weight"}
    present = stored(shapes, "per_expert")[1].keys() - lacking
    assert ExpertTensorConverter(shapes).missing(present) == [
        f"{EXPERTS}: expert 2 lacks up_proj",
        f"{EXPERTS}: expert 3 lacks gate_proj, down_proj",
    ]


def test_unknown_expert_raises() -> None:
    with pytest.raises(CheckpointError, match="the model has 2 experts"):
        ExpertTensorConverter(targets(2, 3, 5)).slice_of(f"{EXPERTS}.2.up_proj.weight", (3, 5))


def test_ambiguous_square_tensor_raises() -> None:
    shapes = targets(2, 3, 6)
    name, value = f"{EXPERTS}.gate_up_proj", torch.randn(2, 6, 6)
    with pytest.raises(CheckpointError, match=r'fit stacked and transposed(?s:.*)layout="stacked" or "transposed"'):
        ExpertTensorConverter(shapes).inspect({name: (2, 6, 6)})
    for layout, wanted in (("stacked", value), ("transposed", value.mT)):
        converter = ExpertTensorConverter(shapes, layout)
        converter.inspect({name: (2, 6, 6)})
        part = converter.slice_of(name, (2, 6, 6))
        assert torch.equal(part.read(value, part.region), wanted)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(LAYOUTS, 2)))
def test_mixed_layouts_raise(first: str, second: str) -> None:
    shapes = targets(2, 3, 5, layers=2)
    mixed = {}
    for layer, layout in enumerate((first, second)):
        own = {name: shape for name, shape in shapes.items() if f"layers.{layer}." in name}
        mixed |= shapes_of(stored(own, layout)[1])
    with pytest.raises(CheckpointError, match="mixed layouts") as caught:
        ExpertTensorConverter(shapes).inspect(mixed)
    assert first in str(caught.value)
    assert second in str(caught.value)


def test_wrong_explicit_layout_raises() -> None:
    shapes = targets(2, 3, 5)
    with pytest.raises(CheckpointError, match="stacked, not transposed"):
        ExpertTensorConverter(shapes, "transposed").inspect(shapes)
    with pytest.raises(ConfigError, match="'diagonal' is unknown\n  hint: use one of per_expert, stacked, transposed"):
        ExpertTensorConverter(shapes, "diagonal")


def test_experts_transposed_in_the_model_need_no_converter() -> None:
    """The model of gpt_oss has [E, H, 2I] and [E, I, H] itself."""
    own = {f"{EXPERTS}.gate_up_proj": (2, 5, 6), f"{EXPERTS}.down_proj": (2, 3, 5)}
    assert expert_targets(own) == {}
