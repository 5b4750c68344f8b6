"""Compile the Triton kernels of an op for NVIDIA GPUs, on a machine without one: `python -m tests.compile_kernels OP`.

The first case of each variant runs forward and backward with launches that compile instead of running, so results are
meaningless. Kernels that ask for a GPU before they launch are not reached. Prints one line per failed compilation, and
the number of compiled kernels last.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

CAPABILITIES = (80, 90, 100)


class Compiler:
    """Replaces `JITFunction.run`: compiles each new form of a kernel for all `CAPABILITIES`."""

    def __init__(self) -> None:
        self.forms: set[str] = set()
        self.failures: list[str] = []

    def run(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from triton.runtime.jit import mangle_type

        values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        signature: dict[str, Any] = {}
        constants = {}
        for position, parameter in enumerate(kernel.params):
            value = values.get(parameter.name, parameter.default)
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[position,] = value
            elif isinstance(value, tuple):
                signature[parameter.name] = tuple(map(mangle_type, value))
            else:
                signature[parameter.name] = mangle_type(value)
        form = f"{kernel.fn.__name__} {signature} {constants} {options}"
        if form not in self.forms:
            self.forms.add(form)
            self.compile(kernel, signature, constants, options, form)

    def compile(
        self, kernel: Any, signature: dict[str, Any], constants: dict[Any, Any], options: dict[str, Any], form: str
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        for capability in CAPABILITIES:
            source = ASTSource(kernel, signature, constexprs=constants, attrs={})
            try:
                triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
            except Exception as error:
                self.failures.append(f"sm_{capability}: {type(error).__name__}: {str(error)[-300:]} in {form}")


class Launched:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: None


def compile_op(name: str) -> Compiler:
    from triton.runtime.jit import JITFunction

    from opslot._base import device, kernel_launch
    from opslot.slots import KERNEL_REGISTRY
    from opslot.verify.parity import check_kernel

    compiler = Compiler()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Launched:
        compiler.run(kernel, args, kwargs)
        return Launched()

    JITFunction.run = run
    # Before the kernels' modules import them.
    kernel_launch.sm_count = lambda device: 132
    for spec in KERNEL_REGISTRY.specs(name):
        if not spec.interpretable:
            continue
        function = KERNEL_REGISTRY.load(name, spec.variant, spec.name)
        for module in [m for key, m in sys.modules.items() if key.startswith("opslot.")]:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, kernel_launch.KernelLauncher):
                    value._direct = False
                if value is device.triton_interpreted:
                    setattr(module, attribute, lambda: True)
        variant = KERNEL_REGISTRY.op(name).variant(spec.variant)
        for dtype in (torch.bfloat16, torch.float32):
            case = next(case for case in variant.cases if case.role == "check")
            check_kernel(function, name, variant, case, dtype, "cpu", name=spec.name)
    return compiler


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    found = compile_op(sys.argv[1])
    print(*found.failures, sep="\n")
    print(f"{len(found.forms)} kernels")
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
