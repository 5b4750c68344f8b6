"""From a built model to one that trains: adapters, sharding over all ranks, and its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from opslot._base.errors import ConfigError
from opslot._base.hub import hub_name
from opslot.checkpoint.adapters import base_model, has_adapters, initialize_adapters
from opslot.checkpoint.initialize import initialize_weights
from opslot.checkpoint.training_state import read_state
from opslot.distributed import ParallelState, keep_frozen_statistics
from opslot.models import load_foundation_weights
from opslot.models._adapters.nf4 import quantize_layers
from opslot.models._multimodal.conditional import transformers_model
from opslot.models._multimodal.host_inputs import keep_inputs_on_host
from opslot.models._multimodal.parts import freeze, select
from opslot.models._own_loss import averages_its_own_labels
from opslot.models.parallelize import parallelize
from opslot.trainer.config import RunConfig
from opslot.trainer.kernels import pin_kernels, require_same_kernels
from opslot.trainer.lora import add_adapters
from opslot.trainer.setup import dtype_of, require_trainable_dtype
from opslot.trainer.validate import RunInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_model(
    model: PreTrainedModel,
    config: RunConfig,
    state: ParallelState,
    inputs: RunInputs,
    report: Callable[[str], None],
) -> PreTrainedModel:
    """Add adapters, freeze parts, shard the model over all ranks, and load or initialize weights that it lacks.

    On a GPU, the model takes integer inputs from the host.

    Args:
        inputs: with the folder of the weights; of a run that is resumed, the kernels of its checkpoint are bound.
        report: prints a line for the user.

    Raises:
        ConfigError: the model cannot be trained or sharded as configured, or the ranks selected different kernels.
    """
    if state.device.type != "cpu":
        keep_inputs_on_host(model)
    if config.lora.quantization is not None:
        quantize_layers(model, config.lora.modules_to_save or ())
    if config.lora.r is not None:
        add_adapters(model, config.lora, *_base_of(config))
        trained = getattr(torch, config.model.torch_dtype)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype != trained:
                # PEFT made it in the dtype of the frozen weights.
                parameter.data = parameter.data.to(trained)
    # After the adapters: those in frozen parts are frozen too.
    freeze(model, config.train.freeze or [])
    keep_frozen_statistics(model)
    _require_trained(model, config.train.lr_of or ())
    require_trainable_dtype(model)
    if inputs.checkpoint is not None:
        _, recorded = read_state(inputs.checkpoint)
        for line in pin_kernels(model, recorded, dtype_of(config.train.fsdp.param_dtype), state.device):
            report(line)
    model = _parallelize(model, config, state, inputs.model_path)
    require_same_kernels(model)
    if state.world_size > 1 and not isinstance(model, FSDPModule):
        report("data parallelism: ddp, so each process holds all parameters")
    return model


def _require_trained(model: PreTrainedModel, patterns: Iterable[str]) -> None:
    """Check that each pattern of `train.lr_of` matches a parameter, and one that is trained."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        names = select(model, pattern, "train.lr_of")
        if not any(parameters[name].requires_grad for name in names):
            raise ConfigError(
                f"train.lr_of: {pattern!r} matches no trained parameter",
                found=f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}, which are frozen",
                hint="remove it, or train them: see train.freeze, and with adapters lora.target_modules",
            )


def _base_of(config: RunConfig) -> tuple[str | None, str | None]:
    """What adapters call the model that they are added to, and its revision on the hub."""
    base = config.model.model_path
    if base is None:
        return None, None
    name = hub_name(base)
    return (str(Path(base).resolve()), None) if name is None else (name.repo, name.revision)


def _parallelize(
    model: PreTrainedModel, config: RunConfig, state: ParallelState, weights: Path | None
) -> PreTrainedModel:
    train, fsdp = config.train, config.train.fsdp
    if state.sp > 1 and averages_its_own_labels(transformers_model(model)):
        raise ConfigError(
            f"{type(model).__name__} cannot be trained on shards of sequences (train.sp_size={state.sp})",
            found="Transformers' code computes the loss from the labels of each call, without shift_labels",
            hint="set train.sp_size: 1",
        )
    options: dict[str, Any] = {
        "activation_checkpointing": train.activation_checkpointing,
        "activation_offload": train.activation_offload,
        "compile": train.compile,
        "cuda_graphs": train.cuda_graphs,
        "ulysses_overlap": fsdp.ulysses_overlap,
    }
    if config.lora.r is not None or any(parameter.is_meta for parameter in model.parameters()):
        options["load"] = partial(
            _load,
            folder=weights,
            seed=train.seed,
            device=torch.device("cpu") if fsdp.cpu_offload else state.device,
        )
    if state.mesh is not None:
        options |= {
            "data_parallel_mode": train.data_parallel_mode,
            "param_dtype": dtype_of(fsdp.param_dtype),
            "reduce_dtype": dtype_of(fsdp.reduce_dtype),
            "cpu_offload": fsdp.cpu_offload,
            "reshard_after_forward": fsdp.reshard_after_forward,
            "prefetch": fsdp.prefetch,
            "copy_engine": fsdp.copy_engine,
        }
    try:
        return parallelize(model, state, **options)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n  (in a training configuration: sp is train.sp_size, ep is train.ep_size)"
        ) from error


def _load(model: PreTrainedModel, *, folder: Path | None, seed: int, device: torch.device) -> None:
    """Load or initialize a model on meta, then initialize its adapters; each rank only its shards."""
    with base_model(model):
        if folder and any(parameter.is_meta for parameter in model.parameters()):
            load_foundation_weights(model, folder, device)
        elif not folder:
            initialize_weights(model, seed, device=device)
    if has_adapters(model):
        initialize_adapters(model, seed, device)
