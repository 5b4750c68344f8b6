"""Kernels as differentiable custom ops, `torch.ops.opslot.*`.

torch.compile traces the launch of a kernel as one op with a fake implementation, without a graph break. Eager code
calls the Python function directly, because the dispatcher's overhead is significant at common sizes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable as torch_once_differentiable

from opslot._base.errors import KernelError

# Registrations live as long as the library object.
_LIBRARY = torch.library.Library("opslot", "FRAGMENT")
# Other tensors (fake, distributed, functional) have no storage that a kernel can read.
_PLAIN = frozenset({Tensor, nn.Parameter, type(None)})
_modes = torch._C._len_torch_dispatch_stack
_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_SCHEMA = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) -> (?P<returns>.*)")


def _arguments(schema: str) -> tuple[list[str], list[str]]:
    """The arguments of a schema as "type name": the tensors, which come first, and the others."""
    match = _SCHEMA.fullmatch(schema)
    assert match is not None, schema
    arguments = match["arguments"].split(", ")
    tensors = [argument for argument in arguments if argument.startswith("Tensor")]
    assert arguments[: len(tensors)] == tensors, f"{schema}: tensors come first"
    return tensors, arguments[len(tensors) :]


def custom_op(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `opslot::<schema>`, implemented on every device by `function`.

    Args:
        schema: e.g. "swiglu(Tensor gate, Tensor up) -> Tensor"; tensors come before other arguments.
        fake: the same signature; returns empty outputs of the right shape, dtype and strides.

    Returns:
        A function that calls the op under torch.compile, under a dispatch mode (selective activation checkpointing) and
        for tensor subclasses, else `function`. An output that is not needed may be None; the op itself returns an empty
        tensor instead. The op has no derivative of its own: backward through a call of it outside of an
        autograd.Function, as in a graph of torch.export, raises KernelError.
    """
    name = schema.partition("(")[0]
    tensors = len(_arguments(schema)[0])
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _dispatched(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"opslot::{name}", _dispatched(fake), lib=_LIBRARY)
    torch.library.register_autograd(f"opslot::{name}", _without_derivative(name), lib=_LIBRARY)
    overload = getattr(torch.ops.opslot, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _modes():
            return overload(*args)
        for arg in args[:tensors]:
            if type(arg) not in _PLAIN and not _is_plain_list(arg):
                return overload(*args)
        return function(*args)

    return call


def _is_plain_list(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and type(arg[0]) in _PLAIN


def _without_derivative(name: str) -> Callable[..., Any]:
    """The backward of op `name`. Without one torch would only warn, and give no gradients to what is before it."""

    def backward(ctx: Any, *douts: Any) -> Any:
        raise KernelError(
            f"opslot::{name} has no derivative outside of opslot's own call of it, as in a graph of torch.export",
            hint="to train an exported model, call opslot.bind(model, 'eager') before torch.export",
        )

    return backward


def _dispatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for the dispatcher, with an empty tensor instead of each None in its outputs.

    Runs without autograd; the derivatives are those of the surrounding autograd.Function.
    """

    @torch.no_grad()
    def dispatched(first: Any, *args: Any) -> Any:
        outputs = function(first, *args)
        if isinstance(outputs, tuple):
            tensors = first if isinstance(first, list | tuple) else (first, *args)
            like = next(x for x in tensors if isinstance(x, Tensor))
            return tuple([like.new_empty(0) if output is None else output for output in outputs])
        return outputs

    return dispatched


def launch_op(schema: str, allocate: Callable[..., Any], launch: Callable[..., None]) -> Callable[..., Any]:
    """`custom_op` that returns the outputs of `allocate(*arguments)`, filled by `launch(outputs, *arguments)`."""

    def function(*args: Any) -> Any:
        outputs = allocate(*args)
        launch(outputs, *args)
        return outputs

    return custom_op(schema, function, allocate)


def empty_gradients(tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Uninitialized contiguous gradients of those `tensors` that are `wanted`, None for the others."""
    return tuple(
        [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need and x is not None else None
            for x, need in zip(tensors, wanted, strict=True)
        ]
    )


def all_but_last_gradient(differentiable: int) -> Callable[..., tuple[Tensor | None, ...]]:
    """`allocate_gradients` of an op with two outputs that computes all gradients, the last only where it is needed."""

    def allocate(dout: Tensor | None, dfinal: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:
        return empty_gradients(args[:differentiable], (*[True] * (differentiable - 1), args[-1]))

    return allocate


def _backward_schema(name: str, outputs: int, arguments: list[str], differentiable: list[str]) -> str:
    """The schema of the backward of op `name`: (*douts, *arguments, *needs) -> gradients."""
    several = len(differentiable) > 1
    douts = [f"Tensor{'?' if outputs > 1 else ''} dout{i}" for i in range(outputs)]
    needs = [f"bool need_{argument.split()[1]}" for argument in differentiable] if several else []
    returns = f"({', '.join(['Tensor'] * len(differentiable))})" if several else "Tensor"
    return f"{name}_backward({', '.join([*douts, *arguments, *needs])}) -> {returns}"


def differentiable_op(
    schema: str,
    *,
    allocate: Callable[..., Any],
    launch: Callable[..., Any],
    launch_backward: Callable[..., Any],
    allocate_gradients: Callable[..., Any] | None = None,
    in_place: bool = True,
    differentiable: int | None = None,
    kept: Sequence[str] = (),
    returned: int | None = None,
    recomputable: bool = False,
    module: str = "",
) -> Callable[..., Any]:
    """A kernel and its backward as `opslot::<name>` and `opslot::<name>_backward`, and the function that applies them.

    Backward takes (*douts, *arguments, *needs): the gradients of the outputs (None for one of several outputs without
    a gradient), the arguments of forward, and whether each differentiable argument needs a gradient. With one
    differentiable argument there are no needs, and its gradient is returned without a tuple. With `kept`, its tensors
    take the place of the tensors among the arguments.

    Args:
        schema: see `custom_op`.
        allocate: (*arguments) -> empty outputs.
        launch: (outputs, *arguments) writes the outputs.
        launch_backward: (gradients, *douts, *arguments, *needs) writes the gradients that are not None.
        allocate_gradients: (*douts, *arguments, *needs) -> empty gradients, None for those that are not needed; default
            contiguous and like the arguments.
        in_place: False for a `launch` and a `launch_backward` that take no outputs, and return what they allocate;
            `allocate` and `allocate_gradients` are then only their fake implementations.
        differentiable: number of leading tensors that receive gradients; default all.
        kept: names of arguments and outputs in the schema that are kept for backward, which start with the
            differentiable arguments; default the tensors among the arguments.
        returned: number of leading outputs that the function returns; the others are only kept. Default all.
        recomputable: running forward again is cheaper than keeping its output: see `recomputed_by`.
        module: name of the module that holds the kernel, for error messages; default that of `launch`.
    """
    name, results = schema.partition("(")[0], schema.rpartition(" -> ")[2].strip("()").split(", ")
    outputs = len(results) if returned is None else returned
    tensor_arguments, others = _arguments(schema)
    tensors = len(tensor_arguments)
    count = tensors if differentiable is None else differentiable
    several = outputs > 1
    by_name = {tensor.split()[-1]: (i, tensor) for i, tensor in enumerate([*tensor_arguments, *results])}
    places, kept_tensors = zip(*(by_name[name] for name in kept)) if kept else (range(tensors), tensor_arguments)

    def like_arguments(*args: Any) -> Any:
        arguments = args[outputs : outputs + count]
        gradients = empty_gradients(arguments, args[-count:] if count > 1 else (True,))
        return gradients if count > 1 else gradients[0]

    define = launch_op if in_place else lambda schema, fake, function: custom_op(schema, function, fake)
    run = define(schema, allocate, launch)
    backward_schema = _backward_schema(name, outputs, [*kept_tensors, *others], tensor_arguments[:count])
    run_backward = define(backward_schema, allocate_gradients or like_arguments, launch_backward)
    no_gradients = (None,) * (tensors - count + len(others))

    def forward(ctx: Any, *args: Any) -> Any:
        found = run(*args)
        if kept:
            everything = (*args[:tensors], *found)
            ctx.save_for_backward(*[everything[i] for i in places])
        else:
            ctx.save_for_backward(*args[:tensors])
        ctx.others = args[tensors:]
        if recomputable:
            ctx.opslot_run = run if not torch.compiler.is_compiling() and _hooks(False) is None else None
        ctx.set_materialize_grads(False)
        if returned is None:
            return found
        return found[:outputs] if several else found[0]

    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(dout is None for dout in douts):
            return (None,) * count + no_gradients
        if count == 1:
            return run_backward(*douts, *ctx.saved_tensors, *ctx.others), *no_gradients
        needs = ctx.needs_input_grad[:count]
        gradients = run_backward(*douts, *ctx.saved_tensors, *ctx.others, *needs)
        return *[gradient if need else None for gradient, need in zip(gradients, needs)], *no_gradients

    return autograd_function(name, forward, backward, module or launch.__module__)


def no_view() -> Any:
    """A context in which the forward of an autograd.Function reshapes its output.

    Autograd does not take the output for a view there, so it may be modified in place (Gemma 3n scales the output of a
    linear layer so).
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch._C._AutoDispatchBelowADInplaceOrView()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as an output of the forward of an autograd.Function.

    With torch.compile of torch 2.11, an output that `to` returned unchanged gets no gradient, nor does one of an op in
    place.
    """
    return x if x.dtype == dtype else x.to(dtype)


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode, such as that of selective activation checkpointing, is active."""
    return bool(_modes())


def recomputed_by(x: Tensor) -> Any:
    """The node of the autograd graph that can compute `x` again in backward, so that `x` need not be saved; or None.

    With hooks on saved tensors (activation checkpointing, offload) there is none: they unpack a tensor once.
    """
    node = x.grad_fn
    return node if getattr(node, "opslot_run", None) is not None and _hooks(False) is None else None


def recompute(node: Any) -> Tensor:
    """What a node of `recomputed_by` computed in forward."""
    with torch.no_grad():
        return node.opslot_run(*node.saved_tensors, *node.others)


def autograd_function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], module: str
) -> Callable[..., Any]:
    """`apply` of an autograd.Function `name` with these methods; `module` is the kernel's, for error messages."""
    methods = {
        "forward": staticmethod(variadic(forward)),
        "backward": staticmethod(once_differentiable(backward, module)),
    }
    metaclass: Any = type(torch.autograd.Function)
    return metaclass(name, (torch.autograd.Function,), methods).apply


def variadic(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the `forward(ctx, *args)` of an autograd.Function, so that torch.compile passes it `ctx`.

    Where no gradient is needed, torch.compile calls forward without `ctx` if its signature has as many parameters as
    `apply` got arguments, which a forward with `*args` may have by chance.
    """
    forward.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    return forward


def once_differentiable(backward: Callable[..., Any], module: str = "") -> Callable[..., Any]:
    """Raise KernelError for double backward, which kernels do not support.

    torch's decorator does not detect it through the saved tensors: with `create_graph`, if no incoming gradient
    requires a gradient, as is usual below a loss, it returns constants, and double backward is silently wrong.

    Args:
        module: name of the module that holds the kernel; by default that of `backward`.
    """
    _, op, kernel = (module or backward.__module__).rsplit(".", 2)
    guarded = torch_once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *douts: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *douts)
        if not torch.compiler.is_compiling():
            raise KernelError(
                f"{op}: a kernel of {kernel}.py has no second derivative, which create_graph=True requires",
                hint=f"set {op} to eager, or leave create_graph out",
            )
        return guarded(ctx, *douts)

    return call
