"""`opslot.trace()`: how often each bound kernel ran, and for how long."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from opslot._base.errors import ConfigError
from opslot.bench.timing import mark
from opslot.slots.protocol import ATTENTION_PREFIX
from opslot.slots.report import format_table
from opslot.slots.slot import BoundKernel


class TracedKernel(NamedTuple):
    """A kernel in a module.

    Attributes:
        op: op and variant, e.g. "rms_norm/standard".
        kernel: name of the kernel; of attention, that of the implementation.
        module: FQN of the module in the model that was bound; of attention, its class and layer.
    """

    op: str
    kernel: str
    module: str


@dataclass
class Calls:
    """Calls of one kernel; times in ms, of the GPU where the kernel ran on one.

    Attributes:
        forward: number of forward calls; recomputation in backward is one.
        backward: number of forward calls whose backward pass ran.
    """

    forward: int = 0
    backward: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0

    def __add__(self, other: Calls) -> Calls:
        return Calls(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Trace:
    """What ran inside `opslot.trace()`; complete when the context has ended.

    Attributes:
        calls: by kernel and module.
    """

    calls: dict[TracedKernel, Calls] = field(default_factory=dict)
    _spans: list[tuple[TracedKernel, str, Any, Any]] = field(default_factory=list, repr=False)

    def by_op(self) -> dict[tuple[str, str], Calls]:
        """Calls of all modules: (op, kernel) -> calls."""
        found: dict[tuple[str, str], Calls] = {}
        for traced, calls in self.calls.items():
            key = traced.op, traced.kernel
            found[key] = found.get(key, Calls()) + calls
        return found

    def __str__(self) -> str:
        """A table with one line per op, kernel and kind of module (layer numbers are replaced by *)."""
        groups: dict[TracedKernel, Calls] = {}
        for traced, calls in self.calls.items():
            key = traced._replace(module=re.sub(r"\b\d+\b", "*", traced.module))
            groups[key] = groups.get(key, Calls()) + calls
        if not groups:
            return "no bound kernel ran"
        header = ("op", "kernel", "calls", "forward ms", "backward ms", "ms/call", "module")
        ordered = sorted(groups.items(), key=lambda item: -(item[1].forward_ms + item[1].backward_ms))
        rows = [
            (
                traced.op,
                traced.kernel,
                f"{calls.forward:,}",
                f"{calls.forward_ms:.3f}",
                f"{calls.backward_ms:.3f}" if calls.backward else "-",
                f"{(calls.forward_ms + calls.backward_ms) / calls.forward:.4f}",
                traced.module,
            )
            for traced, calls in ordered
        ]
        return "\n".join(format_table(header, rows))

    def _finish(self) -> None:
        """Turn the recorded spans into times."""
        for traced, direction, start, end in self._spans:
            end.synchronize()
            calls, name = self.calls[traced], f"{direction}_ms"
            setattr(calls, name, getattr(calls, name) + start.elapsed_time(end))
        self._spans.clear()


_active: list[Trace] = []


@contextlib.contextmanager
def trace(*, show: bool = True) -> Iterator[Trace]:
    """Count the calls of every bound kernel, with the time of their forward and backward passes.

    Without it nothing is recorded and kernels are called as always. Code that torch.compile compiled before is not
    recorded, nor are slots on eager.

    Args:
        show: print the table when the context ends.

    Raises:
        ConfigError: another trace is active.

    Example:
        with opslot.trace() as trace:
            model(**batch).loss.backward()
        trace.by_op()["rms_norm/standard", "triton"].forward_ms
    """
    if _active:
        raise ConfigError("opslot.trace() is active already", hint="end it before you start another one")
    record = Trace()
    _active.append(record)
    original = BoundKernel.__call__

    def call(self: BoundKernel, *args: Any, **kwargs: Any) -> Any:
        traced = TracedKernel(f"{self.op_name}/{self.variant}", self.name, self.path)
        return _timed(record, traced, functools.partial(original, self), args, kwargs)

    try:
        with _traced_attention(record):
            BoundKernel.__call__ = call  # type: ignore[method-assign]
            try:
                yield record
            finally:
                BoundKernel.__call__ = original  # type: ignore[method-assign]
    finally:
        _active.clear()
        record._finish()
    if show:
        print(record)


@contextlib.contextmanager
def _traced_attention(record: Trace) -> Iterator[None]:
    """Attention kernels are called through Transformers' interface, not through a slot."""
    from transformers import AttentionInterface

    known = AttentionInterface._global_mapping
    before = {name: kernel for name, kernel in known.items() if name.startswith(ATTENTION_PREFIX)}
    for name, kernel in before.items():
        AttentionInterface.register(name, _attention(record, name.removeprefix(ATTENTION_PREFIX), kernel))
    try:
        yield
    finally:
        known.update(before)


def _attention(record: Trace, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(module, "layer_idx", None)
        where = type(module).__name__ + ("" if layer is None else f" {layer}")
        return _timed(record, TracedKernel("attention", name, where), kernel, (module, *args), kwargs)

    return attend


def _timed(
    record: Trace, traced: TracedKernel, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    calls = record.calls.setdefault(traced, Calls())
    newest = _newest_node(tensors)
    start = mark(on_gpu)
    output = kernel(*args, **kwargs)
    record._spans.append((traced, "forward", start, mark(on_gpu)))
    calls.forward += 1
    if newest is not None:
        nodes = list(_nodes_since(output, newest))
        for number, node in enumerate(nodes):
            _time_backward(record, traced, node, on_gpu, first=number == 0)
    return output


def _newest_node(tensors: list[torch.Tensor]) -> int | None:
    """A sequence number that all autograd nodes of the call will exceed; None without gradients."""
    given = next((tensor for tensor in tensors if tensor.requires_grad), None)
    if given is None or not torch.is_grad_enabled():
        return None
    node = given.detach().requires_grad_().view_as(given).grad_fn
    assert node is not None, "a view of a tensor with a gradient has a node"
    return node._sequence_nr()


def _nodes_since(output: Any, newest: int) -> Iterator[Any]:
    """The autograd nodes behind the tensors of `output` that are younger than `newest`."""
    outputs = output if isinstance(output, tuple | list) else [output]
    waiting = [value.grad_fn for value in outputs if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        # Nodes of leaves have the highest number.
        if node in seen or node.name().endswith("AccumulateGrad") or node._sequence_nr() <= newest:
            continue
        seen.add(node)
        yield node
        waiting += [parent for parent, _ in node.next_functions if parent is not None]


def _time_backward(record: Trace, traced: TracedKernel, node: Any, on_gpu: bool, *, first: bool) -> None:
    started: list[Any] = []

    def before(gradients: Any) -> None:
        started.append(mark(on_gpu))

    def after(inputs: Any, gradients: Any) -> None:
        if record in _active and started:
            record._spans.append((traced, "backward", started.pop(), mark(on_gpu)))
            record.calls[traced].backward += first

    node.register_prehook(before)
    node.register_hook(after)
