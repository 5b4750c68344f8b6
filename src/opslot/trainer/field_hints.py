"""The opslot field for a name from Transformers' TrainingArguments, TRL's SFTConfig or VeOmni's arguments."""

from __future__ import annotations

_COMPUTE = "train.fsdp.compute_dtype"
_BATCH = "train.global_batch_size counts the samples of a step over all processes and micro batches"
_MICRO = f"train.micro_batch_size ({_BATCH})"

# Name without its section, in lower case, to the field and what differs.
_FIELDS = {
    # Transformers
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.lr_scheduler",
    "warmup_ratio": "train.warmup_steps, in steps",
    "lr_warmup_ratio": "train.warmup_steps, in steps",
    "lr_warmup_steps": "train.warmup_steps",
    "num_train_epochs": "train.num_epochs",
    "per_device_train_batch_size": _MICRO,
    "per_device_eval_batch_size": _MICRO,
    "train_batch_size": "train.global_batch_size, over all processes",
    "gradient_accumulation_steps": f"train.global_batch_size and train.micro_batch_size: {_BATCH}",
    "gradient_checkpointing": "train.activation_checkpointing",
    "enable_gradient_checkpointing": "train.activation_checkpointing",
    "bf16": f"{_COMPUTE}: bfloat16",
    "fp16": f"{_COMPUTE}: float16",
    "tf32": "torch.set_float32_matmul_precision in your own script",
    "adam_beta1": "train.optimizer.beta1",
    "adam_beta2": "train.optimizer.beta2",
    "adam_epsilon": "train.optimizer.eps",
    "betas": "train.optimizer.beta1 and train.optimizer.beta2",
    "optim": "train.optimizer; opslot train uses AdamW",
    "logging_steps": "train.logging.log_steps",
    "logging_dir": "train.logging.tensorboard (event files are in <output_dir>/tensorboard)",
    "report_to": "train.logging.wandb and train.logging.tensorboard",
    "disable_tqdm": "train.logging.progress: off",
    "run_name": "train.logging.wandb_project",
    "save_strategy": "train.save_steps",
    "eval_strategy": "train.eval_steps",
    "evaluation_strategy": "train.eval_steps",
    "resume_from_checkpoint": "train.resume_from",
    "overwrite_output_dir": "another train.output_dir, or train.resume_from: latest",
    "dataloader_num_workers": "data.num_workers",
    "data_seed": "train.seed",
    "torch_compile": "opslot.build_foundation_model and model.compile() in your own script",
    "use_cpu": "model.device: cpu",
    "no_cuda": "model.device: cpu",
    "use_liger_kernel": "model.ops_implementation",
    "deepspeed": "train.fsdp",
    "fsdp_config": "train.fsdp",
    # TRL
    "max_length": "data.max_seq_len",
    "max_seq_length": "data.max_seq_len",
    "dataset_text_field": "data.text_field",
    "dataset_num_proc": "data.num_workers",
    "eos_token": "data.append_eos, and eos_token in the tokenizer's tokenizer_config.json",
    "padding_free": "data.max_tokens_per_batch",
    "model_init_kwargs": "model.torch_dtype and model.ops_implementation",
    "model_name_or_path": "model.model_path",
    "tokenizer_name": "model.tokenizer_path",
    "attn_implementation": "model.ops_implementation.attn_implementation",
    "dtype": "model.torch_dtype",
    # VeOmni
    "eval_path": "data.eval_path",
    "text_keys": "data.text_field",
    "data_type": "data.format",
    "rmpad": "data.packing",
    "rmpad_with_pos_ids": "data.packing",
    "dyn_bsz": "data.max_tokens_per_batch",
    "max_seq_length_per_batch": "data.max_tokens_per_batch",
    "bsz_warmup_ratio": "train.warmup_steps",
    "lr_decay_style": "train.lr_scheduler",
    "lr_min": "train.optimizer.min_lr_ratio, as a fraction of train.lr",
    "ulysses_parallel_size": "train.sp_size",
    "expert_parallel_size": "train.ep_size",
    "data_parallel_replicate_size": "train.fsdp.replicas",
    "data_parallel_mode": "train.fsdp",
    "enable_mixed_precision": f"{_COMPUTE}: bfloat16",
    "enable_reshard_after_forward": "train.fsdp.reshard_after_forward",
    "enable_fsdp_offload": "train.fsdp.cpu_offload",
    "load_checkpoint_path": "train.resume_from",
    "max_ckpt_to_save": "train.save_total_limit",
    "use_wandb": "train.logging.wandb",
    "drop_last": "",
    "remove_unused_columns": "",
}


def known_elsewhere(name: str) -> str | None:
    """What to use in opslot for a dotted `name` of another trainer; "" where it can be left out; None if unknown."""
    return _FIELDS.get(name.rsplit(".", 1)[-1].lower())
