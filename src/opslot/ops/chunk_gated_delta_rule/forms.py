"""Transformers' calls of the gated delta rule, and its other recurrences. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView, Skip, skip_callers
from opslot.patchgen.packed_documents import add_imports, bound_arguments, documents_of, undecorated

OP = "chunk_gated_delta_rule"
_PARAMETERS = (
    "query",
    "key",
    "value",
    "g",
    "beta",
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
)
_DEFAULTS = {"initial_state": "None", "output_final_state": "False", "use_qk_l2norm_in_kernel": "False"}
# Before 5.15 `__init__` selects fla's function where fla is installed.
_SELECTED = "self.chunk_gated_delta_rule = chunk_gated_delta_rule or torch_chunk_gated_delta_rule"
# Conditions under which callers repeat keys for grouped values, which kernels read once instead; before 5.23.
_REPEATS = ("self.num_v_heads // self.num_k_heads > 1", "self.num_v_heads > self.num_k_heads")
_GATED_DELTA_RULE = r"(torch_)?(chunk|recurrent)_gated_delta_rule"
_KIMI_DELTA_ATTENTION = r"(torch_)?(chunk|recurrent)_kimi_delta_attention"
_RWKV = r"rwkv_linear_\w+"
_CALLS = "opslot.ops.chunk_gated_delta_rule.calls"


@dataclass(frozen=True)
class DeltaRules:
    """Classes that call a delta rule in chunks; its recurrent form, for single tokens, stays Transformers'.

    Attributes:
        slot: of the op's variant that computes it.
        function: its name in the module.
        reviewed: fingerprints of the function.
        l2norm: fingerprint of the function that normalizes queries and keys.
        other_names: pattern of the names that it and its recurrent form have.
    """

    slot: Slot
    function: str
    reviewed: tuple[str, ...]
    l2norm: str
    other_names: str

    def __call__(self, module: ModuleView) -> Iterator[Match | Skip]:
        matched = set()
        for method, calls in module.callers(self.function, "self.chunk_gated_delta_rule").items():
            if match := self._call(module, method, calls):
                matched.add(match.symbol)
                yield match
        yield from skip_callers(module, OP, self.other_names, matched=matched)

    def _call(self, module: ModuleView, method: str, calls: list[ast.Call]) -> Match | None:
        """A match if the method calls the reviewed function once, with arguments of the op's contract."""
        owner = method.partition(".")[0]
        reviewed = module.fingerprint(self.function) in self.reviewed and module.fingerprint("l2norm") == self.l2norm
        selected = not isinstance(calls[0].func, ast.Attribute) or _SELECTED in module.text(f"{owner}.__init__")
        arguments = bound_arguments(calls[0], _PARAMETERS, ("cu_seqlens",))
        # The sixth positional parameter is the size of chunks.
        if not reviewed or not selected or len(calls) != 1 or arguments is None or len(calls[0].args) > 5:
            return None
        arguments = _DEFAULTS | arguments
        if set(arguments) != set(_PARAMETERS):
            return None
        values = ", ".join([*(arguments[name] for name in _PARAMETERS), documents_of(module, method, calls[0])])

        def write(patch: PatchConfig) -> None:
            original, bound = undecorated(module, patch, self.function), f"self.{self.slot.attribute}"
            eager = f"delta_rule_by_document({original}, {values})"
            template = f"{bound}({values}) if {bound} is not None else {eager}"
            patch.replace(method, ast.unparse(calls[0]), template, slot=self.slot)
            for condition in _REPEATS:
                if module.count(method, condition) == 1:
                    # A single token of a cached sequence goes to Transformers' recurrent form, which reads no groups.
                    repeats = f"$match and ({bound} is None or {arguments['query']}.shape[1] == 1)"
                    patch.replace(method, condition, repeats)
            add_imports(patch, _CALLS, "delta_rule_by_document")
            patch.depends_on(module.upstream.name, self.function, "l2norm")

        return Match(owner, OP, self.slot.variant, write)


def find_other_recurrences(module: ModuleView) -> Iterator[Skip]:
    """Classes that call another recurrence."""
    return skip_callers(module, OP, _RWKV, "calls {function}, another recurrence than the gated delta rule")


FORMS = (
    DeltaRules(
        Slot(OP),
        "torch_chunk_gated_delta_rule",
        # With a solved triangular system, by substitution, and with keys repeated by the caller.
        ("dec74ba2abf0", "81eec843d01d", "8d6d3473ea12"),
        "9dbcc66b2629",
        _GATED_DELTA_RULE,
    ),
    DeltaRules(
        Slot(OP, "per_channel"),
        "chunk_kimi_delta_attention",
        # Exponents that are not needed masked before or, in 5.16, after exp.
        ("9c55366231e7", "66e2ae7cc0bf"),
        "160b1824d170",
        _KIMI_DELTA_ATTENTION,
    ),
    find_other_recurrences,
)
