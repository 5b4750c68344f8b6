"""The rotary functions that rotary_pos_emb replaces, as reviewed rows. No torch here.

A rotary function depends on its `rotate_half` or equivalent, so both are matched.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView, Reviewed, Skip
from opslot.patchgen.upstream import find_nodes

OP = "rotary_pos_emb"
# (x1, x2) -> (-x2, x1) on the halves of the last dimension, by slices or by `chunk`.
_HALF = ("rotate_half", "3d488c0cec66", "802335ccc140")
# (x0, x1, ...) -> (-x1, x0, ...) on neighboring channels, written in two ways.
_PAIRS, _PAIRS_STACKED = "6f3523dffdca", "7f8ef8d4ac78"
_NEOX = "x * cos + rotate_half(x) * sin over the full head"
_GPTJ = "neighboring channels are rotated in place"
_TO_HALVES = "neighboring channels are rotated, and leave as halves"
# What a variant with one cos and sin per pair takes of those that have one per channel.
_FIRST_HALF, _EVERY_SECOND = ".chunk(2, dim=-1)[0]", "[..., ::2]"


@dataclass(frozen=True)
class RotaryForm(Reviewed):
    """A rotary function.

    Attributes:
        rotation: the function that decides what it means, with its fingerprints; None where there is none.
        at_positions: for functions with the parameter `position_ids` after `sin`, as in code for Transformers before 5:
            what they take of `cos` and `sin`, `{0}` being either of them and `{1}` the positions.
        per_pair: subscript or method that takes one entry per pair of `cos` and `sin`; "" to pass them as they are.
        options: further arguments of the kernel.
        complex_angles: in place of both, one complex tensor has cos + i sin of each pair.
        optional_keys: only calls with queries and keys have a slot.
        inverse: rotates in the other direction, so the kernel takes -sin.
    """

    rotation: tuple[str, ...] | None = _HALF
    at_positions: str = ""
    per_pair: str = ""
    complex_angles: bool = False
    options: tuple[str, ...] = ()
    optional_keys: bool = False
    inverse: bool = False

    def matches(self, module: ModuleView, name: str) -> bool:
        helper = self.rotation
        return module.fingerprint(name) == self.hash and (helper is None or module.fingerprint(helper[0]) in helper[1:])

    @property
    def slot(self) -> Slot:
        return Slot(OP, self.variant, name=_SLOT_NAMES.get(self.variant))

    @property
    def parameters(self) -> list[str]:
        """What the function takes by position."""
        if self.complex_angles:
            return ["q", "k", "freqs_cis"]
        parameters = _ARGUMENTS.get(self.variant, ["q", "k", "cos", "sin"])
        return [*parameters, "position_ids"] if self.at_positions else parameters

    def arguments(self, call: ast.Call) -> list[str] | None:
        """The values of `parameters` in a call, as source text; None if the kernel cannot take the call's arguments."""
        given = [ast.unparse(value) for value in call.args]
        by_name = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        reads_positions = "{1}" in self.at_positions
        if self.at_positions and len(given) < len(self.parameters):
            positions = by_name.pop("position_ids", None if reads_positions else "None")
            given += [positions] if positions is not None else []
        options = set() if self.complex_angles else {"unsqueeze_dim"}
        needed = given[:-1] if self.at_positions and not reads_positions else given
        is_known = len(given) == len(self.parameters) and "None" not in needed and by_name.keys() <= options
        return given if is_known and not any(isinstance(value, ast.Starred) for value in call.args) else None

    def options_of(self, call: ast.Call) -> list[str]:
        """The keyword arguments that the kernel gets of a call, as source text."""
        return [ast.unparse(keyword) for keyword in call.keywords if keyword.arg != "position_ids"]

    def kernel_arguments(self, arguments: Sequence[str]) -> str:
        """The kernel's arguments for those of the function."""
        q, k, *angles = arguments
        if self.at_positions:
            *angles, positions = angles
            angles = [self.at_positions.format(angle, positions) for angle in angles]
        elif self.complex_angles:
            angles = [f"{angles[0]}.real", f"{angles[0]}.imag", *self.options]
        elif self.per_pair:
            angles = [f"{angle}{self.per_pair}" for angle in angles]
        elif self.inverse:
            angles = [angles[0], f"-{angles[1]}"]
        return ", ".join([q, k, *angles])


def _upcast(*rows: tuple[str, str]) -> tuple[RotaryForm, ...]:
    return tuple(RotaryForm(hash_, "full_fp32", f"{_NEOX}, in fp32, cast back", seen) for hash_, seen in rows)


def _partial(*rows: tuple[str, str]) -> tuple[RotaryForm, ...]:
    computes = "the same for the first channels of a head, as many as cos has"
    return tuple(RotaryForm(hash_, "partial", computes, seen) for hash_, seen in rows)


def _with_positions(*rows: tuple[str, str, str, str, str]) -> Iterator[RotaryForm]:
    """Forms with the parameter `position_ids`, which those of Transformers 5 do not have."""
    for hash_, variant, computes, at_positions, seen in rows:
        yield RotaryForm(hash_, variant, computes, f"code outside Transformers: {seen}", at_positions=at_positions)


def _gptj_per_channel(*rows: tuple[str, str, tuple[str, str], str, str]) -> Iterator[RotaryForm]:
    """Forms whose cos and sin have two entries per pair, of which the kernel takes one."""
    angles = {_FIRST_HALF: " by the first half of cos and sin", _EVERY_SECOND: ", one cos and sin per channel"}
    for hash_, variant, rotation, per_pair, seen in rows:
        computes = f"{_GPTJ}{angles[per_pair]}{', in fp32, cast back' if variant == 'gptj_fp32' else ''}"
        yield RotaryForm(hash_, variant, computes, seen, rotation=rotation, per_pair=per_pair)


# Classes may call two forms, which then need slots of different names.
_SLOT_NAMES = {"vision": "rotary_pos_emb_vision", "gptj_to_neox": "rotary_pos_emb_interleaved"}

ROWS = (
    RotaryForm("be80094eafa5", "full", _NEOX, "llama, qwen2, qwen3, mistral, gemma and 113 more"),
    *_with_positions(
        ("af80dd417d15", "full", _NEOX, "{0}", "Llama of Transformers 4.38 to 4.57"),
        ("22cde62f936f", "partial", f"{_NEOX}, or of its first channels", "{0}", "Phi-3 of Transformers 4.56"),
        ("31508ed7c9fa", "full", _NEOX, "{0}[{1}]", "Llama of Transformers 4.35 to 4.37, Mixtral up to 4.46"),
        ("429c7ff19fad", "full", _NEOX, "{0}.squeeze(1).squeeze(0)[{1}]", "Llama of Transformers 4.31"),
        ("98f3e1a35765", "gptj_to_neox", _TO_HALVES, "{0}[{1}]", "DeepSeek-V2"),
    ),
    RotaryForm(
        "be80094eafa5",
        "full",
        "x * cos - rotate_half(x) * sin over the full head",
        "nanochat",
        rotation=("rotate_half", "6f3cb8d8d8cd"),
        inverse=True,
    ),
    *_upcast(
        ("05991b40438a", "olmo, olmo2, olmo3, olmo_hybrid, flex_olmo, lfm3"),
        ("f497ffb90cf6", "modernbert, modernbert_decoder, esm, evolla"),
        ("608a2b7a16b5", "hunyuan_vl"),
    ),
    RotaryForm("9fd25804c00b", "single", "the same for one tensor", "gemma3n, gemma4, diffusion_gemma"),
    *(
        RotaryForm(
            hash_,
            "half_cos_sin",
            "halves are rotated, one cos and sin per pair",
            seen,
            rotation=("_apply_rotary_emb", "6e04c918052c"),
        )
        for hash_, seen in (("53e758234267", "gpt_oss"), ("9b61b7e1a702", "gpt_oss before 5.13"))
    ),
    *_partial(
        ("7eaf8d324cc4", "glm4_moe, gpt_neox, bamba and 13 more"),
        ("24f8d9a2e4fe", "phi3, phi4_multimodal"),
        ("33e92bf9aa90", "nemotron"),
        ("ff1b505dc9ad", "glmasr"),
    ),
    # Calls with queries alone, such as those of an indexer, keep Transformers' code.
    RotaryForm("8d07fa29f03a", "partial", "the same, keys being optional", "qwen4_exp", optional_keys=True),
    RotaryForm("04cc4c575bb9", "vision", "the first channels of [S, heads, D], as many as cos has", "minimax_m3_vl"),
    RotaryForm(
        "a4ac2dbfb6ed",
        "vision",
        "over the full head of [S, heads, D] in fp32, cast back",
        "qwen2_vl, qwen2_5_vl, qwen3_vl, glm4v and 21 more",
    ),
    RotaryForm(
        "652a20e8c59c",
        "gptj_to_neox",
        _TO_HALVES,
        "deepseek_v3, deepseek_v32, glm4_moe_lite and 8 more, from 5.17",
        rotation=None,
    ),
    RotaryForm(
        "15340b7ac99e",
        "gptj_to_neox",
        "the same by way of rotate_half",
        "deepseek_v3, glm4_moe_lite, before 5.17",
    ),
    RotaryForm(
        "53e758234267",
        "gptj",
        f"{_GPTJ}, one cos and sin per pair",
        "openai_privacy_filter",
        rotation=("_apply_rotary_emb", "5bfb91e9b47c"),
    ),
    RotaryForm(
        "9c1a87b7177b",
        "single_gptj_fp32_last",
        "neighboring channels at the end of a head are rotated in fp32, one cos and sin per pair",
        "deepseek_v4",
        rotation=("rotate_half", _PAIRS),
    ),
    *_gptj_per_channel(
        ("092e097bf36a", "gptj", ("rotate_half", _PAIRS), _FIRST_HALF, "glm, glm4, moonshine"),
        ("9fb401b5b413", "gptj", ("rotate_half", _PAIRS), _FIRST_HALF, "helium"),
        ("be80094eafa5", "gptj", ("rotate_half", _PAIRS_STACKED), _EVERY_SECOND, "blt"),
        ("aa3efe91972a", "gptj", ("rotate_half_llm", _PAIRS), _EVERY_SECOND, "glm4v, glm_ocr"),
        ("b7a7d38556e0", "gptj_fp32", ("rotate_half", _PAIRS), _FIRST_HALF, "ernie4_5, ernie4_5_moe, hy_v4_vl"),
        ("613cf3a05c96", "gptj_fp32", ("rotate_half", _PAIRS_STACKED), _EVERY_SECOND, "cohere, cohere2, cohere2_moe"),
        ("21a09e5fb4e2", "gptj_fp32", ("rotate_half_text", _PAIRS), _EVERY_SECOND, "ernie4_5_vl_moe"),
    ),
    *(
        RotaryForm(
            hash_,
            "gptj_fp32",
            f"{_GPTJ} by multiplying complex numbers, in fp32, cast back",
            seen,
            rotation=None,
            complex_angles=True,
            options=options,
        )
        for hash_, seen, options in (
            ("8660734764a0", "deepseek_v2", ()),
            ("9d8e823084d8", "llama4", ("unsqueeze_dim=2",)),
        )
    ),
    RotaryForm(
        "c111796a2fc0",
        "multimodal",
        f"{_NEOX}, after merging the cos and sin of three axes by sections",
        "qwen2_vl, qwen2_5_vl, qwen2_5_omni, paddleocr_vl, before 5.17",
    ),
)

# Forwards of rotary embeddings that give neighboring channels one angle, with the method that merges three axes.
_ONE_ANGLE_PER_PAIR = {
    # blt, cohere, cohere2; 5.18, and before
    ("4102bfc785b5", None),
    ("0e13436351db", None),
    ("0553e142816f", None),
    # glm4v, glm_ocr; 5.18, and 5.17
    ("bde94eb37424", "2b92f5b67232"),
    ("f81458ec4576", "2b92f5b67232"),
    ("dbbe57629bd1", "2b92f5b67232"),
    # ernie4_5_vl_moe; 5.18, and 5.17
    ("9b7b66695131", "d2ffb835b958"),
    ("6ee9e41d71dc", "d2ffb835b958"),
    ("676bdcde1fe2", "d2ffb835b958"),
}


def find_rotary_functions(module: ModuleView) -> Iterator[Match | Skip]:
    """Module-level functions named `apply_*rotary*`."""
    for name, form in rotary_functions(module):
        reason = mismatch(module, name, form)
        if form is None or reason:
            yield Skip(name, OP, reason)
        else:
            yield _match(module, name, form)


def rotary_functions(module: ModuleView) -> Iterator[tuple[str, RotaryForm | None]]:
    """The rotary functions of a module with their forms, None for others than the reviewed ones."""
    for name in module.upstream.definitions:
        if re.fullmatch(r"apply_\w*rotary\w*", name):
            yield name, next((row for row in ROWS if row.matches(module, name)), None)


def mismatch(module: ModuleView, name: str, form: RotaryForm | None) -> str:
    """Why the calls of a rotary function can't have a slot, or ""."""
    if any(_has_trained_angles(module, method) for method in module.calls_by_method):
        return "rotates by trained angles, and its kernels have no gradient for them"
    if form is None:
        return "rotates in another way than the reviewed forms"
    if form.per_pair == _EVERY_SECOND and not _one_angle_per_pair(module):
        return "may rotate two channels of a pair by different or learned angles"
    calls = [call for calls in _calls(module, name, form).values() for call in calls]
    if not calls or not all(form.arguments(call) for call in calls):
        return f"is called with other arguments than {', '.join(form.parameters)}"
    if not module.called_by_methods(name):
        return "is not called by a method, or by one without a self to hold a slot"
    return ""


def _has_trained_angles(module: ModuleView, method: str) -> bool:
    """Whether a method takes the cosine of what it computes from a parameter, such as MLCD's of its class token."""
    if ".cos()" not in module.text(method):
        return False
    made = re.findall(r"(self\.\w+) = nn\.Parameter\(", module.text(f"{method.partition('.')[0]}.__init__"))
    trained = set(made)
    for node in find_nodes(ast.Assign, module.upstream.find(method)):
        if trained & {ast.unparse(part) for part in ast.walk(node.value)}:
            trained |= {ast.unparse(target) for target in node.targets}
    return bool(made) and any(f"{name}.cos()" in module.text(method) for name in trained)


_ARGUMENTS = {
    "single": ["x", "cos", "sin"],
    "single_gptj_fp32_last": ["x", "cos", "sin"],
    "multimodal": ["q", "k", "cos", "sin", "mrope_section"],
}


def _one_angle_per_pair(module: ModuleView) -> bool:
    """Whether all rotary embeddings of the module give neighboring channels one angle."""
    makers = [name for name in module.classes if re.search(r"(?<!Vision)RotaryEmbedding$", name)]
    found = {
        (module.fingerprint(f"{maker}.forward"), module.fingerprint(f"{maker}.recomposition_frequencies"))
        for maker in makers
    }
    return bool(found) and found <= _ONE_ANGLE_PER_PAIR


def _calls(module: ModuleView, name: str, form: RotaryForm) -> dict[str, list[ast.Call]]:
    """The calls of a rotary function by method, those that have a slot."""
    found = {
        method: [call for call in calls if not form.optional_keys or len(call.args) > 1]
        for method, calls in module.callers(name).items()
    }
    return {method: calls for method, calls in found.items() if calls}


def _match(module: ModuleView, name: str, form: RotaryForm) -> Match:
    def write(patch: PatchConfig) -> None:
        if form.at_positions:
            for method, calls in _calls(module, name, form).items():
                for text, count in Counter(map(ast.unparse, calls)).items():
                    call = next(call for call in calls if ast.unparse(call) == text)
                    args = ", ".join([form.kernel_arguments(form.arguments(call) or []), *form.options_of(call)])
                    patch.slot_expr(method, form.slot, text, args=args, count=count)
        elif form.per_pair or form.complex_angles or form.optional_keys or form.inverse:
            arguments = [f"${argument}" for argument in form.parameters]
            for method, calls in _calls(module, name, form).items():
                keywords = Counter("".join(f", {ast.unparse(keyword)}" for keyword in call.keywords) for call in calls)
                for options, count in keywords.items():
                    patch.slot_expr(
                        method,
                        form.slot,
                        f"{name}({', '.join(arguments)}{options})",
                        args=f"{form.kernel_arguments(arguments)}{options}",
                        count=count,
                    )
        else:
            expects = {name: form.hash} | ({form.rotation[0]: form.rotation[1]} if form.rotation else {})
            patch.slot_calls(name, form.slot, expects=expects)

    return Match(name, OP, form.variant, write)


# forms.py has them after the forms around their calls, whose text those match.
FORMS = ()
