"""attention: registration of the op and of its kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opslot.ops._common.model_config import text_config
from opslot.ops._common.specs import CUTLASS, H200, HALF_FLOATS, TRITON, add_gpu_kernel, add_kernel, add_triton_kernel
from opslot.ops.attention.op import OP
from opslot.ops.attention.options import NARROW_WINDOW, options_of
from opslot.ops.attention.widths import padded_widths, widest_head
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelRequest, Requirement

Supports = Callable[[KernelRequest], str | None]


def _head_dim_up_to(request: KernelRequest, limit: int = 256) -> str | None:
    widest = max((max(widths) for widths in options_of(request).widths), default=0)
    return None if widest <= limit else f"supports head_dim up to {limit}, this model has {widest}"


def _head_dims_of_triton(request: KernelRequest) -> str | None:
    return _head_dim_up_to(request, widest_head(request.dtype))


def _head_dim_from_16(request: KernelRequest) -> str | None:
    narrowest = min((min(widths) for widths in options_of(request).widths), default=16)
    return None if narrowest >= 16 else f"supports head_dim from 16, this model has {narrowest}"


def _head_dims_of_flash_4(request: KernelRequest) -> str | None:
    limit = 256 if request.device.capability == (9, 0) else 128
    options = options_of(request)
    for width, value_width in sorted(options.widths):
        padded = padded_widths(4, width, value_width, grouped=options.grouped)
        if padded is None or max(padded) > limit:
            return f"supports head_dim up to {limit} on {request.device}, this model has {max(width, value_width)}"
    return None


def _allowed(flag: str) -> Supports:
    """Transformers' flag for whether the architecture supports this kind of kernel; it does not say why, so checks of
    what the kernel lacks come first."""

    def supports(request: KernelRequest) -> str | None:
        if getattr(request.module, flag, True):
            return None
        return f"Transformers does not let {type(request.module).__name__} use it ({flag} is False)"

    return supports


def _no_softcap(request: KernelRequest) -> str | None:
    softcap = options_of(request).softcap
    return None if softcap is None else f"has no softcap, this model's is {softcap}"


def _no_sinks(request: KernelRequest) -> str | None:
    return "has no attention sinks, this model has them" if options_of(request).sinks else None


def _no_sinks_in_float16(request: KernelRequest) -> str | None:
    has_sinks = request.dtype == torch.float16 and options_of(request).sinks
    return "has attention sinks in bfloat16 only" if has_sinks else None


def _no_deterministic_backward(request: KernelRequest) -> str | None:
    if getattr(request.config, "deterministic_flash_attn", False):
        return "has no deterministic backward, which this model's deterministic_flash_attn asks for"
    return None


def _no_dropout(request: KernelRequest) -> str | None:
    dropout = options_of(request).dropout
    return f"has no dropout, this model's attention_dropout is {dropout}" if dropout else None


def _no_dropout_on_cpu(request: KernelRequest) -> str | None:
    return _no_dropout(request) if request.device.type == "cpu" else None


def _all_of(*checks: Supports) -> Supports:
    def supports(request: KernelRequest) -> str | None:
        return next((reason for check in checks if (reason := check(request))), None)

    return supports


# Priorities from benchmarks/results/bench_h200.json. On the H200, FlashAttention 4 is the fastest at 8192 tokens
# (6.57 ms; sdpa 7.20, cudnn 7.07) and nearly twice as fast on packed documents (1.64 ms; sdpa 2.93); at 1024 tokens all
# three take 1.40 ms. torch 2.11's SDPA selects cuDNN there by default, unlike some other releases. FlashAttention 2 and
# 3 were not measured in that run.
#
# Forward and backward in ms at 2 x 8192 tokens, bf16, causal, of triton, FlashAttention 4 and torch's FlashAttention 2,
# which sdpa and cudnn take for windows and packed documents:
#   head size 256, 16/8 heads                 10.4  10.9  14.8
#   head size 256, 16/8 heads, window 1024    3.13  3.23  4.15
#   head size 64, 64/8 heads, window 128      0.86  1.19  1.76
#   head size 128, 32/8 heads, 16 documents   1.96  1.64  2.95
#   head sizes 192 and 128, 16 heads          6.26  4.98  not supported
#   the same, 64/4 heads, padded to 256       23.8  44.5  not measured
#   the same, 64/8 heads, window 128, sinks   3.20  not measured  not supported
#   head size 64, 64/8 heads, sinks           10.5  7.91  not supported
# Of head size 512, 16/2 heads, 8192 tokens: triton 36.7 ms, sdpa (memory-efficient, with repeated keys) 80.2.
# In documents of one length, 40,960 tokens, 16 heads, bf16, not causal, of FlashAttention 4 and triton:
#   tokens          64          256         576         1024        2048        4096
#   head size 64    2.91, 0.89  1.12, 0.95  1.33, 1.56  1.66, 2.12  2.66, 3.82  4.99, 7.30
#   head size 72    4.41, 1.08  2.75, 1.48  2.97, 2.40  3.56, 3.49  4.81, 6.31  7.78, 11.7
# In rows of one length, 16 heads of 72, not causal, of FlashAttention 4, triton and cudnn:
#   rows            8 x 256              32 x 256             128 x 256           32 x 729          1 x 4096
#                   0.10, 0.09, 0.07     0.37, 0.33, 0.24     1.39, 1.23, 0.90    1.38, 1.79, 1.28  0.72, 1.28, 0.86
# and 12 heads of 64: 64 x 128 0.130, 0.144, 0.123, 32 x 512 0.35, 0.50, 0.37. Each call of cudnn takes a third of the
# others' time on the host.
# Without windows and documents, cudnn is faster than triton: 6.95 and 9.9 ms with heads of 128. Of triton and cudnn,
# 16/4 heads, 16,384 tokens:
#   rows of tokens  512           1024          2048          4096          8192          32768 (alone)
#   head size 256   1.29, 1.17    1.90, 1.63    3.15, 2.59    5.68, 4.51    10.8, 8.57    87.0, 70.2
#   head size 192                                                           9.57, 7.30
#   head size 160                                                           9.39, 7.27
#   head size 224, 16 heads                                                 11.6, 8.52
#   256, 16/8 heads, not causal                               11.0, 8.48
# Of triton and FlashAttention 4 with causal windows, 2 x 8192 tokens:
#   window          128           256           512           1024          2048          4096
#   64, 32/8 heads  0.43, 0.63    0.57, 0.73    0.92, 0.93    1.46, 1.34    2.44, 2.06
#   64, 64/8, sinks 0.84, 1.24    1.14, 1.46    1.86, 1.85    2.92, 2.68    4.87, 4.10
#   128, 32/8 heads 0.89, 1.04    1.15, 1.17    1.68, 1.47    2.66, 2.10    4.46, 3.28    7.39, 5.25
# With windows to both sides, of 64, 128 and 256, 12 heads of 64: 0.25 and 0.26, 0.32 and 0.27, 0.44 and 0.35.


def _triton_priority(request: KernelRequest) -> int:
    """Above FlashAttention 4 for head size 256, or padded to it, and above cuDNN where that takes FlashAttention 2, for
    windows.

    On other GPUs, where its tiles are not tuned, below SDPA, which does not serve sinks and softcap.
    """
    if request.device.capability != H200:
        return 30
    options = options_of(request)
    if max((max(widths) for widths in options.widths), default=0) > (128 if options.grouped else 192):
        return 85
    return 75 if options.windows or getattr(text_config(request), "sliding_window", None) is not None else 60


def _flash_4_priority(request: KernelRequest) -> int:
    """Below triton with a softcap, with which its backward takes no packed documents."""
    return 80 if options_of(request).softcap is None else 50


def _flash_4_or_triton_priority(request: KernelRequest) -> int | None:
    """With causality only for narrow windows: short documents were not measured."""
    if request.variant == "bidirectional":
        return 85
    return 82 if any(window <= NARROW_WINDOW for window in options_of(request).windows) else None


def _cudnn_or_triton_priority(request: KernelRequest) -> int | None:
    """Above `triton` for the head sizes whose errors were compared on an H200 and that FlashAttention 4 pads to 256.

    Times of sizes below 256 were measured with causality, at 8192 tokens.
    """
    options = options_of(request)
    sizes = (160, 192, 224, 256) if options.grouped else (224, 256)
    return 86 if options.widths and options.widths <= {(size, size) for size in sizes} else None


def _sparse_priority(request: KernelRequest) -> int | None:
    """Of compressed and selected keys; not measured in float32."""
    return 80 if request.dtype in HALF_FLOATS else None


def _flash(
    version: int,
    packages: tuple[Requirement | str, ...],
    capability: tuple[int, int],
    *supports: Supports,
    **options: Any,
) -> None:
    def factory() -> Callable[..., Any]:
        from opslot.ops.attention.flash import make_flash

        return make_flash(version)

    add_kernel(
        OP,
        f"flash_attention_{version}",
        factory,
        _OF_ALL_KEYS,
        hardware=HardwareRequirement("gpu", capability, (9, 0) if version == 3 else None),
        requires=packages,
        dtypes=HALF_FLOATS,
        supports=_all_of(*supports, _allowed("_supports_flash_attn")),
        description=f"FlashAttention {version}",
        **options,
    )


def _flash_4_or_triton() -> Callable[..., Any]:
    from opslot.ops.attention.by_call import flash_4_or_triton

    return flash_4_or_triton()


_OF_ALL_KEYS = ("causal", "bidirectional")
# Triton, for the gradient of sinks.
_FLASH_4 = (Requirement("flash_attn.cute", "flash-attn-4"), CUTLASS, TRITON)
_SUPPORTS_OF_FLASH_4 = (_head_dims_of_flash_4, _no_sinks_in_float16, _no_deterministic_backward, _no_dropout)

KERNEL_REGISTRY.register_op(OP)
add_kernel(
    OP,
    "sdpa",
    "sdpa:sdpa",
    _OF_ALL_KEYS,
    supports=_all_of(_no_softcap, _no_sinks, _no_dropout_on_cpu, _allowed("_supports_sdpa")),
    priority={H200: 40, "cpu": 40},
    portable=True,
    description="torch SDPA (flash or memory-efficient), packed documents by cu_seqlens",
)
add_gpu_kernel(
    OP,
    "cudnn",
    "sdpa:cudnn",
    (),
    _OF_ALL_KEYS,
    capability=(9, 0),
    dtypes=HALF_FLOATS,
    supports=_all_of(_head_dim_up_to, _no_softcap, _no_sinks, _allowed("_supports_sdpa")),
    priority={H200: 70},
    description="cuDNN fused attention through torch SDPA",
)
# The compiled extension, since FlashAttention 4 without it also installs a package flash_attn.
_flash(2, ("flash_attn_2_cuda",), (8, 0), _head_dim_up_to, _no_sinks)
_flash(3, ("flash_attn_interface",), (9, 0), _head_dim_up_to, _no_sinks, _no_dropout)
_flash(4, _FLASH_4, (9, 0), *_SUPPORTS_OF_FLASH_4, priority={H200: _flash_4_priority})
add_gpu_kernel(
    OP,
    "flash_attention_4_or_triton",
    _flash_4_or_triton,
    _FLASH_4,
    _OF_ALL_KEYS,
    capability=(9, 0),
    dtypes=HALF_FLOATS,
    supports=_all_of(*_SUPPORTS_OF_FLASH_4, _no_softcap, _allowed("_supports_flash_attn")),
    priority={H200: _flash_4_or_triton_priority},
    description="FlashAttention 4; triton for narrow causal windows and, without causality, short documents; cudnn for "
    "short rows",
)
add_gpu_kernel(
    OP,
    "cudnn_or_triton",
    "by_call:cudnn_or_triton",
    (TRITON,),
    _OF_ALL_KEYS,
    capability=(9, 0),
    dtypes=HALF_FLOATS,
    supports=_all_of(_head_dim_up_to, _no_softcap, _no_sinks, _no_dropout, _allowed("_supports_sdpa")),
    priority={H200: _cudnn_or_triton_priority},
    description="Triton, and cuDNN for long rows without documents, padding and windows",
)
add_triton_kernel(
    OP,
    _OF_ALL_KEYS,
    factory="triton:attention",
    supports=_all_of(_head_dims_of_triton, _no_dropout),
    priority={H200: _triton_priority},
    description="Triton, with windows, sinks, softcap, packed documents and unequal head sizes",
)
add_triton_kernel(
    OP,
    ["indexed"],
    factory="triton:attention",
    supports=_all_of(_head_dims_of_triton, _no_dropout),
    # 128 heads of 192 and 128 in bf16 on an H200, 2048 of 8192 keys: 9.5 ms forward and 38.9 ms with backward, where
    # SDPA with a mask takes 14.2 and 82.3; at 16384 tokens 42.4 and 160, SDPA 59.7 and 341.
    priority={H200: _sparse_priority},
    description="Triton, reads the keys of each query as bits and skips tiles without any",
)
add_triton_kernel(
    OP,
    ["compressed"],
    factory="compressed:attention",
    supports=_all_of(partial(_head_dim_up_to, limit=512), _no_dropout),
    # 64 heads of 512 in bf16 on an H200, 4096 tokens, forward and backward (timed apart and added up): a window of 128
    # in 2.4 ms, with 512 of 1024 keys 7.6, with 32 keys 3.2; eager takes 54, 66 and 54.
    priority={H200: _sparse_priority},
    description="Triton, reads the window and the selected keys of each query",
)
# Slower than `triton`, so `auto` never selects it.
add_triton_kernel(
    OP,
    _OF_ALL_KEYS,
    name="batch_invariant",
    factory="batch_invariant:attention",
    supports=_all_of(_head_dims_of_triton, _no_dropout),
    description="triton, with results that do not depend on the other documents",
)
add_kernel(
    OP,
    "flex_attention",
    "flex:flex_attention",
    _OF_ALL_KEYS,
    hardware=HardwareRequirement("gpu", min_compute_capability=(8, 0)),
    supports=_all_of(_head_dim_from_16, _head_dim_up_to, _no_sinks, _no_dropout, _allowed("_supports_flex_attn")),
    description="torch FlexAttention with block masks",
)
