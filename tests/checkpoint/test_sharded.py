"""Loading and saving across two gloo processes; the functions without `test_` run on the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from opslot._base.errors import CheckpointError
from opslot.checkpoint import load_weights, save_weights
from opslot.checkpoint.tensor_slice import local_ranges

HIDDEN, INNER, EXPERTS = 6, 5, 5


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))


class Toy(nn.Module):
    """Odd sizes everywhere, so that all shards on two ranks are uneven; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, HIDDEN)
        self.experts = Experts()
        self.norm = nn.Parameter(torch.empty(HIDDEN + 1))
        self.head = nn.Linear(HIDDEN, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.empty(EXPERTS))


def checkpoint_values() -> dict[str, torch.Tensor]:
    """The values in the checkpoint of every test."""
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(7, HIDDEN, generator=generator),
        "experts.gate_up_proj": torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator),
        "experts.down_proj": torch.randn(EXPERTS, HIDDEN, INNER, generator=generator),
        "norm": torch.randn(HIDDEN + 1, generator=generator),
        "bias": torch.randn(EXPERTS, generator=generator),
    }


def sharded_toy(way: str) -> Toy:
    """A toy on meta, sharded: its experts by expert ("ep") or within each ("ep_dim1"), or all by FSDP ("fsdp")."""
    with torch.device("meta"):
        model = Toy()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    if way == "fsdp":
        return fully_shard(model, mesh=mesh)
    for name, parameter in list(model.experts.named_parameters()):
        placement = Shard(0) if way == "ep" else Shard(1)
        shard = distribute_tensor(parameter.data, mesh, [placement])
        setattr(model.experts, name, nn.Parameter(shard))
    return model


def load_on_rank(way: str, folder: str) -> dict[str, Any]:
    model = sharded_toy(way)
    report = load_weights(model, folder)
    tied = model.head.weight is model.embed.weight
    if way == "fsdp":
        model.unshard()  # FSDP uses the parameters that loading allocated
        unsharded = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
        model.reshard()
    else:
        unsharded = {}
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    kept = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters()) + model.bias.nbytes
    return {
        "whole": {name: tensor.detach().numpy() for name, tensor in {**whole, "bias": model.bias}.items()},
        "unsharded": unsharded,
        "bytes_read": report.bytes_read,
        "kept": kept,
        "tensors": report.tensors,
        "tied": tied,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {layout: tmp_path_factory.mktemp("layouts") / layout for layout in ("per_expert", "stacked", "transposed")}
    for layout, folder in made.items():
        save_weights(checkpoint_values(), folder, layout=layout, max_shard_size=900)
    return made


@pytest.mark.parametrize("layout", ["per_expert", "stacked", "transposed"])
@pytest.mark.parametrize("way", ["fsdp", "ep", "ep_dim1"])
def test_every_rank_reads_only_its_shards(ranks, folders, way: str, layout: str) -> None:
    wanted = checkpoint_values()
    answers = ranks.run(load_on_rank, way, str(folders[layout]))
    for answer in answers:
        assert answer["whole"].keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert np.array_equal(answer["whole"][name], tensor), name
        for name, tensor in answer["unsharded"].items():
            assert np.array_equal(tensor, wanted[name]), name
        assert answer["tied"]
        assert answer["bytes_read"] == answer["kept"] > 0
    if way == "ep" and layout == "per_expert":
        assert [answer["tensors"] for answer in answers] == [3 * 3 + 3, 2 * 3 + 3]


def load_without_head(folder: str) -> tuple[list[str], float]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, 2, bias=False))
    fully_shard(model)
    report = load_weights(model, folder, allow_missing=["1.*"])
    return report.missing, float(model[1].weight.full_tensor().detach().abs().max())


def test_missing_sharded_parameter_is_initialized(ranks, tmp_path) -> None:
    save_weights({"0.weight": torch.randn(HIDDEN, HIDDEN)}, tmp_path / "x")
    first, second = ranks.run(load_without_head, str(tmp_path / "x"))
    assert first == second
    missing, largest = first
    assert missing == ["1.weight"]
    assert 0 < largest <= HIDDEN**-0.5


def load_from_own_folder(folders: list[str]) -> str:
    try:
        load_weights(sharded_toy("ep"), folders[dist.get_rank()])
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_error_on_one_rank_is_raised_on_all(ranks, folders, tmp_path) -> None:
    first, second = ranks.run(load_from_own_folder, [str(folders["stacked"]), str(tmp_path / "absent")])
    assert first.startswith("rank 1: checkpoint ")
    assert "absent' is not a folder" in second


def save_on_rank(way: str, source: str, folder: str) -> str:
    model = sharded_toy(way)
    load_weights(model, source)
    try:
        save_weights(model, folder, layout="per_expert", max_shard_size=900)
    except CheckpointError as error:
        return str(error)
    dist.barrier()
    return "saved"


@pytest.mark.parametrize("way", ["fsdp", "ep", "ep_dim1"])
def test_saving_from_any_mesh_gives_the_same_folder(ranks, folders, tmp_path, way: str) -> None:
    assert ranks.run(save_on_rank, way, str(folders["transposed"]), str(tmp_path / "x")) == ["saved", "saved"]

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}

    found, wanted = tensors(tmp_path / "x"), tensors(folders["per_expert"])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def save_mixtral(folder: str) -> str:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        bos_token_id=1,
        eos_token_id=2,
    )
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}-whole")
    fully_shard(model, mesh=mesh)
    save_weights(model, folder, max_shard_size="5KB")
    dist.barrier()
    return "saved"


def test_sharded_mixtral_is_saved_under_the_names_of_the_hub(ranks, tmp_path) -> None:
    assert ranks.run(save_mixtral, str(tmp_path / "x")) == ["saved", "saved"]

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}

    found, wanted = tensors(tmp_path / "x"), tensors(tmp_path / "x-whole")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def save_tied(folder: str) -> str:
    """A tied weight of one row, so the shard of the second rank is empty."""
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False), nn.Linear(3, 4))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.fill_(i + 1.0)
    model[1].weight = model[0].weight
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    save_weights(model, folder)
    # Different tensor objects, as in state dicts of torch's DCP.
    save_weights({name: tensor.detach() for name, tensor in model.state_dict().items()}, f"{folder}-state")
    dist.barrier()
    return "saved"


def test_tied_weight_with_an_empty_shard(ranks, tmp_path) -> None:
    assert ranks.run(save_tied, str(tmp_path / "x")) == ["saved", "saved"]
    for folder in (tmp_path / "x", tmp_path / "x-state"):
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        assert {name: tensor.unique().tolist() for name, tensor in tensors.items()} == {
            "0.weight": [1.0],
            "2.weight": [3.0],
            "2.bias": [4.0],
        }


def fail_while_saving(source: str, folder: str) -> str:
    fsync, os.fsync = os.fsync, _full_disk
    try:
        return save_on_rank("fsdp", source, folder)
    finally:
        os.fsync = fsync


def _full_disk(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_full_disk_on_rank_0_raises_on_all(ranks, folders, tmp_path) -> None:
    first, second = ranks.run(fail_while_saving, str(folders["stacked"]), str(tmp_path / "x"))
    assert "cannot be written: No space left on device" in first
    assert first.startswith("rank 0: ")
    assert second == first
    assert list(tmp_path.iterdir()) == []


def regions_on_rank() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for shape, placement in (((5, 3), Shard(0)), ((5, 3), Shard(1)), ((1, 3), Shard(0)), ((5, 3), Replicate())):
        tensor = distribute_tensor(torch.arange(shape[0] * shape[1]).view(shape), mesh, [placement])
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        assert torch.equal(whole[local_ranges(tensor)], tensor.to_local())
        found.append(str([(r.start, r.stop) for r in local_ranges(tensor)]))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(CheckpointError, match="partial DTensor"):
        local_ranges(partial)
    return found


def test_local_ranges_of_dtensors(ranks) -> None:
    first, second = ranks.run(regions_on_rank)
    assert first == ["[(0, 3), (0, 3)]", "[(0, 5), (0, 2)]", "[(0, 1), (0, 3)]", "[(0, 5), (0, 3)]"]
    assert second[:2] == ["[(3, 5), (0, 3)]", "[(0, 5), (2, 3)]"]
    assert second[3] == "[(0, 5), (0, 3)]"


def test_local_ranges_of_a_plain_tensor() -> None:
    assert local_ranges(torch.empty(2, 3)) == (slice(0, 2), slice(0, 3))
    assert local_ranges(torch.empty(())) == ()
