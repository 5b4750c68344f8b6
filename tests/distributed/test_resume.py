"""Resume a checkpoint on another mesh: the losses equal those of an uninterrupted run."""

import pytest
import torch

from tests.distributed import tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MESHES = {
    "one": None,
    "fsdp": {},
    "ep": {"ep": 2},
    "sp and ep": {"sp": 2, "ep": 2},
    "hsdp": {"dp_replicate": 2},
    "ddp": {},
}


def on_ranks(sizes, kwargs):
    return tiny.train("qwen3_moe", sizes, micro_batches=2, ops="auto", **kwargs)


def train(ranks, mesh, **kwargs):
    sizes = MESHES[mesh]
    if mesh == "ddp":
        kwargs["options"] = {"data_parallel_mode": "ddp"}
    return on_ranks(None, kwargs) if sizes is None else ranks.run(on_ranks, sizes, kwargs)[0]


@pytest.fixture(scope="module")
def whole():
    """An uninterrupted run."""
    return torch.tensor(on_ranks(None, {"steps": 5}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("fsdp", "one", marks=pytest.mark.slow),
        pytest.param("one", "fsdp", marks=pytest.mark.slow),
        pytest.param("ep", "one", marks=pytest.mark.slow),
        pytest.param("one", "ep", marks=pytest.mark.slow),
        ("ep", "fsdp"),
        pytest.param("sp and ep", "hsdp", marks=pytest.mark.slow),
        pytest.param("hsdp", "ep", marks=pytest.mark.slow),
        ("ddp", "fsdp"),
        pytest.param("ep", "ddp", marks=pytest.mark.slow),
        pytest.param("ddp", "one", marks=pytest.mark.slow),
        pytest.param("one", "ddp", marks=pytest.mark.slow),
    ],
)
def test_resume_on_another_mesh_has_the_same_losses(ranks, whole, tmp_path, before, after):
    first = train(ranks, before, steps=3, save=str(tmp_path))
    rest = train(ranks, after, steps=5, load=str(tmp_path))
    torch.testing.assert_close(torch.tensor(first + rest), whole, rtol=1e-5, atol=0)
