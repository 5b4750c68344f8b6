"""The opslot field for a name of another trainer's configuration."""

from __future__ import annotations

_BATCH = "train.global_batch_size counts the samples of a step over all processes and micro batches"

# What to use, and what differs, with the names that it has in Transformers, TRL, PEFT, VeOmni, LLaMA-Factory, axolotl,
# torchtune and NeMo Automodel: without their sections, in lower case.
_NAMES = {
    # model
    "model.device: cpu": "use_cpu no_cuda",
    "model.model_path": "model_name_or_path path base_model pretrained_model_name_or_path",
    "model.model_path to start from, and train.output_dir": "checkpoint_dir",
    "model.ops_implementation": "use_liger_kernel enable_liger_kernel use_unsloth plugins",
    "model.ops_implementation.attn_implementation": (
        "flash_attn flash_attention sdp_attention flex_attention xformers_attention"
    ),
    "model.ops_implementation.moe_implementation": "experts_implementation",
    "model.tokenizer_path": "tokenizer_name tokenizer_config",
    "model.torch_dtype": "dtype",
    "model.torch_dtype: bfloat16": "pure_bf16",
    "model.torch_dtype and model.ops_implementation": "model_init_kwargs",
    # data
    "data.append_eos, and eos_token in the tokenizer's tokenizer_config.json": "eos_token",
    "data.cache_dir": "dataset_prepared_path",
    "data.chat_template": "chat_template_path",
    "data.chat_template, a file": "chat_template_jinja",
    "data.chat_template, a file; default the tokenizer's own": "template",
    "data.eval_fraction": "val_size val_set_size",
    "data.eval_path": "eval_dataset test_datasets",
    "data.eval_path: the split's folder in a saved data set": "dataset_test_split",
    "data.format": "data_type",
    "data.label_field": "label_column_name",
    "data.label_names": "id2label",
    "data.long_samples: truncate, or skip for drop": "excess_length_strategy",
    "data.long_samples: truncate, which cuts the end": "truncation_mode",
    "data.max_fps": "video_fps",
    "data.max_frames": "video_maxlen",
    "data.max_pixels": "image_max_pixels",
    "data.max_pixels, per frame": "video_max_pixels",
    "data.max_seq_len": "max_length max_seq_length sequence_len seq_length",
    "data.max_seq_len, with data.packing": "packed_sequence_size",
    "data.max_seq_len, with data.long_samples: truncate or skip": "cutoff_len",
    "data.max_tokens_per_batch": "padding_free dyn_bsz max_seq_length_per_batch",
    "data.max_tokens_per_batch, which packs without padding": "group_by_length",
    "data.media_dir": "image_folder",
    "data.num_workers": "dataloader_num_workers dataset_num_proc preprocessing_num_workers",
    "data.packing": "rmpad rmpad_with_pos_ids sample_packing packed",
    "data.packing; whole conversations are packed": "packing_strategy",
    "data.packing, whose documents do not attend to each other": "neat_packing",
    "data.shuffle": "shuffle_dataset",
    "data.text_field": "dataset_text_field text_column_name text_keys",
    "data.train, a list of {path, weight}": "datasets interleave_probs probabilities multisource_datasets",
    "data.train_on": "roles_to_train",
    "data.train_on: all": "train_on_prompt train_on_inputs train_on_input",
    "data.train_on: last": "last_turn_only mask_history",
    "data.train_on: assistant": "assistant_only_loss answer_only_loss_mask",
    "data.train_on and data.chat_template": "dataset_kwargs",
    "data.train_on: assistant, which trains completions only": "completion_only_loss",
    "data.train_path: files, or hf://datasets/ORG/NAME/FILES": "dataset_name dataset_path dataset path_or_dataset",
    "data.train_path, with the folder": "dataset_dir",
    "data.train_path: the split's folder in a saved data set": "dataset_train_split",
    # train
    "train.activation_checkpointing: full or selective": (
        "gradient_checkpointing gradient_checkpointing_kwargs enable_gradient_checkpointing "
        "disable_gradient_checkpointing enable_activation_checkpointing ac_mode"
    ),
    "train.activation_checkpointing: full, with train.activation_offload for Unsloth's": "use_gradient_checkpointing",
    "train.activation_offload": (
        "activation_offloading enable_activation_offload activation_gpu_limit enable_activation_offloading"
    ),
    "train.checkpoint.async_save": "enable_async_checkpointing",
    "train.checkpoint.export_steps": "save_hf_weights hf_save_steps",
    "train.checkpoint.resume_from": "resume_from_checkpoint load_checkpoint_path",
    "train.checkpoint.resume_from: latest": "auto_resume_from_checkpoints",
    "train.checkpoint.save_steps": "save_strategy save_every_n_steps ckpt_every_steps",
    "train.checkpoint.save_steps, in steps": "saves_per_epoch",
    "train.checkpoint.save_total_limit": "max_ckpt_to_save",
    "train.compile": "torch_compile torch_compile_backend torch_compile_mode",
    "train.data_parallel_mode and train.fsdp": "deepspeed fsdp fsdp_config",
    "train.data_parallel_mode and train.fsdp, or train.ep_size": "tp_size tensor_parallel_dim tensor_parallel_size",
    "train.ep_size": "expert_parallel_size",
    "train.eval_steps": "eval_strategy evaluation_strategy run_val_every_n_steps val_every_steps",
    "train.eval_steps, in steps": "evals_per_epoch",
    "train.freeze: [audio]": "freeze_audio_tower",
    "train.freeze: [vision]": "freeze_vision_tower freeze_vit",
    "train.freeze: [merger]": "freeze_multi_modal_projector",
    "train.freeze: [language_model]": "freeze_language_model",
    "train.fsdp.cpu_offload": "enable_fsdp_offload",
    "train.fsdp.dp_replicate": "data_parallel_replicate_size replicas data_parallel_replicate_dim dp_replicate_size",
    "train.fsdp.dp_replicate, the number of groups that shard": "dp_shard_size",
    "train.fsdp.param_dtype": "bnb_4bit_compute_dtype compute_dtype",
    "train.fsdp.param_dtype: float16": "fp16",
    "train.fsdp.param_dtype: bfloat16": "bf16 enable_mixed_precision",
    "train.fsdp.reshard_after_forward": "enable_reshard_after_forward",
    "train.global_batch_size, over all processes": "train_batch_size",
    f"train.global_batch_size and train.micro_batch_size: {_BATCH}": "gradient_accumulation_steps",
    "train.logging.log_steps": "logging_steps logging_strategy logging_first_step log_every_n_steps",
    "train.logging.profile": "enable_profiling",
    "train.logging.profile, [first, last]": "profile_start_step profile_end_step",
    "train.logging.progress: off": "disable_tqdm",
    "train.logging.run_name": "wandb_name",
    "train.logging.tensorboard": "use_tensorboard",
    "train.logging.tensorboard (event files are in <output_dir>/tensorboard)": "logging_dir",
    "train.logging.wandb": "use_wandb",
    "train.logging.wandb, train.logging.trackio and train.logging.tensorboard": "report_to",
    "train.logging.wandb_project": "project",
    "train.lr": "learning_rate",
    "train.lr_scheduler": "lr_scheduler_type lr_decay_style",
    "train.lr_of: {vision: LR}": "vit_lr",
    "train.max_grad_norm": "clip_grad_norm max_norm",
    "train.max_steps": "max_steps_per_epoch",
    f"train.micro_batch_size ({_BATCH})": (
        "per_device_train_batch_size per_device_eval_batch_size eval_batch_size batch_size local_batch_size"
    ),
    "train.num_epochs": "num_train_epochs epochs",
    "train.optimizer.beta1": "adam_beta1",
    "train.optimizer.beta1 and train.optimizer.beta2": "betas",
    "train.optimizer.beta2": "adam_beta2",
    "train.optimizer.decay_ratio": "lr_decay_ratio num_decay_steps",
    "train.optimizer.eps": "adam_epsilon",
    "train.optimizer.groups, a list of {params, lr, weight_decay}": "muon_lr param_groups",
    "train.optimizer.min_lr_ratio": "cosine_min_lr_ratio",
    "train.optimizer.min_lr_ratio, as a fraction of train.lr": "lr_scheduler_kwargs lr_min min_lr",
    "train.optimizer.name: adamw, adamw_torch, adamw_8bit or muon": "optim optimizer_type optimizer",
    "train.seed": "data_seed",
    "train.sp_size": (
        "ulysses_parallel_size context_parallel_size sequence_parallel_degree cp_size context_parallel_dim"
    ),
    "train.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "train.warmup_steps; a value below 1 is a fraction of all steps": "warmup_ratio lr_warmup_ratio bsz_warmup_ratio",
    # evaluation
    "evaluation.best_metric": "metric_for_best_model",
    "evaluation.best_metric: loss is minimized, accuracy and f1 are maximized": "greater_is_better",
    "evaluation.max_new_tokens": "generation_max_length",
    "evaluation.prompts": "predict_with_generate",
    "evaluation.save_best": "load_best_model_at_end",
    # lora
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.experts": "target_parameters",
    "lora.init": "init_lora_weights",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.quantization: nf4": "load_in_4bit bnb_4bit_quant_type quantization_bit quantization_method quantize_base",
    "lora.quantization: nf4, which quantizes the constants too": "use_bnb_nested_quant double_quantization",
    "lora.r": "use_peft lora_r lora_rank dim",
    "lora.r, and lora.quantization: nf4 for qlora": "adapter",
    "lora.r for adapters, train.freeze for parts of the model": "finetuning_type",
    "lora.target_modules": "lora_target_modules lora_attn_modules apply_lora_to_mlp apply_lora_to_output",
    "lora.target_modules: all-linear": "lora_target_linear match_all_linear",
    "lora.target_modules; all is all-linear": "lora_target",
    "lora.use_dora": "peft_use_dora",
    "lora.use_rslora": "peft_use_rslora",
    # other fields and commands
    "the fields of train.optimizer": "optim_args",
    "router_aux_loss_coef in the model's config.json": "router_aux_loss_coef",
    "pad_token in the tokenizer's tokenizer_config.json": "pad_token",
    "torch.set_float32_matmul_precision in your own script": "tf32",
    "another train.output_dir, or train.checkpoint.resume_from: latest": "overwrite_output_dir",
    "`hf upload REPO <output_dir>/hf` after the run": "push_to_hub hub_model_id",
    "task: sft; the columns are detected": "data_tag",
    "task: pretrain, sft or vlm; for preference optimization, opslot.apply in TRL's trainers": "stage",
    "`opslot merge ADAPTER DEST`, and DEST as model.model_path": "adapter_name_or_path lora_model_dir",
    "opslot.apply in TRL's trainers, for preference optimization": "rl",
    # nothing
    "": (
        "use_cache pad_to_sequence_len _component_ _target_ drop_last dataloader_drop_last "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "remove_unused_columns do_train do_eval do_predict prediction_loss_only average_tokens_across_devices "
        "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph "
        "include_num_input_tokens_seen local_rank"
    ),
}
_FIELDS = {name: hint for hint, names in _NAMES.items() for name in names.split()}


def known_elsewhere(name: str) -> str | None:
    """What to use in opslot for a dotted `name` of another trainer; "" where it can be left out; None if unknown."""
    last = name.rsplit(".", 1)[-1].lower()
    kernels = f"model.ops_implementation.{last}" if last.endswith("_implementation") else None
    return _FIELDS.get(last, kernels)
