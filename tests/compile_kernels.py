"""Compile the Triton kernels of an op for NVIDIA GPUs, on a machine without one.

    python -m tests.compile_kernels OP [SIZE=VALUE ...]
    python -m tests.compile_kernels resize_heads

For each GPU, kernels run with its tiles, forward and backward, and their launches compile instead of running: the first
input case of each variant, and those for benchmarks, whose tensors are on the meta device and take no memory (where
they cannot be, all cases for checks). Sizes replace those of `benchmark_case`, such as head_dim=256, for variants
that have one. Prints one line per failed compilation or call, and per kernel with more shared memory than the GPU has,
and the number of compiled kernels last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# Compute capabilities, and the bytes of shared memory that a CTA may have. Ampere's are as (8, 9), with 163 KiB.
SHARED_MEMORY = {(8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10}
TOKENS = 8192


_ALIGNED = [["tt.divisibility", 16]]


class Compiler:
    """Replaces `JITFunction.run`: compiles each new form of a kernel for the GPU of `capability`."""

    def __init__(self) -> None:
        self.capability = (9, 0)
        self.forms: set[str] = set()
        self.failures: list[str] = []

    def run(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        signature: dict[str, Any] = {}
        constants, aligned = {}, {}
        for position, parameter in enumerate(kernel.params):
            value = values.get(parameter.name, parameter.default)
            specialized = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (specialized and type(value) is int and value == 1):
                signature[parameter.name] = "constexpr"
                constants[position,] = value
            elif isinstance(value, tuple):
                signature[parameter.name] = tuple(map(mangle_type, value))
                aligned |= {(position, i): _ALIGNED for i in range(len(value))}
            else:
                signature[parameter.name] = mangle_type(value)
                # Tensors are aligned.
                if isinstance(value, Tensor) or (specialized and type(value) is int and value % 16 == 0):
                    aligned[position,] = _ALIGNED
        name = f"sm_{self.capability[0]}{self.capability[1]} {kernel.fn.__name__}"
        form = f"{name} {signature} {constants} {list(aligned)} {options}"
        if form not in self.forms:
            self.forms.add(form)
            self.compile(kernel, ASTSource(kernel, signature, constants, aligned), options, form)

    def compile(self, kernel: Any, source: Any, options: dict[str, Any], form: str) -> Any:
        import triton
        from triton.backends.compiler import GPUTarget

        major, minor = self.capability
        try:
            found = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=dict(options))
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {str(error)[-300:]} in {form}")
            return None
        if found.metadata.shared > SHARED_MEMORY[self.capability]:
            self.failures.append(f"{found.metadata.shared} bytes of shared memory in {form}")
        return found


class DrawnOnDevice(Exception):
    """A large case draws random numbers on its device, which the meta device cannot."""


class Launched:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: None


def prepare(compiler: Compiler) -> None:
    """Replace launches, the facts of the GPU and random numbers, before the modules of ops import them."""
    from triton.runtime.jit import JITFunction

    from opslot._base import kernel_launch
    from opslot.slots import random_inputs

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Launched:
        compiler.run(kernel, args, kwargs)
        return Launched()

    def launch(launcher: Any, grid: Any, tensors: Any, strides: Any, scalars: Any, constants: Any, warps: int) -> None:
        launcher._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps, **launcher._options)

    def randn(shape: Any, dtype: torch.dtype, device: torch.device, generator: Any, scale: float = 1.0) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
        raise DrawnOnDevice

    JITFunction.run = run
    kernel_launch.KernelLauncher.__call__ = launch
    kernel_launch.sm_count = lambda device: 132
    kernel_launch.compute_capability = lambda device: compiler.capability
    kernel_launch.shared_memory = lambda device: SHARED_MEMORY[compiler.capability]
    random_inputs.randn = randn
    random_inputs.on_device = on_device
    # It raises for the meta device.
    torch.is_autocast_enabled = lambda *device: False


def calls(op: str, variant: Any, dtype: torch.dtype, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """The arguments of the calls to compile."""
    generator = torch.Generator().manual_seed(0)
    if sizes:
        if variant.benchmark_case is None:
            return
        shape = next(case.shape for case in variant.cases if case.shape)
        yield variant.benchmark_case({**shape, **sizes}, TOKENS).make(dtype, torch.device("meta"), generator)
        return
    checks = [case for case in variant.cases if case.role == "check"]
    widest = widest_case(op, variant.name)
    try:
        large = [case.make(dtype, torch.device("meta"), generator) for case in variant.cases if case.role == "bench"]
    except DrawnOnDevice:
        large = [case.make(dtype, torch.device("cpu"), generator) for case in checks[1:]]
    yield checks[0].make(dtype, torch.device("cpu"), generator)
    yield from large
    # In fp32 they take minutes to compile.
    if widest is not None and dtype == torch.bfloat16:
        yield widest.make(dtype, torch.device("meta"), generator)


def widest_case(op: str, variant: str) -> Any:
    """The widest heads of an op whose other cases are narrower, or None."""
    if op == "chunk_gated_delta_rule":
        from opslot.ops.chunk_gated_delta_rule.cases import _case as delta_rule

        return delta_rule("widest", (1, 128, 2, 4, 256, 256), per_channel=variant == "per_channel")
    if op == "mamba_chunk_scan" and variant == "standard":
        from opslot.ops.mamba_chunk_scan.cases import _case as scan

        return scan("widest", (1, 128, 2, 128, 1, 256))
    return None


def run(kernel: Any, variant: Any, arguments: dict[str, Any]) -> None:
    """Forward and backward."""
    inputs = {name: arguments.pop(name) for name in variant.differentiable if name in arguments}
    tensors, spec = tree_flatten(inputs)
    tensors = [x.requires_grad_() if isinstance(x, Tensor) else x for x in tensors]
    outputs = tree_leaves(kernel(**tree_unflatten(tensors, spec), **arguments))
    roots = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    leaves = [x for x in tensors if isinstance(x, Tensor)]
    if roots:
        torch.autograd.grad(roots, leaves, [torch.zeros_like(x) for x in roots], allow_unused=True)


def compile_resize_heads() -> Compiler:
    """The copy kernel of several ops, for as many tensors as a launch may have, padded and cut."""
    compiler = Compiler()
    prepare(compiler)
    from opslot.ops._common.kernels.heads import MOST, resize_heads

    for compiler.capability in SHARED_MEMORY:
        for count in range(1, MOST.value + 1):
            for width, new_width in ((72, 96), (96, 72)):
                sources, targets = (
                    [torch.empty(2, 64, 4, size, dtype=torch.bfloat16, device="meta") for _ in range(count)]
                    for size in (width, new_width)
                )
                resize_heads(sources, targets)
    return compiler


def compile_op(name: str, sizes: Mapping[str, int]) -> Compiler:
    compiler = Compiler()
    prepare(compiler)

    from opslot._base.errors import KernelError
    from opslot.slots import KERNEL_REGISTRY

    kernels = [(spec, KERNEL_REGISTRY.load(*spec.key)) for spec in KERNEL_REGISTRY.specs(name) if spec.interpretable]
    # Kernels take tensors that are not on a GPU only for the interpreter; the modules with Triton code are imported.
    os.environ["TRITON_INTERPRET"] = "1"
    for compiler.capability in SHARED_MEMORY:
        for spec, kernel in kernels:
            variant = KERNEL_REGISTRY.op(name).variant(spec.variant)
            for dtype in (torch.bfloat16, torch.float32):
                for arguments in calls(name, variant, dtype, sizes):
                    try:
                        run(kernel, variant, arguments)
                    except Exception as error:
                        if isinstance(error, KernelError) and dtype == torch.float32:
                            # Wide heads are for 16 bits only.
                            continue
                        compiler.failures.append(f"{'/'.join(spec.key)}: {type(error).__name__}: {error}")
    return compiler


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    sizes = (argument.split("=") for argument in sys.argv[2:])
    name = sys.argv[1]
    found = compile_resize_heads() if name == "resize_heads" else compile_op(name, {s: int(v) for s, v in sizes})
    print(*dict.fromkeys(found.failures), sep="\n")
    print(f"{len(found.forms)} kernels")
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
