"""Transformers' calls of a causal convolution over the sequence. Does not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import ClassFact, Match, ModuleView, Skip, skip_callers
from opslot.patchgen.packed_documents import add_imports, bound_arguments, documents_of, pass_documents_to, undecorated
from opslot.patchgen.upstream import find_nodes

OP = "causal_conv1d"
_FUNCTION = "causal_conv1d_fn"
# Depthwise, causal, then the activation; from 5.15, bamba, qwen3_next, lfm2 and 20 more.
_REVIEWED = "c3ec9569e879"
_PARAMETERS = ("hidden_states", "weight", "bias", "activation")
# Before 5.15: the function of the package causal_conv1d where it is installed, else the module's convolution.
_OPTIONAL = """
if self.causal_conv1d_fn is not None:
    mixed_qkv = self.causal_conv1d_fn(
        x=mixed_qkv,
        weight=self.conv1d.weight.squeeze(1),
        bias=self.conv1d.bias,
        activation=self.activation,
        seq_idx=kwargs.get("seq_idx"),
    )
else:
    mixed_qkv = F.silu(self.conv1d(mixed_qkv)[:, :, : mixed_qkv.shape[-1]])
"""
# Before 5.15, in a method for machines without mamba_ssm: pattern, and what the slot's result needs.
_OWN = {
    "self.act(self.conv1d($x)[..., :$n].transpose(1, 2))": ".transpose(1, 2)",
    "self.act(self.conv1d($x)[..., :$n])": "",
}
_OWN_VALUES = "$x, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation"
_OWN_METHOD = "torch_forward"
_FAST = "is_fast_path_available"
# The same for mixers of Mamba-1, which convolve there both with a cache and without.
_OWN_SLOW = "self.act(self.conv1d($x)[..., :$n])"
_SLOW_METHOD = "slow_forward"
_FAST_RETURN = "return self.cuda_kernels_forward(hidden_states, cache_params, attention_mask)"
# What follows the call in some methods. With no cache it takes all tokens, and its backward copies the gradient to a
# tensor of zeros with adjacent tokens, which the convolution's backward has to transpose.
_LAST_TOKENS = "$x = $x[:, :, -$n:]"
# A short convolution between two gates, which are parts of one projection (LFM), in forwards without a cache. All
# assignments to the name of what is convolved are known, so that nothing happens to it in between.
_GATES = """
$p = self.in_proj($x).transpose(-1, -2)
$before, $after, $part = $p.chunk(3, dim=-2)
$h = $before * $part
"""
_GATED_OUTPUT = """
$y = $after * $h
$y = $y.transpose(-1, -2).contiguous()
$y = self.out_proj($y)
return $y
"""
_CONVOLVED = (
    r"apply_mask_to_padding_states\({0}, attention_mask\)",
    r"\w+ \* \w+",
    r"causal_conv1d_update\({0}, .*\)",
    r"(?P<cache>\w+)\.update_conv_state\({0}, .*\)",
    r"causal_conv1d_fn\({0}, .*\)",
    r"{0}\[:, :, -seq_len:\]",
)
_SLOT = Slot(OP)
_GATED = Slot(OP, "gated", "gated_causal_conv1d")
_BOUND = f"self.{_SLOT.attribute}"
# Functions of mamba_ssm that also convolve, called in training where that package is installed.
_FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined", "mamba_split_conv1d_scan_combined")
_FUSED_IN_TRAINING = "self.training and $cache is None"

_CALLS = "opslot.ops.causal_conv1d.calls"


def find_convolutions(module: ModuleView) -> Iterator[Match | Skip | ClassFact]:
    """Classes that convolve causally over the sequence."""
    matched = set()
    for method, calls in module.callers(_FUNCTION).items():
        if match := _call(module, method, calls):
            matched.add(match.symbol)
            yield match
            yield from _gated_call(module, method, calls[0])
    for method in module.callers(f"self.{_FUNCTION}"):
        owner = method.partition(".")[0]
        if module.count(method, _OPTIONAL) == 1:
            matched.add(owner)
            yield Match(owner, OP, _SLOT.variant, partial(_write_optional, method))
    for owner, method in module.methods(_OWN_METHOD):
        pattern = next((pattern for pattern in _OWN if module.count(method, pattern) == 1), None)
        if pattern is not None and module.count(f"{owner}.forward", _FAST) == 1:
            matched.add(owner)
            fast = _FAST, f"{_BOUND} is None and $match"
            yield Match(owner, OP, _SLOT.variant, partial(_write_own, owner, _OWN_METHOD, pattern, fast, 1))
    for owner, method in module.methods(_SLOW_METHOD):
        if module.count(method, _OWN_SLOW) == 2 and module.count(f"{owner}.forward", _FAST_RETURN) == 1:
            matched.add(owner)
            fast = _FAST_RETURN, f"if {_BOUND} is None:\n    $match"
            yield Match(owner, OP, _SLOT.variant, partial(_write_own, owner, _SLOW_METHOD, _OWN_SLOW, fast, 2))
    yield from skip_callers(module, OP, f"(torch_)?causal_conv1d(_fn|_update)?|{_FUNCTION}", matched=matched)


def _call(module: ModuleView, method: str, calls: list[ast.Call]) -> Match | None:
    """A match if the method calls the reviewed function once, with arguments of the op's contract."""
    if module.fingerprint(_FUNCTION) != _REVIEWED or len(calls) != 1:
        return None
    arguments = bound_arguments(calls[0], _PARAMETERS, ("seq_idx",))
    fused = method in module.callers(*_FUSED)
    if arguments is None or "weight" not in arguments or (fused and module.count(method, _FUSED_IN_TRAINING) != 1):
        return None
    values = [arguments.get(name, "None") for name in _PARAMETERS]
    values.append(documents_of(module, method, calls[0]))

    def write(patch: PatchConfig) -> None:
        original = undecorated(module, patch, _FUNCTION)
        patch.replace(method, ast.unparse(calls[0]), _bound_or(original, ", ".join(values)), slot=_SLOT)
        if module.count(method, _LAST_TOKENS) == 1:
            patch.replace(method, _LAST_TOKENS, f"if {_BOUND} is None or $x.shape[2] != $n:\n    $match")
        if fused:
            patch.replace(method, _FUSED_IN_TRAINING, f"$match and {_BOUND} is None")
        add_imports(patch, _CALLS, "conv_by_document")
        pass_documents_to(module, patch, method.partition(".")[0])
        patch.depends_on(module.upstream.name, _FUNCTION)

    return Match(method.partition(".")[0], OP, _SLOT.variant, write)


def _gated_call(module: ModuleView, method: str, call: ast.Call) -> Iterator[Match]:
    """A match of the same call if the method convolves between two gates, without an activation."""
    arguments = bound_arguments(call, _PARAMETERS, ("seq_idx",)) or {}
    if "activation" in arguments or module.count(method, _GATES) != 1 or module.count(method, _GATED_OUTPUT) != 1:
        return
    name = arguments[_PARAMETERS[0]]
    known = [re.compile(pattern.format(re.escape(name))) for pattern in _CONVOLVED]
    values = [
        ast.unparse(node.value)
        for node in find_nodes(ast.Assign, module.function(method))
        if ast.unparse(node.targets[0]) == name
    ]
    found = [next((match for pattern in known if (match := pattern.fullmatch(value))), None) for value in values]
    caches = {match["cache"] for match in found if match and "cache" in match.groupdict()}
    if None in found or len(caches) != 1:
        return
    kernel, documents = f"self.{_GATED.attribute}", documents_of(module, method, call)
    inputs = ", ".join(["self.in_proj($x)", arguments["weight"], arguments.get("bias", "None"), documents])
    without_cache = f"if {kernel} is not None and {caches.pop()} is None:"
    template = f"{without_cache}\n    return self.out_proj({kernel}({inputs}))\n$match"

    def write(patch: PatchConfig) -> None:
        patch.replace(method, _GATES, template, slot=_GATED)

    yield Match(method.partition(".")[0], OP, _GATED.variant, write)


def _write_optional(method: str, patch: PatchConfig) -> None:
    original = "lambda x, *_: F.silu(self.conv1d(x)[:, :, : x.shape[-1]])"
    values = 'mixed_qkv, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu", cu_seqlens_in(kwargs)'
    patch.replace(method, _OPTIONAL, f"mixed_qkv = {_bound_or(original, values)}", slot=_SLOT)
    add_imports(patch, _CALLS, "conv_by_document")


def _write_own(owner: str, method: str, pattern: str, fast: tuple[str, str], count: int, patch: PatchConfig) -> None:
    """Without boundaries of documents, which do not reach the method; `fast` is what leaves it out, and its form."""
    template = f"{_BOUND}({_OWN_VALUES}){_OWN[pattern]} if {_BOUND} is not None else $match"
    patch.replace(f"{owner}.{method}", pattern, template, count=count, slot=_SLOT)
    patch.replace(f"{owner}.forward", *fast)


def _bound_or(original: str, values: str) -> str:
    return f"{_BOUND}({values}) if {_BOUND} is not None else conv_by_document({original}, {values})"


FORMS = (find_convolutions,)
