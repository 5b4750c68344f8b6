"""Slots of architectures that nobody patched by hand, found by what upstream's code computes.

Transformers writes most of its models from the same few parts. A part whose code equals, up to names, one that was read
and checked gets the slot that the checked one has; every other part stays upstream's, with the reason why. So a slot
found here stands for the same mathematics as in a patch written by hand, and eager stays upstream bit for bit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import libcst as cst

from opslot._base.errors import PatchError
from opslot.models._common import patches as known
from opslot.patchgen import OpSlot, PatchConfig
from opslot.patchgen.fingerprint import fingerprint
from opslot.patchgen.losses import loss_form
from opslot.patchgen.pattern import compile_pattern, find_matches
from opslot.patchgen.source import Release, UpstreamModule, installed_release


@dataclass(frozen=True)
class _Rotation:
    """A form of upstream's rotary function.

    Attributes:
        variant: what it computes.
        prints: fingerprints that it may have.
        helper: the function that decides what it means, if any, with its fingerprint.
        angles: what the variant takes of `cos` and `sin`, as a call gives them: "" for all, else a subscript or method.
        name: of the slot; a class may call two forms, so that each has a slot of its own.
    """

    variant: str
    prints: tuple[str, ...]
    helper: tuple[str, str] | None = ("rotate_half", known.ROTATE_HALF)
    angles: str = ""
    name: str | None = None

    @property
    def slot(self) -> OpSlot:
        return OpSlot("rotary_pos_emb", self.variant, name=self.name)


_FIRST_HALF, _EVERY_SECOND = ".chunk(2, dim=-1)[0]", "[..., ::2]"
_PAIRS, _PAIRS_OF_LIST = ("rotate_half", known.ROTATE_PAIRS), ("rotate_half", known.ROTATE_PAIRS_OF_LIST)
_ROTATIONS = (
    _Rotation("full", (known.ROTARY_FULL,)),
    _Rotation("full_cast_last", known.ROTARY_FULL_CAST_LAST),
    _Rotation("single", (known.ROTARY_SINGLE,)),
    _Rotation("half_angles", (known.ROTARY_BY_PARTS,), ("_apply_rotary_emb", known.PARTS_ARE_HALVES)),
    _Rotation("partial", known.ROTARY_PARTIAL),
    _Rotation("vision", (known.ROTARY_VISION,), name="rotary_pos_emb_vision"),
    _Rotation("interleaved", (known.ROTARY_INTERLEAVED,), None, name="rotary_pos_emb_interleaved"),
    _Rotation("interleaved", (known.ROTARY_INTERLEAVED_BY_HALVES,), name="rotary_pos_emb_interleaved"),
    _Rotation("paired", (known.ROTARY_BY_PARTS,), ("_apply_rotary_emb", known.PARTS_ARE_PAIRS)),
    _Rotation("paired", known.ROTARY_PAIRED, _PAIRS, _FIRST_HALF),
    _Rotation("paired", (known.ROTARY_FULL,), _PAIRS_OF_LIST, _EVERY_SECOND),
    _Rotation("paired", (known.ROTARY_BY_CHANNEL,), ("rotate_half_llm", known.ROTATE_PAIRS), _EVERY_SECOND),
    _Rotation("paired_cast_last", (known.ROTARY_PAIRED_CAST_LAST,), _PAIRS, _FIRST_HALF),
    _Rotation("paired_cast_last", known.ROTARY_BY_CHANNEL_CAST_LAST[:1], _PAIRS_OF_LIST, _EVERY_SECOND),
    _Rotation(
        "paired_cast_last",
        known.ROTARY_BY_CHANNEL_CAST_LAST[1:],
        ("rotate_half_text", known.ROTATE_PAIRS),
        _EVERY_SECOND,
    ),
)

# Fingerprints of a norm's forward and of its `_norm` -> the variant, and its arguments but for those of the forward,
# of which the hidden states come first and all others last.
_NORMS: dict[tuple[str, str | None], tuple[str, str]] = {
    (known.LLAMA_RMS_NORM, None): ("standard", "self.weight, self.variance_epsilon"),
    (known.LLAMA4_RMS_NORM, known.GEMMA_NORMALIZED): ("standard", "self.weight, self.eps"),
    **{(norm, None): ("cast_last", "self.weight, self.variance_epsilon") for norm in known.CAST_LAST_RMS_NORM},
    (known.MOSHI_RMS_NORM, known.GEMMA_NORMALIZED): ("cast_last", "self.weight, self.eps"),
    (known.GATED_RMS_NORM, None): ("gated", "self.weight, self.variance_epsilon"),
    (known.GEMMA_RMS_NORM, known.GEMMA_NORMALIZED): ("offset", "self.weight, self.eps"),
    (known.UNWEIGHTED_RMS_NORM, known.GEMMA_NORMALIZED): ("unweighted", "self.eps"),
}

# The norm after a residual sum -> the variant of both in one.
_RESIDUAL_NORMS = {"standard": "residual", "cast_last": "residual_cast_last"}

# Fingerprints of an expert's forward and of its `_apply_gate` -> the variant, and its arguments after the routing's.
_EXPERTS: dict[tuple[str, str | None], tuple[str, str]] = {
    **{(forward, None): ("standard", "") for forward in known.ROUTED_EXPERTS},
    **{(forward, known.CLAMPED_GATE): ("clamped", ", self.limit") for forward in known.GATED_EXPERTS},
    **{(forward, known.CLAMPED_SILU_GATE): ("clamped", ", self.swiglu_limit") for forward in known.GATED_EXPERTS},
    **{
        (forward, known.CLAMPED_ALPHA_GATE): ("clamped", ", self.swiglu_limit, self.swiglu_alpha, 1.0")
        for forward in known.GATED_EXPERTS
    },
    (known.BIASED_EXPERTS, known.INTERLEAVED_ALPHA_GATE): (
        "biased",
        ", self.gate_up_proj_bias, self.down_proj_bias, self.limit, self.alpha",
    ),
}

# How upstream makes masks that attention kernels take; the third is for layers of another kind.
_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_recurrent_attention_mask"}
_MASK_OPTIONS = {"or_mask_function", "and_mask_function", "block_sequence_ids"}

# Upstream's gated MLPs, gate and up from two projections or as halves of one, and the product in each.
_GATED_MLPS = (
    ("self.down_proj(self.act_fn(self.gate_proj($x)) * self.up_proj($y))", "self.act_fn($gate) * $up"),
    (
        "$gate, $up = $both.chunk(2, dim=-1)\n$product = $up * self.activation_fn($gate)",
        "$up * self.activation_fn($gate)",
    ),
)


@dataclass(frozen=True)
class Finding:
    """A part of an architecture that an op might compute.

    Attributes:
        symbol: upstream's class, method or function.
        op: "rms_norm/standard", or the op's name alone where no variant of it is this part.
        left: why upstream's code stays; empty where a slot stands for it.
    """

    symbol: str
    op: str
    left: str = ""


@dataclass(frozen=True)
class Port:
    """What was found in one architecture.

    Attributes:
        arch: the folder's name under `transformers/models`.
        patch: serves `opslot.generated.<arch>`.
        findings: by op, each in the order of upstream's module.
    """

    arch: str
    patch: PatchConfig
    findings: tuple[Finding, ...]

    @property
    def slots(self) -> tuple[Finding, ...]:
        """The parts that got a slot."""
        return tuple(finding for finding in self.findings if not finding.left)


def port(arch: str, release: Release | None = None) -> Port:
    """Find the slots of an architecture in upstream's source.

    Args:
        arch: the folder's name under `transformers/models`, e.g. "mistral".
        release: the Transformers release; the installed one by default.

    Raises:
        PatchError: there is no such architecture.
    """
    return _ported(arch, release or installed_release())


@lru_cache(maxsize=64)
def _ported(arch: str, release: Release) -> Port:
    name = f"transformers.models.{arch}.modeling_{arch}"
    module = release.module(name)
    patch = PatchConfig(name, description=f"{arch}, its slots found by what its code computes")
    scan = _Scan(module, patch)
    findings = tuple(scan.findings())
    scan.write_skipped(findings)
    return Port(arch, patch, findings)


def patch_of(arch: str) -> PatchConfig | None:
    """The patch of an architecture in whose source slots are found; None without any, or without such a source."""
    try:
        found = port(arch)
    except PatchError:
        return None
    return found.patch if found.slots else None


class _Scan:
    """Reads one upstream module and writes its patch."""

    def __init__(self, module: UpstreamModule, patch: PatchConfig) -> None:
        self.module, self.patch = module, patch
        self.classes = {node.name: node for node in module.tree.body if isinstance(node, ast.ClassDef)}
        self.norms: dict[str, tuple[str, str]] = {}

    def findings(self) -> Iterator[Finding]:
        yield from self._norms()
        yield from self._gated_mlps()
        yield from self._rotations()
        yield from self._experts()
        yield from self._losses()
        yield from self._residual_norms()
        yield from self._attention()
        known.record_outputs(self.patch)
        for name in self._models():
            known.convert_checkpoints(self.patch, name.removesuffix("PreTrainedModel"))
        if why := self._unlike_a_decoder():
            known.keep_sequences_whole(self.patch, self._models(), why)
        others = [name for name in self.classes if name.endswith("ForConditionalGeneration")]
        if others:
            known.keep_sequences_whole(self.patch, others, "it is no language model alone")

    def write_skipped(self, findings: Iterable[Finding]) -> None:
        """Write each skipped part on the class that has it, or on all models of the module."""
        skipped: dict[str, list[tuple[str, str, str]]] = {}
        for finding in findings:
            if finding.left:
                owner = finding.symbol.split(".")[0]
                attention = finding.op.startswith("attention")
                op = "attention" if attention else finding.op
                for name in [owner] if owner in self.classes and not attention else self._models():
                    skipped.setdefault(name, []).append((op, finding.symbol, finding.left))
        if skipped:
            self.patch.add_final_block(
                "\n".join(f"{n}._opslot_skipped = {tuple(parts)!r}" for n, parts in skipped.items())
            )

    def _models(self) -> list[str]:
        """The classes that all of the module's models derive from."""
        return [name for name in self.classes if name.endswith("PreTrainedModel")]

    def _unlike_a_decoder(self) -> str:
        """Why tokens may meet elsewhere than in causal attention, or ""."""
        layers = [name for name, _ in self._methods("forward") if name.endswith("DecoderLayer")]
        unknown = [name for name in layers if self._print(f"{name}.forward") not in known.DECODER_LAYERS]
        if unknown or not layers:
            return f"{unknown[0]} is none of the layers that opslot knows" if unknown else "it has no decoder layers"
        return self._unlike_masks() or self._masks_without_positions()

    def _norms(self) -> Iterator[Finding]:
        for name, forward in self._methods("forward"):
            found = self._print(forward) or ""
            variant, args = _NORMS.get((found, self._print(f"{name}._norm")), ("", ""))
            if variant:
                slot = OpSlot("rms_norm", variant)
                hidden_states, *others = self._arguments(forward)
                self.patch.slot_method(forward, slot, args=", ".join([hidden_states, args, *others]), expects=found)
                yield Finding(name, str(slot))
                self.norms[name] = variant, args
            elif "RMSNorm" in name:
                yield Finding(name, "rms_norm", "computes another norm than those that opslot knows")

    def _gated_mlps(self) -> Iterator[Finding]:
        slot = OpSlot("swiglu_mlp", "standard")
        for name, forward in self._methods("forward"):
            if product := self._gated_product(forward):
                self.patch.slot_expr(forward, slot, product, args="$gate, $up")
                yield Finding(name, str(slot))
            elif name.endswith("MLP") and "act" in self._text(forward):
                yield Finding(name, "swiglu_mlp", "is no down(act(gate) * up), or does more between")

    def _gated_product(self, forward: str) -> str:
        """The pattern of a gated MLP's one product, or ""."""
        # Parsing takes most of the time.
        if "down_proj" in self._text(forward):
            for form, product in _GATED_MLPS:
                if self._count(forward, form) == self._count(forward, product) == 1:
                    return product
        return ""

    def _rotations(self) -> Iterator[Finding]:
        for name in self.module.symbol_names:
            if re.fullmatch(r"apply_\w*rotary\w*", name):
                form = self._rotation(name)
                op = str(form.slot) if form else "rotary_pos_emb"
                yield Finding(name, op, self._slot_rotation(name, form))

    def _rotation(self, name: str) -> _Rotation | None:
        """The form of a rotary function; None where opslot knows none that it is."""
        found = self._print(name)
        for form in _ROTATIONS:
            if found in form.prints and (form.helper is None or self._print(form.helper[0]) == form.helper[1]):
                return form
        return None

    def _slot_rotation(self, name: str, form: _Rotation | None) -> str:
        """Give the calls of a rotary function their slot, or say why they stay upstream's."""
        if form is None:
            return "rotates otherwise than the forms that opslot knows"
        if form.angles == _EVERY_SECOND and not self._angles_by_pairs():
            return "may turn two channels of a pair by two angles, or by learned ones"
        callers = self._callers(name)
        wanted = ["cos", "sin"] if form.variant == "single" else ["k", "cos", "sin"]
        options = set() if form.angles else {"unsqueeze_dim"}
        if not all(_rotates(call, 1 + len(wanted), options) for calls in callers.values() for call in calls):
            return f"is called with more or less than {'x' if form.variant == 'single' else 'q'}, {', '.join(wanted)}"
        if not self._called_by_methods(name):
            return "is called by no method, or by one without a self to hold a slot"
        if form.angles:
            args = f"$q, $k, $cos{form.angles}, $sin{form.angles}"
            for method, calls in callers.items():
                self.patch.slot_expr(method, form.slot, f"{name}($q, $k, $cos, $sin)", args=args, count=len(calls))
        else:
            expects = {name: self._print(name) or ""} | ({form.helper[0]: form.helper[1]} if form.helper else {})
            self.patch.slot_calls(name, form.slot, expects=expects)
        return ""

    def _angles_by_pairs(self) -> bool:
        """Whether the rotary embeddings give neighbouring channels one angle."""
        makers = [name for name in self.classes if re.search(r"(?<!Vision)RotaryEmbedding$", name)]
        found = {(self._print(f"{m}.forward"), self._print(f"{m}.recomposition_frequencies")) for m in makers}
        return bool(found) and found <= set(known.ANGLES_BY_PAIRS)

    def _experts(self) -> Iterator[Finding]:
        for name, forward in self._methods("forward"):
            found = self._print(forward) or ""
            variant, others = _EXPERTS.get((found, self._print(f"{name}._apply_gate")), ("", ""))
            if variant:
                slot = OpSlot("moe_experts", variant)
                hidden_states, index, weights = self._arguments(forward)
                args = f"{hidden_states}, self.gate_up_proj, self.down_proj, {index}, {weights}{others}"
                self.patch.slot_method(forward, slot, args=args, expects=found, outside_decorators=True)
                yield Finding(name, str(slot))
            elif name.endswith("Experts"):
                yield Finding(name, "moe_experts", "computes otherwise than the forms that opslot knows")
        name, slot = "load_balancing_loss_func", OpSlot("load_balancing_loss", "standard")
        if (loss := self._print(name)) is None:
            return
        if loss in known.LOAD_BALANCING_LOSS and self._called_by_methods(name):
            self.patch.slot_calls(name, slot, expects={name: loss})
            yield Finding(name, str(slot))
        else:
            yield Finding(name, "load_balancing_loss", "is another loss than the one that opslot knows")

    def _losses(self) -> Iterator[Finding]:
        slot = OpSlot("cross_entropy_loss", "causal")
        for name, forward in self._methods("forward"):
            if not name.endswith("ForCausalLM"):
                continue
            if sum(self._count(forward, pattern) for pattern in loss_form(slot)[0]) == 1:
                self.patch.slot_loss(forward, slot)
                yield Finding(name, str(slot))
            else:
                yield Finding(name, str(slot), "does more between its head and its loss, or calls another loss")
        yield from self._generic_heads()

    def _generic_heads(self) -> Iterator[Finding]:
        """Upstream's mixins build upstream's own backbone, which has no slots."""
        for name, node in self.classes.items():
            head = next((head for head in known.GENERIC_HEADS if name.endswith(head)), None)
            if head is None or not {f"Generic{head}"} & set(_bases(node)) or self._own_methods(node):
                continue
            prefix = name.removesuffix(head)
            if f"{prefix}Model" not in self.classes:
                continue
            known.slot_generic_head(self.patch, prefix, head)
            if head == known.CLASSIFIER:
                yield Finding(name, "cross_entropy_loss/sequence_classification")

    def _residual_norms(self) -> Iterator[Finding]:
        for name, forward in self._methods("forward"):
            if not name.endswith("DecoderLayer") or self._count(forward, known.RESIDUAL_NORM) != 1:
                continue
            made = re.search(r"self\.post_attention_layernorm = (\w+)\(", self._text(f"{name}.__init__"))
            norm, args = self.norms.get(made.group(1), ("", "")) if made else ("", "")
            if variant := _RESIDUAL_NORMS.get(norm):
                prefix = name.removesuffix("DecoderLayer")
                known.slot_residual_norm(self.patch, prefix, variant, args.replace("self.", "norm."))
                yield Finding(name, f"rms_norm/{variant}")

    def _attention(self) -> Iterator[Finding]:
        """Attention is chosen per model, so all of its parts must be what the kernels compute."""
        asking = "ALL_ATTENTION_FUNCTIONS"
        parts = [name for name, forward in self._methods("forward") if asking in self._text(forward)]
        if not parts:
            return
        told = (f"{name} {why}" for name in parts if (why := self._unlike_attention(name)))
        why = self._unlike_masks() or next(told, "")
        if self._print("eager_attention_forward") != known.EAGER_ATTENTION:
            why = "its eager attention is more than softmax(scale q k + mask) v"
        yield Finding(", ".join(parts), "attention/causal", why)

    def _unlike_masks(self) -> str:
        """Why not all of the module's masks are causal, with or without a window, or ""."""
        nodes = list(ast.walk(self.module.tree))
        makers = {n.id for n in nodes if isinstance(n, ast.Name) and re.fullmatch(r"create_\w*mask\w*", n.id)}
        # As a keyword, or as a key of the keywords.
        options = {n.arg for n in nodes if isinstance(n, ast.keyword) and n.arg in _MASK_OPTIONS}
        options |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)} & _MASK_OPTIONS
        if not makers or options or makers - _MASKS:
            found = ", ".join(sorted(options | (makers - _MASKS))) or "makers that opslot does not know"
            return f"its masks are not causal alone: {found}"
        return ""

    def _masks_without_positions(self) -> str:
        """Why masks can't tell the documents of a packed row apart, or "".

        They are told apart by position_ids that begin anew, and gpt-oss makes its masks without these.
        """
        assigned = [node for node in ast.walk(self.module.tree) if isinstance(node, ast.Assign)]
        # mask_kwargs = {"position_ids": position_ids, ...}, and makers chosen by a condition before they are called.
        given = _names_of(node for node in assigned if "position_ids" in _keys(node.value))
        given |= _names_of(node for node in assigned if _copied(node.value) & given)
        chosen = _names_of(node for node in assigned if isinstance(node.value, ast.IfExp) and _MASKS & _names_in(node))
        for call in (call for maker in _MASKS | chosen for call in _calls_in(self.module.tree, maker)):
            named = {keyword.arg for keyword in call.keywords}
            spread = set().union(*(_names_in(keyword.value) for keyword in call.keywords if keyword.arg is None))
            if "position_ids" not in named and not spread & given:
                return "its masks are made without position_ids, so documents of a packed row would see each other"
        return ""

    def _unlike_attention(self, name: str) -> str:
        """Why a class's attention is not causal self-attention with heads of one width, or ""."""
        forward = self.module.find(f"{name}.forward")
        assert forward is not None
        calls = list(_calls_in(forward, "attention_interface"))
        if len(calls) != 1 or len(calls[0].args) != 5:
            return "calls attention otherwise than the forms that opslot knows"
        unknown = {keyword.arg for keyword in calls[0].keywords} - {"dropout", "scaling", "sliding_window", None}
        if unknown:
            return f"gives attention {', '.join(sorted(map(str, unknown)))}"
        made = self._text(f"{name}.__init__")
        if "self.is_causal = True" not in made:
            return "is not causal"
        if "v_head_dim" in made:
            return "has values of another width than its keys"
        if {"key_value_states", "encoder_hidden_states"} & set(self._arguments(f"{name}.forward")):
            return "attends to other states than its own"
        return ""

    def _methods(self, method: str) -> Iterator[tuple[str, str]]:
        """Each class that defines `method` itself, and the method's symbol."""
        for name, node in self.classes.items():
            if method in self._own_methods(node):
                yield name, f"{name}.{method}"

    @staticmethod
    def _own_methods(node: ast.ClassDef) -> list[str]:
        return [child.name for child in node.body if isinstance(child, ast.FunctionDef)]

    def _text(self, symbol: str) -> str:
        found = self.module.symbol(symbol)
        return found.text if found else ""

    def _print(self, symbol: str) -> str | None:
        text = self._text(symbol)
        return fingerprint(text) if text else None

    def _arguments(self, symbol: str) -> list[str]:
        """Names of a method's parameters, without self."""
        definition = self.module.find(symbol)
        assert isinstance(definition, ast.FunctionDef)
        return [argument.arg for argument in definition.args.args[1:]]

    def _count(self, symbol: str, pattern: str) -> int:
        (definition,) = cst.parse_module(_dedented(self._text(symbol))).body
        return len(find_matches(compile_pattern(pattern), definition))

    def _callers(self, function: str) -> dict[str, list[ast.Call]]:
        """The calls of `function` in each method that calls it."""
        calls = {
            f"{name}.{method.name}": list(_calls_in(method, function))
            for name, node in self.classes.items()
            for method in node.body
            if isinstance(method, ast.FunctionDef)
        }
        return {method: found for method, found in calls.items() if found}

    def _called_by_methods(self, function: str) -> bool:
        """Whether methods call it, and all that do have a `self` to hold a slot."""
        callers = [self.module.find(method) for method in self._callers(function)]
        return bool(callers) and all(
            isinstance(m, ast.FunctionDef) and m.args.args and m.args.args[0].arg == "self" for m in callers
        )


def _calls_in(node: ast.AST, function: str) -> Iterator[ast.Call]:
    for found in ast.walk(node):
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name) and found.func.id == function:
            yield found


def _names_in(node: ast.AST) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def _copied(node: ast.AST) -> set[str]:
    """The names whose `copy()` is called."""
    calls = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
    return set().union(*(_names_in(f) for f in calls if isinstance(f, ast.Attribute) and f.attr == "copy"))


def _names_of(assigned: Iterable[ast.Assign]) -> set[str]:
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def _keys(node: ast.AST) -> set[str]:
    """The keys of a dictionary that is written out; none of anything else."""
    keys = node.keys if isinstance(node, ast.Dict) else ()
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _rotates(call: ast.Call, arguments: int, options: set[str]) -> bool:
    """Whether a call gives that many arguments by place, none of them None, and at most `options` by name."""
    nothing = any(isinstance(argument, ast.Constant) and argument.value is None for argument in call.args)
    return len(call.args) == arguments and not nothing and {keyword.arg for keyword in call.keywords} <= options


def _bases(node: ast.ClassDef) -> Iterable[str]:
    return (base.id for base in node.bases if isinstance(base, ast.Name))


def _dedented(text: str) -> str:
    indent = len(text) - len(text.lstrip())
    return "\n".join(line[indent:] if line[:indent].isspace() else line for line in text.splitlines()) + "\n"
