"""attention: registration of the op and of its kernels."""

import torch

from opslot.ops.attention.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelRequest, KernelSpec

_HALF = frozenset({torch.float16, torch.bfloat16})
_HERE = "opslot.ops.attention"


def _head_dim(request: KernelRequest) -> int | None:
    config = getattr(request.module, "config", None)
    if config is None:
        return None
    config = config.get_text_config()
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


def _head_dim_to(limit: int):
    def supports(request: KernelRequest) -> str | None:
        width = _head_dim(request)
        return None if width is None or width <= limit else f"serves head_dim up to {limit}, this model has {width}"

    return supports


def _flash(
    version: int, package: str, hardware: HardwareRequirement, rank: int | None, head_dim: int = 256
) -> KernelSpec:
    def factory():
        from opslot.ops.attention.flash import make_flash

        return make_flash(version)

    return KernelSpec(
        f"flash_attention_{version}",
        "attention",
        "causal",
        factory,
        hardware,
        requires=(package,),
        dtypes=_HALF,
        supports=_head_dim_to(head_dim),
        priority=None if rank is None else {"gpu": rank},
        description=f"FlashAttention {version}",
    )


KERNEL_REGISTRY.register_op(OP)
for _spec in (
    # S=8192, 32/8 heads, D=128 on an H200, forward + backward: FA4 3.51 ms, cuDNN 3.87, torch's flash 6.46.
    # FlashAttention 2 and 3 have been neither proven nor timed, so `auto` leaves them alone.
    KernelSpec(
        "sdpa",
        "attention",
        "causal",
        f"{_HERE}.sdpa:sdpa",
        priority={"gpu": 40, "cpu": 40},
        description="torch SDPA (flash or memory-efficient), packed documents by cu_seqlens",
    ),
    KernelSpec(
        "cudnn",
        "attention",
        "causal",
        f"{_HERE}.sdpa:cudnn",
        HardwareRequirement("gpu", min_compute_capability=(9, 0)),
        dtypes=_HALF,
        supports=_head_dim_to(128),
        priority={"gpu": 70},
        description="cuDNN fused attention through torch SDPA",
    ),
    # The compiled extension: FlashAttention 4 alone also makes a package flash_attn.
    _flash(2, "flash_attn_2_cuda", HardwareRequirement("gpu", (8, 0)), None),
    _flash(3, "flash_attn_interface", HardwareRequirement("gpu", (9, 0), (9, 0)), None),
    _flash(4, "flash_attn.cute", HardwareRequirement("gpu", (9, 0)), 80, head_dim=128),
    KernelSpec(
        "flex_attention",
        "attention",
        "causal",
        f"{_HERE}.flex:flex_attention",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        description="torch FlexAttention with block masks",
    ),
):
    KERNEL_REGISTRY.register(_spec)
