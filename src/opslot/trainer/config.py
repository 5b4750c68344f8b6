"""The configuration of a run: the sections of the YAML as dataclasses. Imports nothing heavy, so help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from opslot.data.config import DataConfig


@dataclass
class ModelConfig:
    """Which model, from which weights, with which kernels.

    Args:
        config_path: folder with config.json, that file, or a model of the Hugging Face hub (ORG/NAME or
            ORG/NAME@REVISION); default `model_path`.
        model_path: the checkpoint to start from, a folder or a model of the hub; default random weights.
        tokenizer_path: folder of the tokenizer (for task vlm, of the processor), its tokenizer.json, or a model of the
            hub; default `model_path`, then `config_path`.
        torch_dtype: dtype of the trained parameters and of the optimizer state; see also `train.fsdp.param_dtype`.
        device: where to train; auto selects a GPU if there is one.
        export_excluded: keep in the export the weights of `model_path` that are not built for training, such as the
            speech parts of an omni model.
        trust_remote_code: allow Python code that ships with the checkpoint to run.
        ops_implementation: kernels. "auto", "eager", a preset's name, or a mapping of fields such as
            rms_norm_implementation, preset and overrides.
    """

    config_path: str | None = None
    model_path: str | None = None
    tokenizer_path: str | None = None
    torch_dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    export_excluded: bool = False
    trust_remote_code: bool = False
    ops_implementation: str | dict[str, Any] | None = None


@dataclass
class OptimizerConfig:
    """The optimizer and its settings other than the learning rate.

    Args:
        name: adamw is torch's fused AdamW or a faster kernel of the same function; adamw_torch is torch's; adamw_8bit
            keeps the moments in 8 bits (torchao, or bitsandbytes); muon orthogonalizes the momentum of the matrices of
            hidden layers, and uses AdamW for embeddings, the output head, norms and biases.
        groups: settings of some parameters, as a list of {params, lr, weight_decay}: params is a glob, or a list of
            globs, of fully qualified parameter names; for a parameter that several match, the last one counts.
        momentum: of muon.
        nesterov: of muon: add the gradient to the momentum again.
        ns_steps: of muon: Newton-Schulz steps.
        muon_lr_scale: match_rms_adamw scales an update to the size of AdamW's, so that `train.lr` and
            `train.weight_decay` of AdamW fit; original scales by sqrt(max(1, rows / columns)).
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the square root of the second moment.
        min_lr_ratio: final learning rate of all schedulers but constant, as a fraction of `train.lr`.
        decay_ratio: fraction of all steps, the last ones, in which warmup_stable_decay lowers the learning rate; at
            most those after the warmup.
    """

    name: Literal["adamw", "adamw_torch", "adamw_8bit", "muon"] = "adamw"
    groups: list[dict[str, Any]] | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    muon_lr_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    min_lr_ratio: float = 0.0
    decay_ratio: float = 0.2


@dataclass
class FSDPConfig:
    """Sharding of the parameters with FSDP2, its mixed precision, and the overlap of communication.

    Args:
        dp_replicate: number of groups of ranks that each hold all parameters (HSDP); 1 shards over all processes.
        param_dtype: dtype of the gathered parameters, so of the forward and backward pass; default bfloat16 on a GPU
            that supports it, else `model.torch_dtype`. float16 trains with a dynamic loss scale.
        reduce_dtype: dtype of the gradient reduction.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        reshard_after_forward: free a layer's gathered parameters after the forward pass and gather them again for the
            backward pass; default true, except for models whose gathered parameters take at most 10 % of a GPU's
            memory.
        prefetch: number of layers whose parameters are gathered ahead of the current one.
        copy_engine: all-gather and reduce-scatter with copies between the GPUs of one host instead of NCCL kernels;
            default wherever it is supported.
        ulysses_overlap: with `train.sp_size`, overlap the all-to-alls of query, key and value with their projections.
    """

    dp_replicate: int = 1
    param_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    cpu_offload: bool = False
    reshard_after_forward: bool | None = None
    prefetch: int = 1
    copy_engine: bool | None = None
    ulysses_overlap: bool = False


@dataclass
class CheckpointConfig:
    """Checkpoints, exports of the weights, and where to resume.

    Args:
        save_steps: number of steps between two checkpoints; the last step is always saved. null: no others.
        async_save: write checkpoints in the background from a copy in host memory; a save waits for the previous one.
            Off: training waits for the write, and no copy is made.
        save_total_limit: number of checkpoints to keep; older ones are deleted. null keeps all.
        export_steps: number of steps between two exports in Hugging Face's format, to <output_dir>/hf_step_<step>; the
            last step is always exported, to <output_dir>/hf. null: no others.
        resume_from: "latest" continues from the newest checkpoint in `output_dir`, or starts at step 1 if there is
            none; or the folder of a checkpoint. Models and data of the hub are read at the commits of the checkpoint,
            unless another revision is named.
    """

    save_steps: int | None = 500
    async_save: bool = True
    save_total_limit: int | None = 3
    export_steps: int | None = None
    resume_from: str | None = None


@dataclass
class LoggingConfig:
    """What is logged, and how often.

    Args:
        log_steps: number of steps between two lines of metrics.jsonl.
        tensorboard: write event files to <output_dir>/tensorboard.
        wandb: log to Weights & Biases; requires the wandb package.
        wandb_project: name of the project on Weights & Biases.
        wandb_entity: user or team on Weights & Biases; default your own.
        trackio: log to Trackio; requires the trackio package.
        run_name: name of the run on Weights & Biases and Trackio; default the name of `output_dir`.
        peak_tflops: peak TFLOP/s of one GPU, which `mfu` refers to; default the data sheet's dense bf16 peak for known
            GPUs that compute in bf16 or fp16.
        progress: auto shows a progress bar on a terminal and plain lines elsewhere.
        profile: first and last step to profile, e.g. [10, 12]: a Chrome trace and, on a GPU, a memory snapshot of each
            rank are written to <output_dir>/profile.
    """

    log_steps: int = 1
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "opslot"
    wandb_entity: str | None = None
    trackio: bool = False
    run_name: str | None = None
    peak_tflops: float | None = None
    profile: list[int] | None = None
    progress: Literal["auto", "bar", "lines", "off"] = "auto"


@dataclass
class TrainConfig:
    """Steps, batch sizes, learning rate and parallelism.

    Args:
        output_dir: folder for everything the run writes; one run at a time may write to it.
        max_steps: optimizer steps; default as many as `num_epochs` needs.
        num_epochs: passes over the data if `max_steps` is not set. Above 16 MiB of text the steps are not counted
            before training, and the learning rate follows the fraction of the text that is consumed.
        global_batch_size: samples per optimizer step, over all processes and micro batches; with
            `data.max_tokens_per_batch`, a step has at most this many times `data.max_seq_len` tokens.
        micro_batch_size: samples per forward pass of one process (or of `sp_size` processes); default the process's
            share of the global batch. The auxiliary loss of MoE routers is the mean over micro batches, so it depends
            on this size.
        lr: peak learning rate; default 1e-5 for the weights of a checkpoint, 2e-4 for adapters and 3e-4 for random
            weights.
        lr_scheduler: learning rate schedule after the warmup; warmup_stable_decay keeps it constant until the last
            steps of the run (`optimizer.decay_ratio`), in which it falls linearly.
        warmup_steps: steps in which the learning rate rises linearly from 0 to `lr`; below 1, a fraction of all steps.
        weight_decay: weight decay of matrices; norms, biases and embeddings have none.
        max_grad_norm: maximum gradient norm for clipping; null or 0 disables clipping.
        seed: random seed of the weights, the data order and dropout.
        activation_checkpointing: full recomputes each layer in the backward pass instead of storing its activations;
            selective stores the outputs of matmuls and attention and recomputes the rest.
        activation_offload: with activation checkpointing, keep the inputs of layers in host memory.
        compile: run each layer through torch.compile: steps of small models, which wait for the host, get faster, the
            first ones take minutes.
        cuda_graphs: compile each layer and replay it as CUDA graphs, which is faster still where steps wait for the
            host; for text models on GPUs, without fsdp2, sp_size, ep_size and activation checkpointing.
        eval_steps: number of steps between two evaluations; the last step is always evaluated. null: no evaluation.
        freeze: what is not trained, as globs of fully qualified parameter names such as model.layers.0.*, or parts:
            language_model (with its output layer, but without a classifier's head), and of multimodal models vision,
            audio and merger; with `lora`, their adapters.
        lr_of: peak learning rate of parts, named as in `freeze`, where it differs from `lr`; for a parameter that
            several match, the last one counts.
        data_parallel_mode: fsdp2 shards parameters, gradients and optimizer state over the processes; ddp keeps all of
            them on each process, which is faster for small models. auto is ddp where the parameters take at most 5 % of
            a GPU's memory and no setting in `fsdp` or `ep_size` needs fsdp2.
        sp_size: processes that share one sequence (Ulysses sequence parallelism).
        ep_size: processes that share the experts (expert parallelism).
        checkpoint: checkpoints, exports of the weights, and where to resume.
        fsdp: sharding of the parameters, and the precision of the computation.
        optimizer: the optimizer and its settings.
        logging: what is logged.
    """

    output_dir: str = "outputs"
    max_steps: int | None = None
    num_epochs: float = 1.0
    global_batch_size: int = 8
    micro_batch_size: int | None = None
    lr: float | None = None
    lr_scheduler: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    warmup_steps: int | float = 0.03
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    seed: int = 0
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    activation_offload: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    eval_steps: int | None = None
    freeze: list[str] | None = None
    lr_of: dict[str, float] | None = None
    data_parallel_mode: Literal["auto", "ddp", "fsdp2"] = "auto"
    sp_size: int = 1
    ep_size: int = 1
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def peak_lr(self) -> float:
        """`lr`, which a run sets where it was left out."""
        assert self.lr is not None, "see `with_defaults`"
        return self.lr


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) through PEFT; without `r` all parameters are trained.

    Args:
        r: rank of the adapters.
        alpha: the adapters' output is scaled by alpha / r; default 2 * r.
        dropout: dropout probability of the adapters' input.
        target_modules: names of the modules that get an adapter, e.g. [q_proj, v_proj], a regular expression for their
            full names, or all-linear: every linear layer but the output head.
        modules_to_save: names of modules that are trained and saved whole; a classifier's head always is.
        experts: also add adapters to the stacked weights of experts, computed as GEMMs beside those of the weights.
        quantization: nf4 quantizes the frozen linear layers and the stacked weights of experts to 4 bits as they are
            read (QLoRA, bitsandbytes); embeddings, norms, routers and the output head are in `train.fsdp.param_dtype`.
            Each process holds all quantized weights, but with `train.ep_size` only its own experts.
        use_rslora: scale by alpha / sqrt(r) instead.
        use_dora: also train the norm of the weights of each output (DoRA); not for experts or with `quantization`.
        rank_pattern: ranks of parts of the model, name or regular expression to rank, e.g. {o_proj: 32}.
        alpha_pattern: the same for alpha, which is otherwise `alpha`, whatever the rank.
        init: kaiming is PEFT's default, gaussian has standard deviation 1 / r; with both the adapters start as zero.
            pissa and olora start from the largest parts of the weights, in one process; what is saved is an adapter of
            twice the rank for the unchanged base model.
        merge: also export the base model with the adapters added, to <output_dir>/hf/merged.
    """

    r: int | None = None
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    modules_to_save: list[str] | None = None
    experts: bool = False
    quantization: Literal["nf4"] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = "kaiming"
    merge: bool = False


@dataclass
class EvaluationConfig:
    """What an evaluation (every `train.eval_steps` steps) does besides the loss.

    Args:
        prompts: prompts to generate from; the answers are printed and written to samples.jsonl. For tasks sft and vlm
            each is a user's turn; for task vlm also a mapping such as {text: What is it?, images: [shapes.png]}, with
            paths of images, videos and audios that come before the text.
        max_new_tokens: tokens to generate for each prompt.
        best_metric: metric that decides which evaluation is the best; loss is minimized, accuracy and f1 are maximized.
        save_best: export the model of the best evaluation to <output_dir>/hf_best; default if
            `early_stopping_patience` is set.
        early_stopping_patience: end the run after this many evaluations in a row without an improvement.
    """

    prompts: list[str | dict[str, Any]] | None = None
    max_new_tokens: int = 64
    best_metric: Literal["loss", "accuracy", "f1"] = "loss"
    save_best: bool | None = None
    early_stopping_patience: int | None = None


@dataclass
class RunConfig:
    """The whole configuration of a run; `opslot.trainer.load_config` reads it from YAML and command line.

    Args:
        model: the model and its kernels.
        data: the training data.
        train: the training.
        evaluation: the evaluation.
        lora: adapters to train instead of the model's own parameters.
        task: pretrain predicts every token of texts; sft the assistant's turns of conversations; vlm the same of
            conversations with images, video and audio; classification labels texts, or their words.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    task: Literal["pretrain", "sft", "vlm", "classification"] = "pretrain"
