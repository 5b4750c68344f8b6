"""Five steps on two and four GPUs with NCCL, computed in bfloat16, for every axis and every attention kernel.

The reference is one GPU in float32 with eager kernels. The error on several GPUs is at most twice that of bfloat16 on
one GPU, plus eps, like the tolerance of kernels (`opslot.verify.parity`).
"""

import functools

import pytest
import torch

from opslot._base.device import facts_of
from opslot._base.errors import ConfigError
from opslot.slots import KERNEL_REGISTRY, KernelRequest
from tests.distributed import tiny

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.multigpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two or more CUDA GPUs, found {GPUS}")]

# Kernels compile in every process on first use.
_TIMEOUT = 300
_ROUNDING = torch.finfo(torch.bfloat16).eps / 2
_WIDTHS = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LENGTH = 256
_DOCUMENTS = (40, 150, 66)


def needs(world):
    if world > GPUS:
        pytest.skip(f"needs {world} CUDA GPUs, found {GPUS}")


def on_ranks(name, sizes, kwargs):
    return tiny.train(name, sizes, device="cuda", lr=1e-3, scale=0.05, length=_LENGTH, micro_batches=4, **kwargs)


def run(ranks, world, name, sizes, dtype=torch.bfloat16, **kwargs):
    """[steps, 2] losses and gradient norms, the same on every rank."""
    changes = {**_WIDTHS, **(_EXPERTS if "moe" in name else {}), **kwargs.pop("changes", {})}
    # Models so small would not be sharded.
    mode = {"data_parallel_mode": "fsdp2"} if world > 1 else {}
    options = {**mode, **kwargs.pop("options", {}), **({"param_dtype": dtype} if dtype is not torch.float32 else {})}
    arguments = {**kwargs, "changes": changes, "options": options}
    found = ranks.run(on_ranks, name, sizes, arguments, world=world, timeout=_TIMEOUT)
    assert all(history == found[0] for history in found)
    return torch.tensor(found[0])


_references = {}


def check(ranks, world, name, sizes, found=None, **kwargs):
    needs(world)
    alone = {key: value for key, value in kwargs.items() if key != "options"}
    key = repr((name, alone))
    if key not in _references:
        expected = run(ranks, 1, name, {}, torch.float32, **{**alone, "ops": "eager"})
        _references[key] = expected, (run(ranks, 1, name, {}, **alone) - expected).abs().amax(0)
    expected, error = _references[key]
    assert expected[0, 1] > 1e-2
    assert expected[-1, 0] < expected[0, 0]
    found = run(ranks, world, name, sizes, **kwargs) if found is None else found
    allowed = 2 * error + _ROUNDING * expected.abs()
    assert ((found - expected).abs() <= allowed).all(), f"\nfound\n{found}\nreference\n{expected}\nallowed\n{allowed}"


@pytest.mark.parametrize("sizes", [{}, {"sp": 2}, {"dp_replicate": 2}], ids=str)
def test_dense_on_two(ranks, sizes):
    check(ranks, 2, "qwen3", sizes, ops="auto")


@pytest.mark.parametrize("sizes", [{}, {"sp": 2}], ids=str)
@pytest.mark.parametrize(("name", "options"), [("qwen3", {"compile": True}), ("qwen3_moe", {})], ids=str)
def test_all_parameters_on_each_of_two(ranks, name, sizes, options):
    check(ranks, 2, name, sizes, ops="auto", options={"data_parallel_mode": "auto"} | options)


@pytest.mark.parametrize("sizes", [{}, {"ep": 2}, {"sp": 2, "ep": 2}], ids=str)
def test_experts_on_two(ranks, sizes):
    check(ranks, 2, "qwen3_moe", sizes, ops="auto", aux_loss=True)


@pytest.mark.parametrize(
    "sizes", [{}, {"ep": 4}, {"sp": 4, "ep": 4}, {"sp": 2, "ep": 2}, {"dp_replicate": 2, "ep": 2}], ids=str
)
def test_experts_on_four(ranks, sizes):
    check(ranks, 4, "qwen3_moe", sizes, ops="auto", aux_loss=True)


@pytest.mark.parametrize("sizes", [{}, {"ep": 2}, {"sp": 2}], ids=str)
def test_compiled_layers_on_two(ranks, sizes):
    check(ranks, 2, "qwen3_moe", sizes, ops="auto", options={"compile": True})


@pytest.mark.parametrize("kernel", ["fused_quack", "fused_triton", "grouped_mm"])
def test_named_kernel_of_experts_on_two(ranks, kernel):
    if kernel == "fused_quack":
        pytest.importorskip("quack")
    check(ranks, 2, "qwen3_moe", {"ep": 2}, ops={"moe_implementation": kernel})


@pytest.mark.parametrize("options", [{"copy_engine": False}, {"copy_engine": True}], ids=str)
@pytest.mark.parametrize(("name", "sizes"), [("qwen3", {}), ("qwen3_moe", {"ep": 2})], ids=str)
def test_nccl_and_copy_engine_collectives(ranks, name, sizes, options):
    """On four GPUs with ep=2, two ranks share each expert's parameters."""
    check(ranks, 2 if name == "qwen3" or GPUS < 4 else 4, name, sizes, ops="auto", options=options)


@functools.cache
def unsupported(attention):
    request = KernelRequest("attention", "causal", facts_of(torch.device("cuda")), torch.bfloat16)
    try:
        KERNEL_REGISTRY.resolve(request, attention)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None


@pytest.mark.parametrize("documents", [(), _DOCUMENTS], ids=["whole rows", "documents"])
@pytest.mark.parametrize(
    "attention",
    ["eager", "sdpa", "cudnn", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"],
)
def test_ulysses_attention(ranks, attention, documents):
    reason = unsupported(attention)
    if reason:
        pytest.skip(reason)
    ops = {"preset": "eager", "attn_implementation": attention}
    check(ranks, 2, "qwen3", {"sp": 2}, steps=3, ops=ops, documents=documents)


@pytest.mark.parametrize("options", [{"ulysses_overlap": True}, {"ulysses_pipeline": 2}], ids=str)
def test_overlapped_all_to_all(ranks, options):
    check(ranks, 2, "qwen3", {"sp": 2}, ops="auto", options=options)


def test_ranks_without_tokens(ranks):
    check(ranks, 2, "qwen3_moe", {"ep": 2}, ops="auto", one_expert_for_all=True)


def test_resume_on_fewer_ranks(ranks, tmp_path):
    needs(4)
    first = run(ranks, 4, "qwen3_moe", {"ep": 2}, ops="auto", aux_loss=True, steps=3, save=str(tmp_path))
    rest = run(ranks, 2, "qwen3_moe", {"ep": 2}, ops="auto", aux_loss=True, load=str(tmp_path))
    check(ranks, 2, "qwen3_moe", {"ep": 2}, torch.cat([first, rest]), ops="auto", aux_loss=True)
