"""Random models of Transformers' classes, a batch for them, and their loss and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from opslot._base.errors import ConfigError
from opslot._base.labels import IGNORE_INDEX
from opslot.data.collation import collate, collate_padded, make_sample
from opslot.models._build import auto_class_name, registered_class, shipped_class
from opslot.models._own_loss import averages_its_own_labels
from opslot.models._registry import declared_sub_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The seed of weights and inputs.
SEED = 0
BATCH, LENGTH = 2, 20
# Without noise, initial norm weights are 1 and biases 0, and a kernel that drops one of them would pass.
_NOISE = 0.1
# Relative to the largest value of a tensor, and of all gradients: sums in another order, in float32.
_RELATIVE, _FLOOR = 1e-3, 1e-6


def class_of(config: PreTrainedConfig) -> Any:
    """The class of a config's model with a language model's loss: Transformers', or that of a config class elsewhere.

    Raises:
        ConfigError: there is none.
    """
    import transformers

    if not type(config).__module__.startswith("transformers.") and (own := _own_class(config)) is not None:
        return own
    try:
        name = auto_class_name(config, masked=True)
    except ConfigError as error:
        raise ConfigError(
            f"Transformers has no language model of model_type {config.model_type!r}, whose loss could be checked",
            hint="opslot.apply binds kernels to models without one; compare their outputs with those before it",
        ) from error
    return getattr(transformers, name)


def _own_class(config: PreTrainedConfig) -> Any:
    """The class beside a config class that is not in Transformers, so that its code was allowed to run before."""
    shipped = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    name = next(iter(config.architectures or ()), None) or (str(shipped).rpartition(".")[2] if shipped else None)
    found = None if name is None else shipped_class(config, name, trust_remote_code=True)
    return found or registered_class(config, name)


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, noise: float = _NOISE) -> Any:
    """Transformers' own model of `config` on the CPU, the same for each call; without what does not train.

    Args:
        dtype: of the parameters.
        noise: standard deviation of what is added to the initial weights.
    """
    cls = class_of(config)
    config = copy.deepcopy(config)
    declared = declared_sub_model(config.model_type, cls.__name__)
    for name, value in declared.settings.items() if declared is not None else ():
        setattr(config, name, value)
    generator = torch.Generator().manual_seed(SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = cls._from_config(config, dtype=dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * noise)
    return model


def trained_part(model: Any) -> Any:
    """The sub-model that trains in a model of Transformers' own class, which has no forward; else the model itself."""
    declared = declared_sub_model(model.config.model_type, type(model).__name__.removeprefix("FSDP"))
    return model if declared is None else getattr(model, declared.name)


def random_ids(config: PreTrainedConfig, length: int = LENGTH) -> Tensor:
    """Input ids of text, [BATCH, length]."""
    generator = torch.Generator().manual_seed(SEED)
    ids = text_ids(config)
    return ids[torch.randint(len(ids), (BATCH, length), generator=generator)]


def text_ids(config: PreTrainedConfig) -> Tensor:
    """Ids that mark neither images or audio nor what surrounds them.

    Raises:
        ConfigError: the model has no vocabulary.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None:
        raise ConfigError(
            f"the config of model_type {config.model_type!r} has no vocab_size, so that ids of text are unknown",
            hint="opslot.apply binds kernels to such a model; compare its outputs with those before it",
        )
    ids = torch.arange(3, size)
    marks = [mark for mark in _marks(config) if isinstance(mark, int)]
    return ids[~torch.isin(ids, torch.tensor(marks, dtype=ids.dtype))]


def _marks(config: PreTrainedConfig) -> Iterator[Any]:
    """Ids that a config with encoders, and the configs in it, give to special tokens."""
    nested = [getattr(config, name, None) for name in config.sub_configs]
    yield from (getattr(config, "vocabulary_map", None) or {}).values()
    if any(name != "text_config" for name in config.sub_configs):
        given = config.to_dict()
        yield from (given[name] for name in given if name.endswith(("_token_id", "_token_index")))
    for inside in nested:
        if inside is not None:
            yield from (getattr(inside, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
            yield from _marks(inside)


def whole_batch(ids: Tensor) -> dict[str, Tensor]:
    """Arguments of a forward on whole samples; the loss is divided by the labels of all of them."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    targets = torch.tensor(ids.shape[0] * (ids.shape[1] - 1))
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "num_items_in_batch": targets}


def packed_batches(ids: Tensor, rows: int = 1) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two documents, packed in each sample, and each alone; with the labels of all in both losses.

    Args:
        ids: input ids, [B, S].
        rows: how many of them are packed, in one batch; the documents of every second one in reverse order.
    """
    first = 3 * ids.shape[1] // 5
    lengths = (first, ids.shape[1] - first)
    documents = [
        [document.numpy() for document in row.split(lengths if number % 2 == 0 else lengths[::-1])]
        for number, row in enumerate(ids[:rows])
    ]
    packed = collate([make_sample(of_row, ids.shape[1], 0) for of_row in documents])
    alone = [collate_padded([make_sample([one], len(one), 0)]) for of_row in documents for one in of_row]
    targets = {"num_items_in_batch": (packed["labels"] != IGNORE_INDEX).sum()}
    return [packed | targets], [batch | targets for batch in alone]


def train_step(model: Any, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The sum of the losses on `batches`, and its gradients, whole ones of sharded parameters too, by FQN.

    The loss of a model that averages over the labels of each call is computed from its logits instead.
    """
    from opslot.checkpoint.model_tensors import clean_fqn, stored_specs, with_removed_experts

    model.zero_grad(set_to_none=True)
    any_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    total = torch.zeros(())
    for batch in batches:
        loss = _loss(model, batch)
        # Images become tokens in some models (Emu3), and nothing trains without the language model.
        if loss.requires_grad or not any_frozen:
            loss.backward()
        total += loss.detach().cpu()
    result = {"loss": total}
    specs = stored_specs(model)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        name = clean_fqn(name)
        result[f"grad {name}"] = with_removed_experts(whole.detach(), specs[name]).cpu()
    return result


def _loss(model: Any, batch: dict[str, Any]) -> Tensor:
    if "num_items_in_batch" not in batch or not averages_its_own_labels(trained_part(model)):
        return model(**batch, use_cache=False).loss
    names = ("labels", "shift_labels", "num_items_in_batch")
    shifted: Tensor | None = batch.get("shift_labels")
    inputs = {name: x for name, x in batch.items() if name not in names}
    if trained_part(model).config.is_encoder_decoder:
        # A decoder's labels are aligned with its inputs, whose ids do not matter here.
        inputs["decoder_input_ids"] = shifted = batch["labels"]
    logits = model(**inputs, use_cache=False).logits
    if shifted is None:
        logits, shifted = logits[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), reduction="sum") / batch[names[-1]]


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
