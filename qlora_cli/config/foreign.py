"""Names that other tools use for what a recipe says: data for `config.names`, one entry a name.

Sources: peft `LoraConfig`, transformers `TrainingArguments` and `BitsAndBytesConfig`, TRL `SFTConfig`,
axolotl, LLaMA-Factory, torchtune and unsloth, as documented by them. A name is listed once, under the tool
where most people will have met it.
"""

from __future__ import annotations

# our dotted key -> {their name: the tool}
NAMES: dict[str, dict[str, str]] = {
    "model.name_or_path": {
        "base_model": "axolotl", "model_name_or_path": "LLaMA-Factory", "model_name": "unsloth",
        "base_model_name_or_path": "peft", "model_id": "transformers",
        "pretrained_model_name_or_path": "transformers",
        "base_model_config": "axolotl", "model_path": "other tools", "checkpoint_dir": "torchtune",
    },
    "model.revision": {"revision_of_model": "axolotl", "model_revision": "TRL",
    "base_model_revision": "axolotl"},
    "model.quantization.scheme": {
        "bnb_4bit_quant_type": "transformers", "quantization_bit": "LLaMA-Factory",
        "quant_type": "bitsandbytes",
        "bits": "artidoro/qlora", "quantization_method": "LLaMA-Factory", "quantize_base": "torchtune",
        "quantize": "litgpt",
    },
    "model.quantization.double_quant": {
        "bnb_4bit_use_double_quant": "transformers", "use_nested_quant": "TRL",
        "double_quantization": "LLaMA-Factory",
        "use_bnb_nested_quant": "TRL", "compress_statistics": "bitsandbytes",
    },
    "model.quantization.compute_dtype": {
        "bnb_4bit_compute_dtype": "transformers", "bf16": "transformers", "fp16": "transformers",
        "torch_dtype": "transformers", "dtype": "torchtune", "mixed_precision": "accelerate",
        "precision": "litgpt", "infer_dtype": "LLaMA-Factory", "float16": "axolotl", "bfloat16": "axolotl",
    },
    "model.quantization.skip_modules": {
        "llm_int8_skip_modules": "transformers", "modules_to_not_convert": "transformers",
    },
    "model.attention": {
        "attn_implementation": "transformers", "flash_attention": "axolotl", "flash_attn": "LLaMA-Factory",
        "sdp_attention": "axolotl", "eager_attention": "axolotl", "use_flash_attention_2": "transformers",
        "xformers_attention": "axolotl", "attn_type": "torchtune",
    },
    "model.trust_remote_code": {"allow_remote_code": "other tools"},
    "lora.rank": {"r": "peft", "lora_r": "axolotl", "lora_rank": "LLaMA-Factory"},
    "lora.alpha": {"lora_alpha": "peft"},
    "lora.dropout": {"lora_dropout": "peft"},
    "lora.target_modules": {
        "lora_target_modules": "axolotl", "lora_target": "LLaMA-Factory", "lora_target_linear": "axolotl",
        "lora_attn_modules": "torchtune", "apply_lora_to_mlp": "torchtune",
        "apply_lora_to_output": "torchtune",
    },
    "lora.variant": {
        "use_rslora": "peft", "peft_use_rslora": "axolotl", "use_dora": "peft", "peft_use_dora": "axolotl",
    },
    "lora.init": {
        "init_lora_weights": "peft", "peft_init_lora_weights": "axolotl", "pissa_init": "LLaMA-Factory",
    },
    "lora.continue_from": {
        "lora_model_dir": "axolotl", "adapter_name_or_path": "LLaMA-Factory",
        "adapter_checkpoint": "torchtune",
        "peft_model": "axolotl", "resume_adapter": "other tools",
    },
    "data.train": {
        "datasets": "axolotl", "dataset": "torchtune", "dataset_name": "TRL", "train_file": "transformers",
        "train_dataset": "TRL", "train_data": "other tools", "dataset_path": "other tools",
        "data_path": "FastChat",
        "training_data": "other tools", "dataset_dir": "LLaMA-Factory", "train_files": "other tools",
    },
    "data.validation": {
        "val_size": "LLaMA-Factory", "val_set_size": "axolotl", "test_datasets": "axolotl",
        "eval_dataset": "LLaMA-Factory", "validation_file": "transformers", "val_file": "other tools",
        "dataset_val": "torchtune", "val_data": "other tools", "test_size": "datasets",
        "validation_split_percentage": "transformers", "eval_data": "other tools",
    },
    "data.format": {
        "type": "axolotl", "formatting": "LLaMA-Factory", "dataset_format": "artidoro/qlora",
        "conversation": "axolotl", "dataset_type": "other tools", "conversation_style": "torchtune",
    },
    "data.chat_template": {
        "template": "LLaMA-Factory", "chat_template_jinja": "axolotl", "chat_template_path": "TRL",
        "prompt_template": "torchtune",
    },
    "data.loss_on": {
        "train_on_inputs": "axolotl", "train_on_prompt": "LLaMA-Factory", "train_on_input": "torchtune",
        "assistant_only_loss": "TRL", "completion_only_loss": "TRL", "mask_history": "LLaMA-Factory",
        "train_on_responses_only": "unsloth", "roles_to_train": "axolotl", "mask_prompt": "litgpt",
    },
    "data.max_seq_len": {
        "sequence_len": "axolotl", "max_seq_length": "unsloth", "max_length": "TRL",
        "cutoff_len": "LLaMA-Factory",
        "model_max_length": "transformers", "seq_len": "torchtitan", "block_size": "transformers",
        "max_sequence_length": "other tools", "sequence_length": "other tools",
        "context_length": "other tools",
    },
    "data.overlong": {
        "excess_length_strategy": "axolotl", "truncation": "transformers", "truncation_strategy": "ms-swift",
    },
    "data.packing": {
        "sample_packing": "axolotl", "packed": "torchtune", "neat_packing": "LLaMA-Factory",
        "padding_free": "TRL", "multipack": "axolotl", "eval_packing": "TRL",
    },
    "optimizer.name": {"optim": "transformers", "optimizer_type": "other tools",
    "optimizer_name": "other tools"},
    "optimizer.learning_rate": {"lr": "torchtune", "base_learning_rate": "other tools",
    "max_lr": "other tools"},
    "optimizer.eps": {"adam_epsilon": "transformers", "adam_eps": "other tools", "epsilon": "other tools"},
    "optimizer.betas": {
        "adam_beta1": "transformers", "adam_beta2": "transformers", "beta1": "other tools",
        "beta2": "other tools",
    },
    "optimizer.weight_decay": {"decay": "other tools", "wd": "other tools"},
    "optimizer.state_bits": {"optim_bits": "bitsandbytes"},
    "optimizer.paging": {"is_paged": "bitsandbytes"},
    "optimizer.paging.backend": {"offload": "other tools", "optimizer_in_bwd": "torchtune"},
    "schedule.name": {
        "lr_scheduler_type": "transformers", "lr_scheduler": "axolotl", "scheduler": "other tools",
        "lr_schedule": "other tools",
    },
    "schedule.warmup_ratio": {
        "warmup_steps": "transformers", "num_warmup_steps": "torchtune", "lr_warmup_steps": "litgpt",
        "warmup": "other tools", "warmup_fraction": "other tools",
    },
    "schedule.min_lr_ratio": {
        "cosine_min_lr_ratio": "axolotl", "min_lr": "litgpt", "lr_scheduler_kwargs": "transformers",
        "min_lr_rate": "transformers",
    },
    "schedule.decay_ratio": {"num_decay_steps": "transformers"},
    "train.epochs": {"num_train_epochs": "transformers", "num_epochs": "axolotl",
    "max_epochs": "other tools"},
    "train.max_steps": {
        "max_steps_per_epoch": "torchtune", "total_steps": "other tools", "num_steps": "other tools",
        "max_train_steps": "accelerate", "steps": "other tools",
    },
    "train.micro_batch_size": {
        "per_device_train_batch_size": "transformers", "batch_size": "torchtune",
        "train_batch_size": "transformers",
        "per_gpu_train_batch_size": "transformers", "per_device_eval_batch_size": "transformers",
        "eval_batch_size": "axolotl", "micro_batch": "other tools",
    },
    "train.gradient_accumulation_steps": {
        "grad_accum": "other tools", "accumulate_grad_batches": "Lightning",
        "gradient_accumulation": "other tools",
        "grad_accumulation_steps": "other tools", "accumulation_steps": "other tools",
        "gradient_accumulation_iters": "litgpt",
    },
    "train.max_grad_norm": {
        "gradient_clipping": "DeepSpeed", "clip_grad_norm": "torchtune", "grad_clip": "nanoGPT",
        "gradient_clip_val": "Lightning", "max_norm": "litgpt",
    },
    "train.seed": {"random_seed": "other tools", "random_state": "unsloth", "data_seed": "transformers"},
    "train.activation_checkpointing": {
        "gradient_checkpointing": "transformers", "use_gradient_checkpointing": "unsloth",
        "enable_activation_checkpointing": "torchtune", "activation_offloading": "axolotl",
        "gradient_checkpointing_kwargs": "transformers", "enable_activation_offloading": "torchtune",
    },
    "train.eval_every_steps": {
        "eval_steps": "transformers", "eval_strategy": "transformers", "evaluation_strategy": "transformers",
        "evals_per_epoch": "axolotl", "eval_interval": "nanoGPT", "run_val_every_n_steps": "torchtune",
        "do_eval": "transformers",
    },
    "train.save_every_steps": {
        "save_steps": "transformers", "save_strategy": "transformers", "saves_per_epoch": "axolotl",
        "save_interval": "litgpt", "save_every_n_steps": "torchtune",
    },
    "train.keep_checkpoints": {"save_total_limit": "transformers", "keep_last_n_checkpoints": "torchtune"},
    "log.every_steps": {
        "logging_steps": "transformers", "log_every_n_steps": "torchtune", "log_interval": "nanoGPT",
    },
    "output_dir": {"out_dir": "litgpt", "output_path": "other tools", "save_dir": "other tools",
    "output": "other tools"},
}  # fmt: skip

# their name -> (the tool, what to do instead) where no key of ours stands for it
NOTES: dict[str, tuple[str, str]] = {
    "adapter": ("axolotl", "every run trains an adapter on a quantized base: set `lora` and "
                "`model.quantization.scheme`"),
    "finetuning_type": ("LLaMA-Factory", "every run trains an adapter: set `lora`"),
    "peft_type": ("peft", "every run trains an adapter: set `lora`"),
    "task_type": ("peft", "every run trains a causal language model; remove the line"),
    "stage": ("LLaMA-Factory", "every run is supervised fine-tuning; remove the line"),
    "do_train": ("transformers", "`qlora train` always trains; remove the line"),
    "load_in_4bit": ("transformers",
    "4 bits are the default; write `model: {quantization: {scheme: nf4}}`, or "
                     "`scheme: none` for false (key `model.quantization.scheme`)"),
    "load_in_8bit": ("transformers",
    "the base is 4-bit or not quantized: `model: {quantization: {scheme: nf4}}`"),
    "quantization_config": ("transformers", "its keys live under `model.quantization`"),
    "lora_config": ("peft", "its keys live under `lora`"),
    "peft_config": ("peft", "its keys live under `lora`"),
    "training_args": ("transformers", "its keys live under `train`, `optimizer` and `schedule`"),
    "training_arguments": ("transformers", "its keys live under `train`, `optimizer` and `schedule`"),
    "bias": ("peft", "biases are not trained; remove the line"),
    "lora_bias": ("peft", "biases are not trained; remove the line"),
    "modules_to_save": ("peft", "only adapters are trained; remove the line"),
    "lora_modules_to_save": ("axolotl", "only adapters are trained; remove the line"),
    "additional_target": ("LLaMA-Factory", "only adapters are trained; remove the line"),
    "lora_on_cpu": ("axolotl", "merging works on any device by itself; remove the line"),
    "fan_in_fan_out": ("peft", "this is read off the layers; remove the line"),
    "lora_fan_in_fan_out": ("axolotl", "this is read off the layers; remove the line"),
    "rank_pattern": ("peft", "every layer has the rank `lora.rank`"),
    "alpha_pattern": ("peft", "every layer has the alpha `lora.alpha`"),
    "model_type": ("axolotl", "the class is read from the model's config; remove the line"),
    "tokenizer_type": ("axolotl", "the tokenizer is the model's; remove the line"),
    "tokenizer": ("torchtune", "the tokenizer is the model's; remove the line"),
    "tokenizer_path": ("other tools", "the tokenizer is the model's; remove the line"),
    "tokenizer_name": ("transformers", "the tokenizer is the model's; remove the line"),
    "special_tokens": ("axolotl", "tokens are the tokenizer's; remove the line"),
    "is_llama_derived_model": ("axolotl", "the class is read from the model's config; remove the line"),
    "strict": ("axolotl", "a recipe is always strict; remove the line"),
    "pad_to_sequence_len": ("axolotl", "batches are padded to their longest row; remove the line"),
    "group_by_length": ("transformers", "batches are formed by length already; remove the line"),
    "length_column_name": ("transformers", "batches are formed by length already; remove the line"),
    "dataset_prepared_path": ("axolotl", "nothing is cached on disk; remove the line"),
    "overwrite_output_dir": ("transformers", "a run never overwrites another; choose a new `output_dir`"),
    "resume_from_checkpoint": ("transformers",
    "a run goes on by itself where its `output_dir` has a checkpoint"),
    "auto_resume_from_checkpoints": ("axolotl",
    "a run goes on by itself where its `output_dir` has a checkpoint"),
    "load_best_model_at_end": ("transformers", "the best checkpoint is always kept; remove the line"),
    "local_rank": ("axolotl", "one process trains; remove the line"),
    "deepspeed": ("transformers", "one process trains; optimizer state is paged by `optimizer.paging`"),
    "fsdp": ("transformers", "one process trains; optimizer state is paged by `optimizer.paging`"),
    "fsdp_config": ("transformers", "one process trains; optimizer state is paged by `optimizer.paging`"),
    "ddp": ("axolotl", "one process trains; remove the line"),
    "ddp_timeout": ("transformers", "one process trains; remove the line"),
    "device": ("torchtune", "the device is found by itself; remove the line"),
    "device_map": ("transformers", "the device is found by itself; remove the line"),
    "no_cuda": ("transformers", "set the environment variable CUDA_VISIBLE_DEVICES to nothing instead"),
    "use_cpu": ("transformers", "set the environment variable CUDA_VISIBLE_DEVICES to nothing instead"),
    "tf32": ("transformers", "matrix products follow `model.quantization.compute_dtype`; remove the line"),
    "torch_compile": ("transformers", "models are not compiled; remove the line"),
    "compile": ("torchtune", "models are not compiled; remove the line"),
    "report_to": ("transformers",
    "metrics go to `metrics.jsonl` in the run folder; trackers are not available yet"),
    "wandb_project": ("axolotl", "metrics go to `metrics.jsonl`; trackers are not available yet"),
    "wandb_entity": ("axolotl", "metrics go to `metrics.jsonl`; trackers are not available yet"),
    "wandb_name": ("axolotl", "metrics go to `metrics.jsonl`; trackers are not available yet"),
    "wandb_run_id": ("axolotl", "metrics go to `metrics.jsonl`; trackers are not available yet"),
    "wandb_watch": ("axolotl", "metrics go to `metrics.jsonl`; trackers are not available yet"),
    "wandb_log_model": ("axolotl", "nothing is uploaded; remove the line"),
    "mlflow_tracking_uri": ("axolotl", "metrics go to `metrics.jsonl`; trackers are not available yet"),
    "metric_logger": ("torchtune", "metrics go to `metrics.jsonl`; trackers are not available yet"),
    "run_name": ("transformers", "a run is named by its folder: set `output_dir`"),
    "plot_loss": ("LLaMA-Factory", "losses are in `metrics.jsonl`; remove the line"),
    "push_to_hub": ("transformers", "nothing is uploaded; remove the line"),
    "hub_model_id": ("transformers", "nothing is uploaded; remove the line"),
    "hub_strategy": ("transformers", "nothing is uploaded; remove the line"),
    "hf_use_auth_token": ("axolotl", "`hf auth login` stores a token once; remove the line"),
    "dataloader_num_workers": ("transformers", "rows are prepared before training; remove the line"),
    "preprocessing_num_workers": ("LLaMA-Factory", "rows are prepared before training; remove the line"),
    "dataset_num_proc": ("TRL", "rows are prepared before training; remove the line"),
    "max_samples": ("LLaMA-Factory", "all rows are used; write a smaller file, or set `train.max_steps`"),
    "early_stopping_patience": ("axolotl", "not available yet; remove the line"),
    "neftune_noise_alpha": ("TRL", "there is no embedding noise; remove the line"),
    "noisy_embedding_alpha": ("axolotl", "there is no embedding noise; remove the line"),
    "label_smoothing_factor": ("transformers", "the loss is plain cross-entropy; remove the line"),
    "loss": ("torchtune", "the loss is cross-entropy over supervised tokens; remove the line"),
    "checkpointer": ("torchtune", "the base is `model.name_or_path`, the run folder `output_dir`"),
    "profiler": ("torchtune", "there is no profiler; remove the line"),
    "dataset_text_field": ("TRL", "rows hold `messages`, or `instruction` and `output`; see `data.format`"),
    "_component_": ("torchtune", "a section names no class; remove the line"),
}  # fmt: skip

# our dotted key -> {their value, lower case: what to write}
VALUES: dict[str, dict[str, str]] = {
    "model.quantization.scheme": {
        "4": "nf4", "4bit": "nf4", "int4": "nf4", "bnb.nf4": "nf4", "bnb.nf4-dq": "nf4", "bnb": "nf4",
        "bitsandbytes": "nf4", "qlora": "nf4", "bnb.fp4": "fp4", "16": "none", "bf16": "none", "fp16": "none",
        "false": "none", "off": "none", "no": "none", "true": "nf4", "on": "nf4", "yes": "nf4",
    },
    "model.quantization.compute_dtype": {
        "bfloat16": "bf16", "torch.bfloat16": "bf16", "bf16-true": "bf16", "bf16-mixed": "bf16",
        "float32": "fp32", "torch.float32": "fp32", "float": "fp32", "32": "fp32", "16": "bf16",
    },
    "model.attention": {"torch": "sdpa", "disabled": "eager", "manual": "eager", "none": "eager"},
    "lora.target_modules": {"all": "all-linear", "all_linear": "all-linear", "linear": "all-linear"},
    "lora.init": {"true": "default", "kaiming": "default", "kaiming-uniform": "default",
    "normal": "gaussian"},
    "lora.variant": {"qlora": "lora", "rs-lora": "rslora", "rs_lora": "rslora"},
    "data.format": {
        "sharegpt": "chat", "chatml": "chat", "openai": "chat", "messages": "chat", "chat_template": "chat",
        "conversations": "chat", "alpaca": "instruction", "instruct": "instruction",
    },
    "data.loss_on": {
        "answers": "assistant", "completion": "assistant", "responses": "assistant", "last": "last_assistant",
        "last_turn": "last_assistant", "everything": "all", "inputs": "all",
    },
    "data.overlong": {"raise": "error", "skip": "drop", "cut": "truncate", "truncation": "truncate"},
    "optimizer.name": {
        "paged_adamw_8bit": "paged_adamw_8bit", "paged_adamw_32bit": "paged_adamw_32bit",
        "adamw_8bit": "paged_adamw_8bit", "adamw_bnb_8bit": "paged_adamw_8bit",
        "adamw8bit": "paged_adamw_8bit",
        "pagedadamw8bit": "paged_adamw_8bit", "pagedadamw": "paged_adamw_32bit",
        "pagedadamw32bit": "paged_adamw_32bit", "adamw": "paged_adamw_32bit",
        "adamw_torch": "paged_adamw_32bit",
        "adamw_torch_fused": "paged_adamw_32bit", "adamw_hf": "paged_adamw_32bit",
        "adam": "paged_adamw_32bit",
        "torch.optim.adamw": "paged_adamw_32bit", "bitsandbytes.optim.pagedadamw8bit": "paged_adamw_8bit",
        "bitsandbytes.optim.pagedadamw": "paged_adamw_32bit",
    },
    "optimizer.paging.backend": {"gpu": "resident", "cuda": "resident", "none": "resident",
    "off": "resident"},
    "optimizer.paging.prefetch": {"none": "off", "false": "off", "true": "step", "on": "step"},
    "schedule.name": {
        "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
        "none": "constant", "one_cycle": "cosine", "cosine_with_restarts": "cosine",
    },
    "train.activation_checkpointing": {
        "true": "full", "false": "none", "unsloth": "full", "on": "full", "off": "none", "yes": "full",
        "no": "none",
    },
}  # fmt: skip

# Flags of other tools and the word of ours that they stand for when true.
MEANT_BY_TRUE = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "use_rslora": "rslora",
    "peft_use_rslora": "rslora", "lora_target_linear": "all-linear", "sdp_attention": "sdpa",
    "eager_attention": "eager",
}  # fmt: skip

# Keys whose values mean something else in other tools (steps for a ratio): copying them would be wrong.
UNLIKE = frozenset(
    {
        "schedule.warmup_ratio",
        "schedule.min_lr_ratio",
        "schedule.decay_ratio",
        "data.loss_on",
        "data.overlong",
    }
)

# 8-bit and 32-bit optimizers that other tools keep on the device.
RESIDENT_OPTIMIZERS = frozenset(
    {"adamw_8bit", "adamw_bnb_8bit", "adamw8bit", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf",
    "adam",
     "torch.optim.adamw"}
)  # fmt: skip

# Keys and values whose feature comes later; a list index is written `*`.
LATER_KEYS = frozenset(
    {"lora.train_new_tokens", "data.train.*.weight", "optimizer.paging.on_oom",
    "optimizer.paging.vram_reserve_mib",
     "optimizer.paging.host_mib_max", "optimizer.paging.predict_spikes",
     "optimizer.paging.readmit_after_steps",
     "train.early_stopping_patience", "log.trackers"}
)  # fmt: skip
LATER_VALUES: dict[str, frozenset[str]] = {
    "model.attention": frozenset({"varlen", "flash_attention_2", "flash_attention_3", "flex"}),
    "lora.variant": frozenset({"dora"}),
    "lora.init": frozenset({"pissa", "loftq"}),
    "data.format": frozenset({"prompt_completion", "text"}),
    "data.train.*.format": frozenset({"prompt_completion", "text"}),
    "data.validation.*.format": frozenset({"prompt_completion", "text"}),
    "data.packing": frozenset({"true", "True", "TRUE", "yes", "Yes", "on", "On"}),
    "optimizer.paging.backend": frozenset({"pinned", "unified", "cpu"}),
    "optimizer.paging.prefetch": frozenset({"last_micro_batch"}),
    "train.activation_checkpointing": frozenset({"selective", "offload"}),
}
