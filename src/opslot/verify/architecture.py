"""`check_architecture`: one training step of a tiny random model, compared with Transformers' own class.

Two checks in float32. With every slot bound to eager, loss and all gradients equal Transformers' bit for bit. With the
kernels asked for, loss and all gradients are compared with an fp64 reference (`bisect`), and a failure names the
slot and the layer.
"""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opslot._base.errors import ConfigError, OpslotError
from opslot.models import apply
from opslot.slots import BindingReport, OpsImplementationConfig
from opslot.verify.bisect import Bisection, bisect, loss_and_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BATCH, _LENGTH = 2, 20
# Without noise, initial norm weights are 1 and biases 0, and a kernel that drops one of them would pass.
_NOISE = 0.1

# Values of a tiny config, for those of these fields that a config class has.
_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 8,
    # Latent attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # Linear attention
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Experts
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Inputs per layer
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
}


@dataclass(frozen=True)
class ArchitectureCheck:
    """Result of `check_architecture`.

    Attributes:
        arch: model_type of the checked config.
        kernels: the kernel table with the kernels asked for; None where the model could not be built or bound.
        eager_differences: with every slot bound to eager, the loss and gradients that differ from Transformers'.
        bisection: the kernels asked for against the fp64 reference; None where that check did not run.
        error: why a check did not run.
    """

    arch: str
    kernels: BindingReport | None = None
    eager_differences: tuple[str, ...] = ()
    bisection: Bisection | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """What failed, one sentence each; empty where all checks passed."""
        found = [self.error] if self.error else []
        if self.eager_differences:
            shown = ", ".join(self.eager_differences[:3])
            more = f" and {len(self.eager_differences) - 3} more" if len(self.eager_differences) > 3 else ""
            found.append(f"eager differs from Transformers in {shown}{more}")
        if self.bisection is not None and not self.bisection.ok:
            found.append(str(self.bisection))
        return tuple(found)

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.arch}: failed\n" + "\n".join(self.problems)
        return f"{self.arch}: passed; eager equals Transformers bit for bit, {self.bisection}"


def check_architecture(
    arch_or_config: str | PreTrainedConfig,
    ops: OpsImplementationConfig | dict[str, Any] | str = "auto",
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ArchitectureCheck:
    """Check loss and all gradients of a tiny random model, bound to eager and to `ops`.

    Args:
        arch_or_config: a model_type or a folder under `transformers/models`, for which a tiny config is made; or a
            config, which is used as it is.
        ops: the kernels to check, as `opslot.apply` takes them.
        device: where the model runs.
        seed: of weights and tokens.

    Returns:
        A failed check is a result, not an exception; so is a model that cannot be built or that has no slots.

    Raises:
        ConfigError: Transformers has no such architecture.
    """
    name = _model_type(arch_or_config) if isinstance(arch_or_config, str) else arch_or_config.model_type
    try:
        config = tiny_config(name) if isinstance(arch_or_config, str) else arch_or_config
        return _check(config, ops, torch.device(device), seed)
    except OpslotError as error:
        return ArchitectureCheck(name, error=str(error))
    except Exception as error:
        return ArchitectureCheck(name, error=f"raised {type(error).__name__}: {error}")


def tiny_config(arch: str) -> PreTrainedConfig:
    """A config of a model_type, or of a folder under `transformers/models`, that builds in milliseconds.

    Raises:
        ConfigError: Transformers has no such architecture.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrink(CONFIG_MAPPING[_model_type(arch)]())


def _model_type(arch: str) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if arch in CONFIG_MAPPING_NAMES:
        return arch
    inside = [name for name in CONFIG_MAPPING_NAMES if model_type_to_module_name(name) == arch]
    if not inside:
        near = difflib.get_close_matches(arch, CONFIG_MAPPING_NAMES, 3)
        raise ConfigError(
            f"Transformers has no architecture {arch!r}",
            hint=f"did you mean {' or '.join(map(repr, near))}?" if near else "give a model_type, e.g. 'qwen3'",
        )
    return next((name for name in inside if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), inside[0])


def _shrink(default: PreTrainedConfig) -> PreTrainedConfig:
    """A tiny config of the same class; nested configs are made tiny too."""
    given = default.to_dict()
    given |= {name: given.get(stored) for name, stored in default.attribute_map.items()}
    values = {name: value for name, value in _TINY.items() if given.get(name) is not None}
    if given.get("num_key_value_heads") == given.get("num_attention_heads") and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    kinds = tuple(dict.fromkeys(given.get("layer_types") or ()))
    if kinds:
        values["num_hidden_layers"] = max(2, len(kinds))
        values["layer_types"] = [kinds[i % len(kinds)] for i in range(values["num_hidden_layers"])]
    values |= {name: 0.0 for name, value in given.items() if "dropout" in name and isinstance(value, float)}
    for name in default.sub_configs:
        if getattr(default, name, None) is not None:
            values[name] = _shrink(getattr(default, name)).to_dict()
    return type(default)(**values)


def _check(
    config: PreTrainedConfig, ops: OpsImplementationConfig | dict[str, Any] | str, device: torch.device, seed: int
) -> ArchitectureCheck:
    original = _build(config, seed).to(device)
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (_BATCH, _LENGTH), generator=torch.Generator().manual_seed(seed)).to(device)
    batch = {"input_ids": ids, "labels": ids}

    model = copy.deepcopy(original)
    apply(model, "eager")
    _run_the_same_code(original, model)
    differences = _differences(_step(model, batch, seed), _step(original, batch, seed))
    kernels = apply(model, ops)
    return ArchitectureCheck(config.model_type, kernels, differences, bisect(model, batch))


def _build(config: PreTrainedConfig, seed: int) -> Any:
    """Transformers' own model with a language model's loss."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto: Any = AutoModelForCausalLM
    elif type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = AutoModelForImageTextToText
    else:
        raise ConfigError(f"Transformers has no class with a language model's loss for {config.model_type}")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(copy.deepcopy(config), dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * _NOISE)
    return model


def _run_the_same_code(original: Any, model: Any) -> None:
    """Give the original model the attention and experts implementations that `model` runs, bound to eager."""
    attention = model.config._attn_implementation
    if attention != original.config._attn_implementation and not str(attention).startswith("opslot_"):
        original.set_attn_implementation(attention)
    experts = getattr(model.config, "_experts_implementation", None)
    if experts is not None and experts != original.config._experts_implementation:
        original.set_experts_implementation(experts)


def _step(model: Any, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    devices = [batch["input_ids"].device] if batch["input_ids"].is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return loss_and_gradients(model, batch)


def _differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[str, ...]:
    names = [*wanted, *(name for name in found if name not in wanted)]
    return tuple(n for n in names if n not in found or n not in wanted or not _same(found[n], wanted[n]))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


__all__ = ["ArchitectureCheck", "check_architecture", "tiny_config"]
