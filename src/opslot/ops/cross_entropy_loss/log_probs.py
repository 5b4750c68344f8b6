"""What a language model returns beside its loss: log-probabilities per token, and the logits in a tuple."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from opslot._base.errors import ConfigError, KernelError
from opslot.ops.cross_entropy_loss.contract import causal
from opslot.ops.cross_entropy_loss.low_rank import linear_of
from opslot.ops.cross_entropy_loss.op import log_probs_of, scaled_and_capped
from opslot.slots import protocol

_SLOT = "cross_entropy_loss"


def returns_log_probs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Give the forward of a language model the arguments `return_log_probs` and `temperature`.

    With `return_log_probs=True` the output has two more fields, float32 of shape [B, S]:

    - `log_probs`: at position t the log-probability of `labels[:, t + 1]` (of `shift_labels[:, t]` if given), which is
      the token after position t. It is 0 where that label is ignored, and so at the last position.
    - `entropy`: at position t the entropy in nats of the distribution that `log_probs` is of, 0 at the same positions.

    Both are differentiable. The logits are divided by `temperature` (default 1), after scaling and softcap. `logits`
    is None: with a fused kernel they never exist as a whole. `loss` is minus the sum of `log_probs`, divided as
    always, so the temperature enters it. A head that selects the positions of its loss itself, such as by the
    attention mask, returns the values of those positions.

    A tuple (`return_dict=False`) has the logits in their place, so that the loss is computed from them.

    Raises:
        ConfigError: the loss of the model has no slot, there are no labels, or the temperature is not positive.
        KernelError: a tuple was asked for, and the fused kernel was named explicitly.
    """
    given = inspect.signature(forward).parameters
    place = list(given).index("return_dict") - 1 if "return_dict" in given else math.inf

    @functools.wraps(forward)
    def with_log_probs(
        self: nn.Module, *args: Any, return_log_probs: bool = False, temperature: float | None = None, **kwargs: Any
    ) -> Any:
        if return_log_probs:
            return _with_log_probs(forward, self, temperature, args, kwargs)
        if temperature is not None:
            raise ConfigError(
                "temperature changes only log_probs and entropy",
                found=f"temperature={temperature} without return_log_probs",
                hint="pass return_log_probs=True too",
            )
        as_fields = args[int(place)] if place < len(args) else kwargs.get("return_dict")
        if as_fields is None:
            as_fields = getattr(getattr(self, "config", None), "return_dict", True)
        if as_fields or protocol.bound_kernel(self, _SLOT) is None:
            return forward(self, *args, **kwargs)
        return _with_logits(forward, self, args, kwargs)

    return with_log_probs


def _with_logits(forward: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tuple of Transformers' implementation."""
    kernel = protocol.bound_kernel(model, _SLOT)
    fuses = model.training or torch.is_grad_enabled() or protocol.loss_only(model)
    if kernel.explicit and fuses and (args or kwargs.get("labels") is not None):
        raise KernelError(
            f"cross_entropy_loss_implementation={kernel.name!r} cannot be used with return_dict=False: the tuple has "
            "the logits, which it does not compute",
            hint="pass return_dict=True, or set cross_entropy_loss_implementation to eager or auto",
        )
    protocol.set_kernel(model, _SLOT, None)
    try:
        return forward(model, *args, **kwargs)
    finally:
        protocol.set_kernel(model, _SLOT, kernel)


def _with_log_probs(
    forward: Callable[..., Any], model: Any, temperature: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = type(model).__name__
    if _SLOT not in protocol.declared_slots(model):
        reason = protocol.skip_reason(model, _SLOT) or "its loss has no slot"
        raise ConfigError(f"{name} cannot return log_probs", found=reason, hint="compute them from its logits")
    if not args and kwargs.get("labels") is None:
        raise ConfigError("return_log_probs=True needs labels", hint="pass labels=input_ids")
    tokens = _TokenLoss(model, _checked(temperature))
    kernel, loss_only = protocol.bound_kernel(model, _SLOT), protocol.loss_only(model)
    # For this call the slot holds a loss that keeps its log-probabilities.
    protocol.set_kernel(model, _SLOT, tokens)
    protocol.loss_only.set(model, True)
    try:
        output = forward(model, *args, **kwargs)
    finally:
        protocol.set_kernel(model, _SLOT, kernel)
        protocol.loss_only.set(model, loss_only)
    if tokens.values is None:
        raise ConfigError(f"{name} computed no fused loss", hint="pass labels, and switch off losses that need logits")
    if not dataclasses.is_dataclass(output):
        raise ConfigError("return_log_probs=True needs an output with fields", hint="pass return_dict=True")
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    log_probs, entropy = (_of_all_positions(values, kwargs.get("labels")) for values in tokens.values)
    kind: Any = type(output)
    return _output_class(kind)(**fields, log_probs=log_probs, entropy=entropy)


def _of_all_positions(values: Tensor, labels: Tensor | None) -> Tensor:
    """With the last position, which has no label; the heads of some models and older releases leave it out."""
    without_last = labels is not None and values.shape == (*labels.shape[:-1], labels.shape[-1] - 1)
    return pad(values, (0, 1)) if without_last else values


def _checked(temperature: float | None) -> float:
    if temperature is None:
        return 1.0
    if isinstance(temperature, int | float) and math.isfinite(temperature) and temperature > 0:
        return float(temperature)
    raise ConfigError(
        "temperature must be a positive number", found=f"temperature={temperature!r}", hint="pass a number above 0"
    )


@functools.cache
def _output_class(output: Any) -> Any:
    """The output's class with two more fields: FSDP finds tensors of an output only in its fields."""
    fields = [(name, Tensor | None, dataclasses.field(default=None)) for name in ("log_probs", "entropy")]
    return dataclasses.make_dataclass(f"{output.__name__}WithLogProbs", fields, bases=(output,))


class _TokenLoss:
    """Computes a loss from log-probabilities and keeps them; called like a kernel of the op's variant `causal`."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model, self.temperature = model, temperature
        self.kernel = protocol.bound_kernel(model, _SLOT)
        self.head: Any = None
        self.around: tuple[Any, ...] = ()
        self.values: tuple[Tensor, Tensor] | None = None

    def can_serve(self, model: Any, head: Any, *around: Any) -> bool:
        self.head, self.around = head, around
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = causal(*args, **kwargs)
        hidden_states, weight, bias, labels, ignore_index, softcap, logit_scale, _, num_items, _ = given
        labels = labels.reshape(hidden_states.shape[:-1]).to(hidden_states.device)
        # cap * tanh(scale * z / cap) / T is a softcap too.
        softcap, logit_scale = softcap / self.temperature if softcap else None, logit_scale / self.temperature
        if self.kernel is not None and self.kernel.can_serve(self.model, self.head, *self.around):
            kernel = self.kernel.other_variant("token_log_probs")
            self.values = kernel(
                hidden_states,
                weight,
                None,
                ignore_index=ignore_index,
                shift_labels=labels,
                bias=bias,
                softcap=softcap,
                logit_scale=logit_scale,
                head=self.head,
            )
        else:
            logits = self.head(hidden_states)
            if bias is not None and linear_of(self.head).bias is None:
                logits = logits + bias
            logits = scaled_and_capped(logits, softcap, logit_scale)
            self.values = log_probs_of(logits, labels, ignore_index)
        divisor = (labels != ignore_index).sum() if num_items is None else num_items
        divisor = divisor.to(hidden_states.device).reshape(()) if isinstance(divisor, Tensor) else divisor
        return -self.values[0].sum() / divisor
