"""Initial values: those of Transformers, and equal on every mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from opslot._base.errors import CheckpointError
from opslot.checkpoint.initialize import MeshFreeDraws, initialize, initialize_weights
from opslot.verify.random_model import class_of
from opslot.verify.tiny import tiny_config


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 1024, 512))


class Toy(nn.Module):
    """A padding row, a tied head, odd sizes, log-uniform decays, a buffer, a parameter combined with a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=5)
        self.experts = Experts()
        self.norm = nn.RMSNorm(7)
        self.batch_norm = nn.BatchNorm1d(4)
        self.decay = nn.Parameter(torch.empty(5))
        self.slopes = nn.Parameter(torch.empty(3, 2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.empty(3), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
            nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, Experts):
            nn.init.normal_(module.gate_up_proj, std=0.02)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Toy):
            module.decay.copy_(torch.empty_like(module.decay).uniform_(1, 16).log_())
            module.slopes.copy_(torch.arange(6.0).view(3, 2) + torch.randn(3, 2))
            module.frequencies.copy_(torch.arange(3.0))


def toy(way: str = "plain") -> Toy:
    """A toy on meta; sharded by FSDP, its experts by expert or within each expert."""
    with torch.device("meta"):
        model = Toy()
    if way == "plain":
        return model
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if way == "ep":
        part = model.experts.gate_up_proj.detach().chunk(mesh.size(), 0)[0].clone()
        model.experts.gate_up_proj = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
        return model
    fully_shard(model.experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=mesh)
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in named.items()}


class Allocations(TorchDispatchMode):
    """Records the bytes of the largest tensor that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not isinstance(out, DTensor) and not out.is_meta:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def on_ranks(way: str) -> tuple[dict[str, np.ndarray], int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = toy(way)
    with Allocations() as allocations:
        initialize_weights(model, 3)
    assert model.head.weight is model.embed.weight
    return {name: value.detach().numpy() for name, value in values(model).items()}, allocations.largest


@pytest.mark.parametrize("way", ["fsdp", "ep"])
def test_initialization_does_not_depend_on_the_mesh(ranks: Any, way: str) -> None:
    single = toy()
    initialize_weights(single, 3)
    wanted = values(single)
    for found, largest in ranks.run(on_ranks, way):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert np.array_equal(found[name], value.detach()), name
        # Half of the experts, or a block of a million values; all of them would be twice that.
        assert largest == 4 << 20


def test_initialization_follows_the_model() -> None:
    model = toy()
    initialize_weights(model, 0)
    model.requires_grad_(False)
    assert torch.equal(model.embed.weight[5], torch.zeros(6))
    # Of the embedding, not of the tied head.
    assert model.embed.weight[:5].std().item() == pytest.approx(0.5, rel=0.4)
    experts = model.experts.gate_up_proj
    assert experts.std().item() == pytest.approx(0.02, rel=2e-3)
    assert experts.mean().item() == pytest.approx(0, abs=1e-4)
    assert not torch.equal(experts[0], experts[1])
    assert not torch.equal(experts[0, :512], experts[0, 512:])
    assert 0 <= model.decay.min() < model.decay.max() <= 2.78
    assert torch.equal(model.frequencies, torch.arange(3.0))
    # `_init_weights` does not know it.
    assert torch.equal(model.batch_norm.weight, torch.ones(4))
    assert torch.equal(model.batch_norm.running_var, torch.ones(4))
    assert model.batch_norm.num_batches_tracked == 0


def test_initialization_depends_only_on_the_seed() -> None:
    def draw(seed: int | None) -> torch.Tensor:
        model = toy()
        initialize_weights(model, seed)
        return torch.cat([value.flatten() for value in values(model).values()])

    torch.manual_seed(1)
    first = draw(5)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(first, draw(5))
    assert not torch.equal(first, draw(6))
    assert torch.equal(draw(None), draw(torch.initial_seed()))


def test_kernels_of_one_element_are_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[int, ...]] = []
    derive = MeshFreeDraws._derive
    monkeypatch.setattr(MeshFreeDraws, "_derive", lambda draws, *place: (seeds.append(place), derive(draws, *place))[1])
    convolution = torch.nn.Conv2d(8, 6, 1, bias=False)
    MeshFreeDraws(0).run("", convolution, None)
    assert len(seeds) == 1
    assert convolution.weight.unique().numel() == convolution.weight.numel()


def test_only_modules_with_missing_tensors_are_initialized() -> None:
    """Otherwise loading would first initialize all weights, only for the frequencies of a rotary embedding."""
    model = toy()
    initialize_weights(model, 0)
    before = {name: value.detach().clone() for name, value in values(model).items()}
    seen: list[nn.Module] = []
    model._init_weights = seen.append  # type: ignore[method-assign]
    initialize(model, [], [])
    assert seen == []
    with pytest.raises(CheckpointError, match="frequencies"):
        initialize(model, [], ["frequencies"])
    assert seen == [model]
    after = values(model)
    assert all(torch.equal(after[name], value) for name, value in before.items() if name != "frequencies")


def test_model_that_sets_a_buffer_of_a_module_below() -> None:
    """As Falcon-H1 does: the module itself has no function for it."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Toy()
            self.inner.norm.register_buffer("scales", torch.empty(7), persistent=False)
            self.other = nn.Linear(2, 2)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Outer):
                module.inner.norm.scales.copy_(torch.arange(7.0))

    with torch.device("meta"):
        model = Outer()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.other.weight.fill_(5.0)
    initialize(model, [], ["inner.norm.scales"], 0)
    assert model.inner.norm.scales.tolist() == list(range(7))
    assert model.other.weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]


class Merger(nn.Module):
    """With a method that has the name of Transformers' and takes no module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def _init_weights(self) -> None:
        raise AssertionError("not a model's")


def test_method_of_another_kind_is_not_called() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Merger())
    initialize_weights(model, 0)
    assert 0 < model.get_parameter("0.linear.weight").abs().max() <= 3**-0.5


class SetsNoBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.others = nn.ModuleList([self.linear])

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2)


def test_module_held_twice_and_set_in_part_keeps_what_the_model_sets() -> None:
    with torch.device("meta"):
        model = SetsNoBias()
    initialize_weights(model, 0)
    assert torch.equal(model.linear.weight, torch.full((4, 3), 2.0))
    assert 0 < model.linear.bias.abs().max() <= 3**-0.5


@pytest.mark.parametrize("arch", ["apertus", "modernbert-decoder", "youtu"])
def test_values_on_meta_are_those_of_transformers(arch: str) -> None:
    """xIELU's parameters, which only constructors compute, and embeddings tied to heads that have other values."""
    config = tiny_config(arch)
    config.tie_word_embeddings = True
    expected = values(class_of(config)._from_config(config))
    with torch.device("meta"):
        model = class_of(config)._from_config(config)
    initialize_weights(model, 0)
    found = values(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.numel() > 1 and value.std() > 0:
            assert found[name].std().item() == pytest.approx(value.std().item(), rel=0.3), name
        else:
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_parameter_without_initialization_raises() -> None:
    class Forgetful(Toy):
        def _init_weights(self, module: nn.Module) -> None:
            if not isinstance(module, Experts):
                super()._init_weights(module)

    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(CheckpointError, match=r"cannot initialize by itself \(1\):\n- experts.gate_up_proj"):
        initialize_weights(model)
