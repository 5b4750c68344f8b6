"""A run's configuration: the sections of the YAML as dataclasses. Imports nothing heavy, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from opslot.data.config import DataConfig


@dataclass
class ModelConfig:
    """Which model, from which weights, with which kernels.

    Args:
        config_path: folder with config.json, or that file; default `model_path`.
        model_path: Hugging Face checkpoint to start from; default random weights.
        tokenizer_path: folder with the tokenizer, or its tokenizer.json; default `model_path`, then `config_path`.
        torch_dtype: dtype of the parameters.
        device: where to train; auto takes a GPU where there is one.
        trust_remote_code: allow Python code that ships with the checkpoint to run.
        ops_implementation: kernels. "auto", "eager", a preset's name, or a mapping of fields such as
            rms_norm_implementation, preset and overrides.
    """

    config_path: str | None = None
    model_path: str | None = None
    tokenizer_path: str | None = None
    torch_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False
    ops_implementation: str | dict[str, Any] | None = None


@dataclass
class OptimizerConfig:
    """AdamW beyond the learning rate.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        min_lr_ratio: what linear and cosine schedules end at, as a share of `train.lr`.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    min_lr_ratio: float = 0.0


@dataclass
class FSDPConfig:
    """How parameters are sharded over processes, and in what they compute.

    Args:
        replicas: groups of processes that hold the same shards; 1 shards over all processes.
        compute_dtype: dtype of the forward and backward pass; default that of the parameters, which the optimizer sees.
        reduce_dtype: dtype in which gradients are added up over processes.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        reshard_after_forward: gather a layer's parameters again for the backward pass instead of keeping them.
        prefetch: layers whose parameters are gathered ahead of the one that runs.
        copy_engine: gather parameters and reduce gradients by copies between the GPUs of one host, instead of NCCL's
            kernels; default where that can be.
    """

    replicas: int = 1
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    prefetch: int = 1
    copy_engine: bool | None = None


@dataclass
class LoggingConfig:
    """What is reported, and how often.

    Args:
        log_steps: write a line of metrics.jsonl every so many steps.
        tensorboard: write event files to <output_dir>/tensorboard.
        wandb: log to Weights & Biases; the package must be installed.
        wandb_project: project there.
        progress: auto shows a live bar on a terminal and plain lines elsewhere.
    """

    log_steps: int = 1
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "opslot"
    progress: Literal["auto", "bar", "lines", "off"] = "auto"


@dataclass
class TrainConfig:
    """How long, how fast, how wide, and what is kept.

    Args:
        output_dir: folder that receives everything the run writes.
        max_steps: optimizer steps; default as many as `num_epochs` need.
        num_epochs: passes over the data when `max_steps` is not given. Above 16 MiB of text the steps are not counted
            before the first one, and the learning rate follows the share of the text that is done.
        global_batch_size: rows in an optimizer step, over all processes and micro batches; with
            `data.max_tokens_per_batch`, that many times `data.max_seq_len` tokens at most.
        micro_batch_size: rows that one process, or `sp_size` together, run at a time; default its share of the global
            batch. Routers' balancing loss is the mean of that of each micro batch, so runs that should have the same
            need the same size, whatever their number of processes.
        lr: highest learning rate.
        lr_scheduler: its course after the warm-up.
        warmup_steps: steps over which it rises linearly from 0.
        weight_decay: AdamW's, on matrices; norms, biases and embeddings have none.
        max_grad_norm: gradients are scaled down to this norm; 0 leaves them.
        seed: of the weights, the data's order and dropout.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        save_steps: checkpoint every so many steps; the last step is always kept.
        async_save: write checkpoints while training goes on, from a copy of the state in host memory; the next save
            waits for the one before. Off: training stands still meanwhile, and there is no copy.
        save_total_limit: checkpoints to keep; older ones are removed. null keeps all.
        eval_steps: evaluate every so many steps, and at the end.
        resume_from: "latest" goes on from the newest checkpoint in output_dir, or starts anew where there is none; or a
            checkpoint's folder.
        sp_size: processes that share one sequence (Ulysses).
        ep_size: processes that share the experts.
        ulysses_overlap: with `sp_size`, send query, key and value each while the next one is projected.
        fsdp: sharding of the parameters.
        optimizer: AdamW's other settings.
        logging: what is reported.
    """

    output_dir: str = "outputs"
    max_steps: int | None = None
    num_epochs: float = 1.0
    global_batch_size: int = 8
    micro_batch_size: int | None = None
    lr: float = 3e-4
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0
    gradient_checkpointing: bool = False
    save_steps: int | None = None
    async_save: bool = True
    save_total_limit: int | None = 3
    eval_steps: int | None = None
    resume_from: str | None = None
    sp_size: int = 1
    ep_size: int = 1
    ulysses_overlap: bool = False
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


@dataclass
class RunConfig:
    """All of a run's configuration; `opslot.trainer.load_config` reads it from YAML and command line.

    Args:
        model: the model and its kernels.
        data: the text.
        train: the training.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
