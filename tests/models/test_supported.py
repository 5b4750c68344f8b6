"""Every supported architecture generates, and a lost slot is one warning."""

from __future__ import annotations

import ast
import builtins
import fnmatch
import json
import logging
import re
import runpy
import symtable
from pathlib import Path

import pytest

from opslot.models import _registry
from opslot.models.discovery import discover, finder, supported
from opslot.models.discovery.supported import lost_slots, supported_architectures
from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.lock import Lock, lock_path
from opslot.patchgen.materialization import materialize
from opslot.patchgen.source import installed_release

ALLOWED = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "allowed_skips.py"))["ALLOWED"]

FROM_THE_SPECIFICATION = {
    "llama", "qwen2", "qwen3", "seed_oss", "qwen3_moe", "deepseek_v3", "qwen3_vl", "qwen3_vl_moe", "qwen2_vl",
    "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "glm4_moe",
}  # fmt: skip

TEXT = {
    "afmoe", "apertus", "arcee", "bamba", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "deepseek_v4", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1", "flex_olmo", "gemma", "gemma2",
    "gemma3", "gemma3n", "gemma4", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granite",
    "granitemoe", "granitemoehybrid", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "llama", "llama4", "longcat_flash", "mimo_v2_flash", "minimax", "minimax_m2", "ministral",
    "ministral3", "mistral", "mistral4", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "youtu",
}  # fmt: skip

MULTIMODAL = {
    "gemma3", "gemma4", "glm4v", "glm4v_moe", "internvl", "kimi_k25", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "minimax_m3_vl", "mistral3", "pixtral", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_5",
    "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe",
}  # fmt: skip

NO_LANGUAGE_MODEL = "Transformers has no class with a language model's loss for {}"


def test_lock_lists_the_specification_and_the_most_used_families():
    assert set(supported_architectures()) >= FROM_THE_SPECIFICATION | TEXT | MULTIMODAL
    assert len(TEXT) >= 45


def test_every_supported_architecture_was_checked():
    """`make test-architectures` writes the outcome, which docs/architectures.md shows."""
    outcome = json.loads((Path(__file__).parents[2] / "benchmarks" / "architectures.json").read_text())["architectures"]
    failed = {}
    for arch, checked in outcome.items():
        wrong = [name for name, (result, _) in checked["checks"].items() if result == "failed"]
        if wrong or checked["error"] not in ("", NO_LANGUAGE_MODEL.format(arch)):
            failed[arch] = wrong or checked["error"]
    assert set(outcome) == set(supported_architectures())
    assert failed == {}


NO_EXPERTS = "ep=2, but {} has no experts"
INSIDE_ITS_ENCODER = "its language model is not separate from its encoder"
# Those with `NO_EXPERTS`.
WITHOUT_EXPERTS = {
    "apertus", "apertus1p5", "arcee", "bamba", "cohere", "cohere2", "cwm", "dory", "ernie4_5", "exaone4",
    "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm", "glm4", "glm4v", "granite", "granite_swa",
    "helium", "hunyuan_v1_dense", "idefics3", "internvl", "lfm2", "lfm3", "llama", "llava", "llava_next",
    "llava_next_video", "llava_onevision", "mamba2", "ministral", "ministral3", "mistral", "mistral3", "mllama",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "omniasr", "phi", "phi3", "phi4_multimodal",
    "pixtral", "qwen2", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_vl", "seed_oss",
    "smollm3", "stablelm", "starcoder2", "youtu", "zamba2",
}  # fmt: skip
TRANSFORMERS_RAISES = (
    "Transformers raises AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'"
)
# By check and architecture.
BY_DOCUMENT = "packed documents: it runs a module once for each packed document"
UNSUPPORTED = {
    ("compiled", "deepseek_v4"): BY_DOCUMENT,
    ("compiled", "qwen4_exp"): BY_DOCUMENT,
    ("packed", "mllama"): INSIDE_ITS_ENCODER,
    ("sp", "mllama"): f"sequences of MllamaForConditionalGeneration cannot be sharded (sp=2): {INSIDE_ITS_ENCODER}",
    ("sp", "phi4_multimodal"): "sequences of Phi4MultimodalForCausalLM cannot be sharded (sp=2): it places features "
    "of images or audio in sequences inside its language model",
    ("eager with_images", "llama4"): TRANSFORMERS_RAISES,
    ("frozen with_images", "llama4"): TRANSFORMERS_RAISES,
}


def test_unsupported_checks_are_known_with_their_reasons():
    """A check that becomes unsupported is a loss, like one that fails."""
    file = Path(__file__).parents[2] / "benchmarks" / "architectures.json"
    without_experts, found = set(), {}
    for arch, outcome in json.loads(file.read_text())["architectures"].items():
        for kind in ("checks", "with_images"):
            for check, (result, reason) in outcome.get(kind, {}).items():
                if result != "unsupported":
                    continue
                if check == "ep" and re.fullmatch(re.escape(NO_EXPERTS).replace(r"\{\}", r"\w+"), reason):
                    without_experts.add(arch)
                else:
                    found[check if kind == "checks" else f"{check} {kind}", arch] = reason
    assert found == UNSUPPORTED
    assert without_experts == WITHOUT_EXPERTS


def representatives():
    """Architectures with every op and variant, and with forms that no other has."""
    lock, version = Lock.load(lock_path()), installed_release().version
    variants = {
        arch: {slot.split()[-1] for slot in lock.slots[arch].get(version, ())} for arch in supported_architectures()
    }
    chosen = {"llama", "qwen3_moe", "deepseek_v3", "qwen3_vl", "falcon_h1", "mamba2", "minimax"}
    while missing := set().union(*variants.values()) - set().union(*(variants[arch] for arch in chosen)):
        chosen.add(max(sorted(variants), key=lambda arch: len(variants[arch] & missing)))
    return chosen


def quick_or_slow():
    quick = representatives()
    return [pytest.param(arch, marks=[] if arch in quick else pytest.mark.slow) for arch in supported_architectures()]


def test_models_that_transformers_itself_cannot_run_are_known():
    """For them the comparison with Transformers is unsupported, not failed."""
    file = Path(__file__).parents[2] / "benchmarks" / "architectures.json"
    found = {
        (arch, kind)
        for arch, outcome in json.loads(file.read_text())["architectures"].items()
        for kind in ("checks", "with_images")
        for check in ("eager", "frozen")
        if outcome.get(kind, {}).get(check, ["passed"])[0] != "passed"
    }
    # Transformers 5.24 reads an attribute that the outputs of its language model lack.
    assert found == {("llama4", "with_images")}


def undefined_names(text):
    """Names that functions of a module read, and neither the module nor Python defines."""
    module = symtable.symtable(text, "generated", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= set(vars(builtins)) | {"__file__", "__name__", "__class__"}
    found, remaining = set(), list(module.get_children())
    while remaining:
        table = remaining.pop()
        remaining += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return found - known


def test_names_that_a_module_does_not_define_are_found():
    text = "import a\nb = 1\nclass C:\n    def f(self, d):\n        return [(a, b, C, d, len(e), g) for g in d]\n"
    assert undefined_names(text) == {"e"}


def shadowed_imports(text):
    """Names imported from opslot that a function also assigns, which makes each use in it a local variable."""
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.module.startswith("opslot.")]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    found, remaining = set(), [symtable.symtable(text, "generated", "exec")]
    while remaining:
        table = remaining.pop()
        remaining += table.get_children()
        if table.get_type() == "function":
            found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()} & names
    return found


def test_imports_that_a_function_shadows_are_found():
    text = "from opslot.a import b, c\nfrom d import e\ndef f():\n    b(c, e)\n    b = e = 1\n"
    assert shadowed_imports(text) == {"b"}


@pytest.mark.parametrize("arch", quick_or_slow())
def test_generated_text_compiles(arch):
    release = installed_release()
    text = materialize(arch).read_text()
    compile(text, arch, "exec")
    # Parameters that edits name, such as the cache, have other names in other releases.
    upstream = release.module(f"transformers.models.{arch}.modeling_{arch}").text
    assert undefined_names(text) <= undefined_names(upstream)
    assert shadowed_imports(text) == set()
    assert "_opslot_slots = {" in text
    assert "_opslot_lost_slots" not in text


@pytest.mark.slow
def test_generated_text_of_every_architecture_compiles():
    release = installed_release()
    found = 0
    for folder in sorted((release.root / "models").iterdir()):
        if (folder / f"modeling_{folder.name}.py").is_file() and discover(folder.name).matches:
            compile(generate(discover(folder.name).patch, release), folder.name, "exec")
            found += 1
    assert found >= 240


def matches(pattern, arch, name):
    where, _, wanted = pattern.rpartition(":")
    return where in ("", arch) and fnmatch.fnmatchcase(name, wanted)


@pytest.mark.parametrize("arch", quick_or_slow())
def test_every_skip_has_a_reason_in_the_list(arch):
    unexplained = [
        f"{skip.op}: {skip.symbol} {skip.reason}"
        for skip in discover(arch).skips
        for part in skip.symbol.split(",")
        if not any(
            matches(pattern, arch, part.strip().partition(".")[0])
            for patterns in ALLOWED.get(skip.op, {}).values()
            for pattern in patterns
        )
    ]
    assert unexplained == [], "add a form to ops/<op>/forms.py, or the reason to benchmarks/allowed_skips.py"


@pytest.mark.slow
def test_no_allowed_skip_is_stale():
    """Each pattern is of a part that is still skipped, unless its reason is one of earlier releases."""
    skipped = {
        (skip.op, arch, part.strip().partition(".")[0])
        for arch in supported_architectures()
        for skip in discover(arch).skips
        for part in skip.symbol.split(",")
    }
    stale = [
        (op, pattern)
        for op, reasons in ALLOWED.items()
        for reason, patterns in reasons.items()
        for pattern in patterns
        if not re.search(r", before 5\.\d+$", reason)
        and not any(op == skip and matches(pattern, arch, name) for skip, arch, name in skipped)
    ]
    assert stale == [], "remove them from benchmarks/allowed_skips.py"


def test_lost_slot_is_one_warning(monkeypatch, tmp_path, caplog):
    """Like a release whose norm is not a reviewed form."""
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path))
    release = installed_release()
    lock = Lock.load(lock_path())
    lock.slots["llama"] = {
        version: (*slots, "LlamaGone.forward rms_norm/standard") for version, slots in lock.slots["llama"].items()
    }
    monkeypatch.setattr(supported, "_lock", lambda: lock)
    monkeypatch.setattr(finder, "lock_digest", lambda: "other")
    patch = finder.find_patch("llama", release)
    assert "LlamaMLP.forward swiglu_mlp/standard" in patch.slots
    assert "_opslot_lost_slots = " in generate(patch, release)
    text = lost_slots("llama", patch, release)
    assert text.startswith(
        f"llama has fewer slots in transformers {release.version} than in {release.version}: no LlamaGone"
    )

    module = type("Module", (), {"_opslot_lost_slots": text})
    monkeypatch.setattr(_registry.importlib, "import_module", lambda name: module)
    _registry._generated.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _registry._generated("opslot.generated.llama")
    _registry._generated.cache_clear()
    assert [record.message for record in caplog.records] == [text]


def test_slot_with_another_variant_is_not_lost(monkeypatch):
    """As in releases between two locked ones: the MLP of DeepSeek-V4 is clamped from 5.10 on."""
    release = installed_release()
    lock = Lock.load(lock_path())
    clamped, standard = (f"DeepseekV4MLP.forward swiglu_mlp/{variant}" for variant in ("clamped", "standard"))
    slots = lock.slots["deepseek_v4"][release.version]
    assert clamped in slots
    lock.slots["deepseek_v4"] = {release.version: tuple(standard if slot == clamped else slot for slot in slots)}
    monkeypatch.setattr(supported, "_lock", lambda: lock)
    assert lost_slots("deepseek_v4", finder.find_patch("deepseek_v4", release), release) == ""


def test_slot_of_a_part_that_a_patch_replaces_is_not_lost(monkeypatch):
    patch = PatchConfig("transformers.models.llama.modeling_llama")
    patch.override_method("LlamaMLP.forward", "def forward(self, x):\n    return x\n")
    monkeypatch.setitem(finder.REGISTERED_PATCHES, "llama", patch)
    found = finder.find_patch("llama", installed_release())
    assert "LlamaMLP.forward swiglu_mlp/standard" not in found.slots
    assert not any("_opslot_lost_slots" in block for block in found.final_blocks)


def test_no_warning_without_a_lost_slot():
    patch = PatchConfig("transformers.models.gpt2.modeling_gpt2")
    assert lost_slots("gpt2", patch, installed_release()) == ""


def test_lock_is_small():
    """The lock stores a value only where it changes."""
    data = json.loads(lock_path().read_text())
    steps = data["archs"]["llama"]["symbols"]["transformers.models.llama.modeling_llama:LlamaMLP.forward"]
    assert len(steps) == 1
