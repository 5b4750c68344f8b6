"""Tiles of the grouped GEMMs of fused_triton, by GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from opslot._base.kernel_launch import compute_capability, shared_memory, sm_count
from opslot.ops.moe_experts.contract import Experts


@dataclass(frozen=True)
class Tiles:
    """Tiling of one GEMM: BM x BN outputs, BK per step; groups of `group` row tiles; `per_sm` CTAs per SM."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    per_sm: int = 1
    flatten: bool = False


@dataclass(frozen=True)
class GemmTiling:
    """Tiling of all six GEMMs.

    Attributes:
        align: the first row of each expert is a multiple of it; a multiple of every row GEMM's BM.
        tma: operands are tensor descriptors; requires SM90, and rows and addresses aligned to 16 bytes.
        programs: SMs of the device.
    """

    align: int
    gate_up: Tiles
    down: Tiles
    act_grad: Tiles
    input_grad: Tiles
    gate_up_grad: Tiles
    down_grad: Tiles
    tma: bool = False
    programs: int = 1


# Of the largest of the tiles below, for `gate_up` with biases.
_HOPPER_SHARED_MEMORY = 180 * 1024


def _hopper(programs: int) -> GemmTiling:
    """Within 2% of the fastest for every GEMM on an H200 at the sizes of Qwen3-30B-A3B and DeepSeek-V3.

    Measured by benchmarks/tune_moe.py. `gate_up` computes gate and up per tile, so it accumulates 2 * BN columns.
    """
    tiles = Tiles(128, 256, 64, 8, 3, group=4, flatten=True)
    return GemmTiling(
        align=128,
        gate_up=Tiles(128, 128, 64, 8, 4, group=4, flatten=True),
        down=tiles,
        act_grad=tiles,
        input_grad=tiles,
        gate_up_grad=tiles,
        down_grad=tiles,
        tma=True,
        programs=programs,
    )


def _uniform(align: int, tiles: Tiles, programs: int) -> GemmTiling:
    return GemmTiling(align, tiles, tiles, tiles, tiles, tiles, tiles, programs=programs)


def plan_for(experts: Experts, real: bool = True) -> GemmTiling:
    """The tiling for `experts`; for fake tensors (`real` is False) only `align` is correct."""
    down_proj = experts.down_proj
    capability = compute_capability(down_proj.device)
    if capability is None:
        return _uniform(64, Tiles(64, 64, 64, 4, 1), programs=3)
    programs = sm_count(down_proj.device)
    if down_proj.element_size() > 2:
        return _uniform(64, Tiles(64, 64, 32, 4, 2, per_sm=2), programs=programs)
    aligned = all(n % 8 == 0 for n in down_proj.shape[1:])
    if real:
        aligned = aligned and all(w.data_ptr() % 16 == 0 for w in (*experts.gate_up_weights, down_proj))
    if capability < (9, 0) or not aligned or shared_memory(down_proj.device) < _HOPPER_SHARED_MEMORY:
        return _uniform(128, Tiles(128, 128, 32, 8, 3), programs=programs)
    plan = _hopper(programs)
    if experts.biased or (experts.halves == 2 and not experts.transposed) or not experts.gated:
        return plan
    # With two GEMMs per step, Triton waits for each at the end of a flattened tile loop, and ptxas serializes both.
    return replace(plan, gate_up=replace(plan.gate_up, flatten=False))
