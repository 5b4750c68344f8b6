"""Random models of Transformers' classes, a batch for them, and their loss and gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opslot._base.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BATCH, LENGTH = 2, 20
DOCUMENTS = (12, 8)
# Without noise, initial norm weights are 1 and biases 0, and a kernel that drops one of them would pass.
_NOISE = 0.1
# Relative to the largest value of a tensor, and of all gradients: sums in another order, in float32.
_RELATIVE, _FLOOR = 1e-3, 1e-6


def auto_class(config: PreTrainedConfig) -> Any:
    """The Auto class of a config's model with a language model's loss.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if has_images and "vision_config" in config.sub_configs:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if has_images:
        return AutoModelForImageTextToText
    raise ConfigError(f"Transformers has no class with a language model's loss for {config.model_type}")


def random_model(config: PreTrainedConfig, seed: int) -> Any:
    """Transformers' own model of `config` in float32, the same for each call."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * _NOISE)
    return model


def random_ids(config: PreTrainedConfig, seed: int) -> Tensor:
    """Input ids of text, [BATCH, LENGTH]."""
    generator = torch.Generator().manual_seed(seed)
    ids = text_ids(config)
    return ids[torch.randint(len(ids), (BATCH, LENGTH), generator=generator)]


def text_ids(config: PreTrainedConfig) -> Tensor:
    """Ids that mark neither images nor what surrounds them."""
    ids = torch.arange(3, config.get_text_config().vocab_size)
    if not any(name != "text_config" for name in config.sub_configs):
        return ids
    given = config.to_dict()
    marks = [given[name] for name in given if name.endswith(("_token_id", "_token_index"))]
    return ids[~torch.isin(ids, torch.tensor([mark for mark in marks if isinstance(mark, int)], dtype=ids.dtype))]


def whole_batch(ids: Tensor) -> dict[str, Tensor]:
    """Arguments of a forward on whole samples; the loss is divided by the labels of all of them."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    targets = torch.tensor(BATCH * (LENGTH - 1))
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "num_items_in_batch": targets}


def packed_batches(ids: Tensor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Documents of `DOCUMENTS` tokens, packed in one sample, and each alone; with the labels of all in both losses."""
    row = ids[:1]
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    labels = row.masked_fill(positions == 0, -100)
    targets = torch.tensor(int((labels != -100).sum()))
    cu_seqlens = torch.tensor([0, *DOCUMENTS]).cumsum(0).to(torch.int32)
    packed: dict[str, Any] = {
        "input_ids": row,
        "position_ids": positions,
        "labels": labels,
        "num_items_in_batch": targets,
    }
    packed |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    packed |= {"max_length_q": max(DOCUMENTS), "max_length_k": max(DOCUMENTS)}
    parts = zip(row.split(DOCUMENTS, 1), positions.split(DOCUMENTS, 1), labels.split(DOCUMENTS, 1))
    alone = [{"input_ids": i, "position_ids": p, "labels": own, "num_items_in_batch": targets} for i, p, own in parts]
    return [packed], alone


def train_step(model: Any, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The sum of the losses on `batches`, and its gradients, whole ones of sharded parameters too, by FQN."""
    from opslot.checkpoint.model_tensors import clean_fqn

    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        total += loss.detach().cpu()
    result = {"loss": total}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        result[f"grad {clean_fqn(name)}"] = whole.detach().cpu()
    return result


def worst_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The tensor that differs by more than sums in another order do, with its difference; "" if none does."""
    if found.keys() != wanted.keys():
        return f"other gradients: {', '.join(sorted(found.keys() ^ wanted.keys())[:3])}"
    largest = max(float(tensor.abs().max()) for tensor in wanted.values() if tensor.numel())
    worst, text = 1.0, ""
    for name, tensor in wanted.items():
        if not tensor.numel():
            continue
        error = float((found[name] - tensor).abs().max())
        bound = _RELATIVE * float(tensor.abs().max()) + _FLOOR * largest
        if not error <= worst * bound:
            worst, text = error / bound, f"{name} differs by {error:.1e} of {float(tensor.abs().max()):.1e}"
    return text
