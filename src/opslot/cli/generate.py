"""`opslot generate`: answers of a checkpoint, with Transformers' `generate`."""

from __future__ import annotations

from typing import Any

from opslot._base.errors import ConfigError


def run(
    model: str,
    prompts: list[str],
    *,
    system: str | None,
    raw: bool,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str | None,
    trust_remote_code: bool,
) -> int:
    """Print the answer to each prompt.

    Raises:
        ConfigError: no checkpoint of a causal language model in the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from opslot._base.device import best_device
    from opslot.checkpoint.adapters import read_adapter_config
    from opslot.data import load_tokenizer
    from opslot.models import load_config
    from opslot.trainer.generating import generate_answers

    # Of a folder with adapters, Transformers loads the base model that they name, and adds them.
    load_config(read_adapter_config(model).get("base_model_name_or_path") or model, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if system is not None and (raw or not tokenizer.chat_template):
        why = "--raw is given" if raw else f"the tokenizer in {model} has none"
        raise ConfigError(f"--system needs a chat template, and {why}")
    logging.disable_progress_bar()
    target = device or best_device().type
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=True, dtype="auto"
        )
        loaded = loaded.to(target).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{model} is not a checkpoint that can generate",
            found=str(error).splitlines()[0],
            hint="give the folder of a causal language model, such as <output_dir>/hf",
        ) from error
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else None
    with torch.no_grad():
        for prompt in prompts:
            (answer,) = generate_answers(
                loaded,
                tokenizer,
                [prompt],
                max_new_tokens,
                chat=False if raw else None,
                system=system,
                device=target,
                sampling=sampling,
            )
            if len(prompts) > 1:
                print(f">>> {prompt}")
            print(answer)
    return 0
