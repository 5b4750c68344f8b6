"""Which matmuls and attentions the modules of a model compute, for `opslot.count_flops`."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from opslot._base.source import forward_source
from opslot.models._multimodal.audio import METHOD
from opslot.models.flop_audio import AudioEncoder, read_audio_encoder
from opslot.models.flop_measured import MeasuredAudioEncoder, measure_audio_encoder
from opslot.models.flop_streams import FRAMES, PATCHES, TOKENS, is_model, parent_of, parents_of, streams_of
from opslot.ops._common.model_config import layer_config
from opslot.ops.attention.options import head_widths, option_value
from opslot.slots.protocol import attention_options

_CONVOLUTION = nn.modules.conv._ConvNd
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "num_q_heads")
_TOP_K = ("top_k", "num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


class Flops(NamedTuple):
    """FLOPs of the forward and the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def plus(self, other: Flops, times: float = 1.0) -> Flops:
        """The sum with `times` the FLOPs of `other`."""
        return Flops(self.forward + other.forward * times, self.backward + other.backward * times)


@dataclass(frozen=True)
class AttentionShape:
    """Which keys a query attends to."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None


class ModuleFlops(NamedTuple):
    """FLOPs of a part, per token, patch or frame; those of attention of a shape, per pair of query and key."""

    stream: str
    kind: str | AttentionShape
    flops: Flops


class Uncounted(NamedTuple):
    """A module whose FLOPs are not counted."""

    path: str
    reason: str


class ModuleReader:
    """Finds the matmuls and attentions of a model: one walk over its modules in the order of execution.

    That is the order in which they are registered. `trained` becomes True for a stream at its first parameter with a
    gradient: what follows has input gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.matmuls: list[ModuleFlops] = []
        self.attention: list[ModuleFlops] = []
        self.uncounted: list[Uncounted] = []
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self.streams = dict(streams_of(self.modules, output))
        self.audio_path, self.audio = self._audio_encoder()
        if self.audio is None:
            self.streams = {path: None if stream == FRAMES else stream for path, stream in self.streams.items()}
        elif isinstance(self.audio, MeasuredAudioEncoder):
            self.streams |= dict.fromkeys(self._measured_paths(self.audio), FRAMES)
        self.head = next((path for path, module in self.modules.items() if module is output), None)
        in_towers = (path for path in self.modules if self.streams[path] != TOKENS and not self._is_detached(path))
        tower_trained = any(p.requires_grad for path in in_towers for p in self.modules[path].parameters(recurse=False))
        self.trained: dict[str | None, bool] = {TOKENS: tower_trained}
        # Whether the input of a module has a gradient.
        self.differentiable: dict[str, bool] = {}
        self._read_all()

    def _read_all(self) -> None:
        if getattr(getattr(self.modules[""], "config", None), "is_encoder_decoder", False):
            self.uncounted.append(Uncounted("", "of an encoder-decoder model, each part is counted for every token"))
        skipped: tuple[str, ...] = ()
        for path in self._in_order():
            module, stream = self.modules[path], self.streams[path]
            self.differentiable[path] = self._input_differentiable(path)
            if path.startswith(skipped) and skipped:
                continue
            if stream is None:
                if self.streams.get(parent_of(path), TOKENS) is not None:
                    runs = any(hasattr(m, METHOD) for m in self.modules.values())
                    reason = "whose encoder does not run without values" if runs else f"of a model without {METHOD}"
                    self.uncounted.append(Uncounted(path, f"audio {reason}"))
                    skipped += (f"{path}.",)
                continue
            if _is_inactive(path, self.modules):
                skipped += (f"{path}.",)
                continue
            self._read(path, module, stream)
            if not self._is_detached(path) and any(p.requires_grad for p in module.parameters(recurse=False)):
                self.trained[stream] = True
        if isinstance(self.audio, MeasuredAudioEncoder):
            self._add_measured(self.audio)

    def _measured_paths(self, audio: MeasuredAudioEncoder) -> set[str]:
        """The encoder and what follows it, such as a projector that is a model with the config of the whole."""
        leaves = [path for path, module in self.modules.items() if isinstance(module, nn.Linear | _CONVOLUTION)]
        inside = {path for path in leaves if audio.rows_of(path.rsplit(".", 2)[0] if _adapter_of(path) else path)}
        others = {parent for path in leaves if path not in inside for parent in parents_of(path)}
        return (inside | {parent for path in inside for parent in parents_of(path)}) - others

    def _add_measured(self, audio: MeasuredAudioEncoder) -> None:
        """What an encoder computes beside its linear layers and convolutions: attention."""
        trained = any(p.requires_grad for p in self.modules[self.audio_path].parameters())
        gradients = 2 * (trained and not audio.is_detached(self.audio_path))
        self.matmuls.append(ModuleFlops(FRAMES, "attention", Flops(audio.linear, gradients * audio.linear)))
        if pair := audio.quadratic / audio.rows**2:
            self.attention.append(ModuleFlops(FRAMES, AttentionShape(causal=False), Flops(pair, gradients * pair)))

    def _is_detached(self, path: str) -> bool:
        """Whether a module runs with torch.no_grad(), as the encoders of VibeVoice."""
        return isinstance(self.audio, MeasuredAudioEncoder) and self.audio.is_detached(path)

    def _audio_encoder(self) -> tuple[str, AudioEncoder | MeasuredAudioEncoder | None]:
        """The path of the audio encoder and its rows; those of a second one would need frames of their own."""
        for path, module in self.modules.items():
            if self.streams[path] == FRAMES and is_model(module):
                return path, read_audio_encoder(module) or measure_audio_encoder(self.modules, path)
        return "", None

    def _in_order(self) -> list[str]:
        """Paths of the modules, the convolutions of an audio encoder before its layers."""
        paths = list(self.modules)
        if self.audio is None:
            return paths
        before = {f"{self.audio_path}.{path}" for path in self.audio.positions}
        around = {parent for path in before for parent in parents_of(path)}
        start = paths.index(self.audio_path) + 1
        # With the modules around them and those inside, such as adapters.
        first = [
            path
            for path in paths[start:]
            if path in before or path in around or not before.isdisjoint(parents_of(path))
        ]
        return [*paths[:start], *first, *(path for path in paths[start:] if path not in first)]

    def _input_differentiable(self, path: str) -> bool:
        parent, name = parent_of(path), path.rpartition(".")[2]
        if path and (name == "base_layer" or name in _reads_input(self.modules[parent].__class__)):
            return self.differentiable[parent]
        if _adapter_of(path) == "lora_A":
            return self.differentiable[path.rsplit(".", 2)[0]]
        return self.trained.get(self.streams[path], False)

    def _read(self, path: str, module: nn.Module, stream: str) -> None:
        own = dict(module.named_parameters(recurse=False))
        is_measured = stream == FRAMES and isinstance(self.audio, MeasuredAudioEncoder)
        if isinstance(module, nn.Embedding) or (is_measured and not isinstance(module, nn.Linear | _CONVOLUTION)):
            return
        if isinstance(module, nn.Linear):
            self._add_matmul(path, stream, module.in_features * module.out_features, own)
        elif isinstance(module, _CONVOLUTION):
            self._add_matmul(path, stream, own["weight"].numel(), own, part="convolution")
        elif "expert" in f"{path} {type(module).__name__}".lower() and _stacked_shapes(module):
            self._read_experts(path, module, stream, own)
        # addmm: the linear layers of GPT-2.
        elif {n for n, p in own.items() if p.ndim == 2} == {"weight"} and _names_used(module) & {"linear", "addmm"}:
            self._add_matmul(path, stream, own["weight"].numel(), own)
        elif "gated_delta_rule" in " ".join(_names_used(module)):
            sizes = ("num_v_heads", "head_k_dim", "head_v_dim")
            # The value that the key reads, the update of the state, and the output.
            self._read_recurrence(path, module, stream, "delta rule", sizes, matmuls=3)
        elif hasattr(module, "ssm_state_size") and "A_log" in own and own["A_log"].ndim == 1:
            # The update of the state, and the output.
            self._read_recurrence(path, module, stream, "scan", ("num_heads", "head_dim", "ssm_state_size"), matmuls=2)
        elif "slope_rate" in dict(module.named_buffers(recurse=False)):
            # Lightning attention, a scan with a constant decay.
            self._read_recurrence(
                path, module, stream, "scan", ("num_attention_heads", "head_dim", "head_dim"), matmuls=2
            )
        elif _is_attention(module):
            self._read_attention(path, module, stream)
        else:
            self._report(path, module, own)

    def _add_matmul(
        self, path: str, stream: str, size: float, own: dict[str, Any], part: str = "", scale: float = 1.0
    ) -> None:
        # Those of the input and of the weight, each with as many FLOPs as the forward pass.
        gradients = 0 if self._is_detached(path) else self.differentiable[path] + own["weight"].requires_grad
        scale *= self._rows(path, stream)
        if scale:
            flops = 2 * size * scale
            self.matmuls.append(ModuleFlops(stream, part or self._part(path), Flops(flops, gradients * flops)))

    def _rows(self, path: str, stream: str) -> float:
        """Rows per token, patch or frame: fewer in experts kept as a list of modules, and where patches were merged."""
        if _adapter_of(path):
            # PEFT adapts stacked experts with one low-rank pair per expert.
            base = f"{path.rsplit('.', 2)[0]}.base_layer"
            stacked = [p for p in self.modules[base].parameters(recurse=False) if p.ndim == 3]
            if stacked:
                return (_top_k(self.modules, base) or 0) / len(stacked[0])
            path = base
        found = self._expert_list(path)
        if found is not None:
            top_k = _top_k(self.modules, found)
            if top_k is None:
                self.uncounted.append(Uncounted(path, "no number of experts per token"))
                return 0.0
            return top_k / len(self.modules[found])
        if stream == FRAMES and self.audio is not None:
            if isinstance(self.audio, MeasuredAudioEncoder):
                return self.audio.rows_of(path)
            if path.startswith(f"{self.audio_path}."):
                return self.audio.rows_inside(path.removeprefix(f"{self.audio_path}."))
            return self.audio.rows_after(_first_features(self.modules[_outermost(path, self.modules)]))
        return self._merged(path) if stream == PATCHES else 1.0

    def _expert_list(self, path: str) -> str | None:
        """The ModuleList of experts that a module is in."""
        parents = list(parents_of(path))
        return next(
            (p for p in parents if p.endswith("experts") and isinstance(self.modules[p], nn.ModuleList)),
            None,
        )

    def _merged(self, path: str) -> float:
        """1 / (patches that one row holds): outside of the tower's blocks, where features are concatenated."""
        blocks = [self.modules[p] for p in parents_of(path) if p.rpartition(".")[2].isdigit()]
        if any(_is_attention(module) for block in blocks for module in block.modules()):
            return 1.0
        features = _first_features(self.modules[_outermost(path, self.modules)])
        width = self._tower_width
        return width / features if width and features > width and features % width == 0 else 1.0

    @functools.cached_property
    def _tower_width(self) -> int:
        """Channels of a patch: what the tower's first attention projects."""
        in_tower = (m for p, m in self.modules.items() if self.streams[p] == PATCHES and _is_attention(m))
        return _first_features(next(in_tower, nn.Identity()))

    def _part(self, path: str) -> str:
        if path == self.head:
            return "head"
        if _adapter_of(path):
            return "adapters"
        names = path.split(".")
        if any(name.startswith("shared_expert") and not name.endswith("gate") for name in names):
            return "shared experts"
        if self._expert_list(path) is not None:
            return "experts"
        parent = self.modules[parent_of(path)]
        return "router" if path and "experts" in dict(parent.named_children()) else "linear"

    def _read_experts(self, path: str, module: nn.Module, stream: str, own: dict[str, Any]) -> None:
        top_k = _top_k(self.modules, path)
        if top_k is None:
            self.uncounted.append(Uncounted(path, f"{type(module).__name__} has no number of experts per token"))
            return
        for name, shape in _stacked_shapes(module).items():
            self._add_matmul(path, stream, math.prod(shape[1:]), {"weight": own[name]}, "experts", top_k)

    def _read_recurrence(
        self, path: str, module: nn.Module, stream: str, part: str, names: tuple[str, ...], matmuls: int
    ) -> None:
        """`matmuls` of the state of every head with a vector, per token; `names` are the sizes of the states."""
        sizes = [getattr(module, name, None) for name in names]
        if not all(isinstance(size, int) for size in sizes):
            self.uncounted.append(Uncounted(path, f"{type(module).__name__} has no sizes of its heads"))
            return
        flops = 2 * matmuls * math.prod(sizes)  # type: ignore[arg-type]
        self.matmuls.append(ModuleFlops(stream, part, Flops(flops, 2 * flops * self._backward(path, module))))

    def _read_attention(self, path: str, module: nn.Module, stream: str) -> None:
        config = getattr(module, "config", None)
        heads = next((n for o in (module, config) for k in _HEADS if isinstance(n := getattr(o, k, None), int)), None)
        problem = None
        if heads is None:
            problem = "no number of heads"
        elif getattr(module, "is_cross_attention", False):
            problem = "cross attention, whose keys are not in the text"
        elif any("indexer" in name.lower() for name, _ in module.named_children()):
            problem = "sparse attention, whose keys an indexer selects"
        elif stream == PATCHES and getattr(config, "fullatt_block_indexes", None) is not None:
            problem = "attention within windows of an image"
        widths = head_widths(module, config) if problem is None else (0, 0)
        if problem is None and not all(widths):
            problem = "no head size"
        if problem is not None or heads is None:
            self.uncounted.append(Uncounted(path, f"{type(module).__name__}: {problem}"))
            return
        flops = 2 * heads * sum(widths)
        backward = 2 * flops * self._backward(path, module)
        shape = _shape(module, config)
        if stream == FRAMES and self.audio is not None:
            shape = AttentionShape(causal=False, chunk=self.audio.window)
        self.attention.append(ModuleFlops(stream, shape, Flops(flops, backward)))

    def _backward(self, path: str, module: nn.Module) -> bool:
        """Whether what a mixer computes between its projections has a gradient; its last projection comes after."""
        projections = [child for child in module.children() if any(True for _ in child.parameters())]
        own = any(p.requires_grad for p in module.parameters(recurse=False))
        return (
            self.differentiable[path] or own or any(p.requires_grad for c in projections[:-1] for p in c.parameters())
        )

    def _report(self, path: str, module: nn.Module, own: dict[str, Any]) -> None:
        kind = type(module).__name__
        matrices = [name for name, p in own.items() if p.ndim > 1 and 1 not in p.shape]
        direct = any(isinstance(child, nn.Linear) for child in module.children())
        if matrices:
            self.uncounted.append(Uncounted(path, f"what {kind} computes with {', '.join(matrices)} is unknown"))
        elif direct and own.keys() - {"weight", "bias"} and not _is_attention(module):
            self.uncounted.append(Uncounted(path, f"what {kind} computes between its projections is unknown"))
        elif direct and kind.endswith("Attention") and not any(_is_attention(m) for m in module.modules()):
            self.uncounted.append(Uncounted(path, f"{kind} does not use Transformers' attention interface"))


def _is_attention(module: Any) -> bool:
    return attention_options(module) is not None or "ALL_ATTENTION_FUNCTIONS" in _names_used(module)


def _shape(module: Any, config: Any) -> AttentionShape:
    found = attention_options(module)
    bidirectional = (found is not None and found[0] == "bidirectional") or not getattr(module, "is_causal", True)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    config = layer_config(config, index or 0)
    kind = kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else None
    window = option_value(module, "sliding_window") if found else getattr(module, "sliding_window", None)
    if window is None and not hasattr(module, "sliding_window"):
        slides = kind == "sliding_attention" or (kind is None and getattr(config, "use_sliding_window", True))
        window = getattr(config, "sliding_window", None) if slides else None
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return AttentionShape(not bidirectional, window if isinstance(window, int) else None, chunk)


def _top_k(modules: dict[str, Any], path: str) -> int | None:
    """Experts per token, from the experts, the modules around them, or the config."""
    parents = [modules[parent] for parent in parents_of(path)]
    near = [modules[path], *parents[:2], *(child for parent in parents[:2] for child in parent.children())]
    configs = [config for parent in parents if (config := getattr(parent, "config", None)) is not None]
    text = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    values = (getattr(holder, name, None) for holder in (*near, *text) for name in _TOP_K)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _outermost(path: str, modules: dict[str, Any]) -> str:
    """The outermost module around `path` that is neither a model nor a list: the whole of a merger or projector."""
    found = path
    for parent in parents_of(path):
        if isinstance(modules[parent], nn.ModuleList) or hasattr(modules[parent], "get_input_embeddings"):
            break
        found = parent
    return found


def _first_features(module: nn.Module) -> int:
    return next((m.in_features for m in module.modules() if isinstance(m, nn.Linear)), 0)


def _stacked_shapes(module: nn.Module) -> dict[str, Any]:
    """The shapes of a module's stacked weights, also of quantized ones."""
    found = {name: p.shape for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
    return module.__dict__.get("stacked_shapes") or found


def _adapter_of(path: str) -> str:
    """ "lora_A" or "lora_B" for the Linear of a PEFT adapter."""
    parts = path.rsplit(".", 2)
    return parts[1] if len(parts) == 3 and parts[1] in ("lora_A", "lora_B") else ""


def _is_inactive(path: str, modules: dict[str, Any]) -> bool:
    """Whether PEFT does not run a module: an adapter that is not active, or the original of a trained copy."""
    parent, name = parent_of(path), path.rpartition(".")[2]
    if name == "original_module" and "modules_to_save" in dict(modules[parent].named_children()):
        return True
    for holder in (parent, parent_of(parent)):
        active = getattr(modules[holder], "active_adapters", None)
        if isinstance(active, list) and parent_of(path) != holder and holder and parent.startswith(f"{holder}."):
            return isinstance(modules[parent], nn.ModuleDict) and name not in active
    return False


def _names_used(module: Any) -> frozenset[str]:
    """Global names and attributes in the code of a module's forward."""
    return _names_in(module.__class__)


@functools.cache
def _names_in(cls: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


@functools.cache
def _reads_input(cls: Any) -> frozenset[str]:
    """Children that a class's forward calls with one of its own arguments, e.g. q_proj, k_proj and v_proj."""
    try:
        function = next(iter(ast.parse(forward_source(cls)).body), None)
    except SyntaxError:
        return frozenset()
    if not isinstance(function, ast.FunctionDef):
        return frozenset()
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given = {argument.arg for argument in function.args.args[1:]} - stored
    return frozenset(
        call.func.attr
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "self"
        and call.args
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id in given
    )
