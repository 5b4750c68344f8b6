"""Runs that train adapters, and the same with PEFT."""

import peft
import torch
from transformers import AutoModelForCausalLM

LORA = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
SIZES = {
    "fsdp": {},
    "sp": {"sp_size": 2, "fsdp": {"ulysses_overlap": True}},
    "ep": {"ep_size": 2},
    "ddp": {"data_parallel_mode": "ddp"},
}


DENSE = {
    "model_type": "qwen3",
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "eos_token_id": 0,
}


def recorded_steps(run):
    """The batches of each step, once the run has trained; dropout starts from the number of the step."""
    steps, forward = [], run.forward

    def record(batch, count):
        torch.manual_seed(len(steps))
        steps.append([(batch, count)])
        return forward(batch, count)

    run.forward = record
    return steps


def peft_losses(base, adapter, steps, config):
    """The losses of PEFT without opslot from the same adapters (a folder, or their config) and batches."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if isinstance(adapter, peft.PeftConfig):
        model = peft.get_peft_model(model, adapter)
    else:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    betas = (config.optimizer.beta1, config.optimizer.beta2)
    decays = [0.0 if p.ndim < 2 else config.weight_decay for p in trained]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(trained, decays, strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=betas, lr=config.lr)
    losses = []
    for number, batches in enumerate(steps):
        total = 0.0
        torch.manual_seed(number)
        for batch, count in batches:
            loss = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(count)).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
