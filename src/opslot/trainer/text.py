"""`TextTrainer`: a causal language model on texts or conversations."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opslot._base.errors import ConfigError, DataError
from opslot.checkpoint import export_hf, save_adapter
from opslot.checkpoint.save import save_processors
from opslot.data.chat import ChatEncoder
from opslot.data.collation import count_targets
from opslot.data.encoder import SampleError
from opslot.data.loader import SampleLoader, TokenLoader
from opslot.distributed import sum_over_ranks
from opslot.distributed.sequence import has_features
from opslot.models import build_foundation_model, load_config
from opslot.models._multimodal.text_only import missing_media_error, required_type_ids
from opslot.models._own_loss import why_not_causal
from opslot.models._sequence.packing import packing_problem
from opslot.models.flop_modules import TOKENS
from opslot.ops.cross_entropy_loss import loss_only
from opslot.trainer.base import BaseTrainer, TrainResult
from opslot.trainer.generating import generate_answer, prompt_tokens
from opslot.trainer.prompts import Prompt, PromptValue, prompt_of
from opslot.trainer.run_data import CHAT_TASKS, RunData, open_tokenizer, set_sample_length
from opslot.trainer.setup import dtype_of_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Up to this many bytes of text, tokens are counted for the reference line of the loss curve.
_COUNTED_FOR_CURVE = 1 << 30


def rounded(cost: float) -> float:
    """A cost that is the same on all ranks, which plan their steps by it."""
    return float(f"{cost:.3g}")


def require_targets(count: float) -> None:
    """Raise where an evaluation has nothing to predict: a loss of 0 would be the best one."""
    if not count:
        raise DataError(
            "no token to predict in the evaluation data",
            found="every document in it has one token only, or all labels are ignored",
            hint="set data.eval_path to other data, or increase data.eval_fraction",
        )


class TextTrainer(BaseTrainer):
    """Trains a model from `opslot.build_foundation_model` to predict the next token, of texts (task pretrain) or of the
    assistant's turns (task sft)."""

    def build_data(self) -> SampleLoader | TokenLoader:
        config = self.config
        # Before the tokenizer: AutoTokenizer also reads config.json, and would report its errors as the tokenizer's.
        self.model_config = load_config(self.inputs.config_path, trust_remote_code=config.model.trust_remote_code)
        self.tokenizer = open_tokenizer(config, self.inputs, self.model_config)
        self._check_sizes()
        set_sample_length(config.data, self.model_config, self.tokenizer)
        self.data = RunData(config, self.inputs, self.tokenizer, self.model_config)
        self._check_text_prompts()
        self.train_set = self.data.train_set
        self.data.start_tokenizing()
        return self.data.loader(
            self.model_config.get_text_config().hidden_size,
            rank=self.state.dp_rank,
            world_size=self.state.dp_size,
            pin_memory=self.device.type == "cuda",
        )

    def next_micro_batches(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        self.data.check_processes()
        if isinstance(self.batches, TokenLoader):
            return next(batches)
        return super().next_micro_batches(batches)

    def forward(self, batch: dict[str, Any], num_items_in_batch: int) -> Any:
        if has_features(batch):
            return super().forward(batch, num_items_in_batch)
        zeros = {name: torch.zeros_like(batch["input_ids"]) for name in self._type_ids if batch.get(name) is None}
        with missing_media_error(self.model):
            return super().forward({**batch, **zeros}, num_items_in_batch)

    @functools.cached_property
    def _type_ids(self) -> list[str]:
        return required_type_ids(self.model)

    def count_tokens(self, micro_batches: list[dict[str, Any]]) -> float:
        if isinstance(self.batches, TokenLoader):
            return self.batches.step_size / self.state.dp_size
        return super().count_tokens(micro_batches)

    def train(self) -> TrainResult:
        with contextlib.closing(self.data):
            return super().train()

    def build_model(self) -> PreTrainedModel:
        model = self.config.model
        # Random weights are also drawn after sharding, so that they are the same on any mesh.
        # Weights that are quantized are so as they are read.
        quantized = self.config.lora.quantization is not None
        weights = self.inputs.model_path
        later = weights is None or self.state.mesh is not None or quantized
        options = self.model_options()
        built = build_foundation_model(
            self.inputs.config_path,
            weights_path=None if later else weights,
            torch_dtype=dtype_of_weights(self.config),
            init_device="meta" if later else self.device.type,
            run_device=self.device.type,
            run_dtype=self.config.train.fsdp.param_dtype,
            ops_implementation=model.ops_implementation,
            trust_remote_code=model.trust_remote_code,
            **options,
        )
        if "architecture" in options:
            # The class that the exported config names.
            built.config.architectures = [options["architecture"]]
        # The loss is read by its name, also of a model whose config asks for tuples.
        for module in built.modules():
            if getattr(getattr(module, "config", None), "return_dict", None) is False:
                module.config.return_dict = True
        if built.can_generate():
            self._set_generation(built)
        data = self.config.data
        if self.config.task in ("pretrain", "sft") and (reason := why_not_causal(built)):
            raise ConfigError(
                f"{type(built).__name__} is not a causal language model, which task {self.config.task} trains",
                found=reason,
                hint="use another model; of BERT and its like, a decoder has is_decoder: true in config.json",
            )
        if data.packing and self.config.task != "classification" and (reason := self.packing_problem(built)):
            also = "" if data.max_tokens_per_batch is None else " and remove data.max_tokens_per_batch"
            raise ConfigError(
                f"{type(built).__name__} cannot train on packed documents, which would see each other",
                found=reason,
                hint=f"set data.packing: false{also}",
            )
        return built

    def _set_generation(self, model: PreTrainedModel) -> None:
        """The checkpoint's generation config, which ends generation also where the chat template ends an answer: that
        token is often not the end-of-sequence token of a base model, and it would never stop."""
        from transformers import GenerationConfig

        folder = self.inputs.model_path
        if folder is not None and (folder / "generation_config.json").is_file():
            try:
                generation = GenerationConfig.from_pretrained(folder)
                generation.validate(strict=True)  # or it cannot be exported
                model.generation_config = generation
            except (OSError, ValueError, TypeError) as error:
                self.print(
                    f"warning: {folder / 'generation_config.json'} is not exported, since it is invalid: {error}"
                )
        encoder, config = self.data.encoder, model.generation_config
        end = encoder.end_of_answer() if isinstance(encoder, ChatEncoder) else None
        if end is None or config is None:
            return
        known = config.eos_token_id
        ends = [] if known is None else [*known] if isinstance(known, list) else [known]
        if end not in ends:
            config.eos_token_id = [*ends, end]

    def set_costs(self) -> None:
        """Balance steps by the FLOPs of the model, which are known when it is built."""
        flops, length = self.meter.flops, self.config.data.sample_length
        token = flops.per_row(TOKENS)
        if isinstance(self.batches, TokenLoader) and token:
            self.batches.attention_cost = rounded(flops.attention(length) / length**2 / token)

    def count_steps(self) -> int | None:
        self.set_costs()
        train = self.config.train
        if train.max_steps is not None:
            return train.max_steps
        if not self.data.tokenized_at_start:
            return None
        if isinstance(self.batches, TokenLoader):
            return self.batches.steps(train.num_epochs)
        samples = self.train_set.samples_per_epoch * train.num_epochs
        return max(1, math.ceil(samples / train.global_batch_size))

    def progress(self) -> float:
        assert isinstance(self.batches, SampleLoader | TokenLoader), "these loaders report their progress"
        return self.batches.epoch / self.config.train.num_epochs

    def packing_problem(self, model: PreTrainedModel) -> str | None:
        """Why packed documents would see each other in `model`; None where they don't."""
        return packing_problem(model)

    def model_options(self) -> dict[str, Any]:
        """Further options of `build_foundation_model`."""
        return {}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss (mean cross entropy of the held-out documents in nats per token) and perplexity."""
        # On the device: reading the loss of each batch would stop it.
        total, targets = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with self._evaluating(), loss_only(self.model):
            for batch, counts in self.evaluated_batches():
                count = count_targets(batch["labels"]) if counts else 0
                cross_entropy, _ = self.split_loss(self.forward(batch, count))
                total += cross_entropy.double() * count
                targets += count
        summed, counted = sum_over_ranks(total.item(), targets)
        require_targets(counted)
        # The ranks of one sequence count the same targets, and each computes a part of their loss.
        loss = summed / (counted / self.state.sp)
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}

    def evaluated_batches(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """This rank's batches of the held-out documents, and whether each counts, see `EvaluationLoader`."""
        assert self.data.eval_sets, "evaluation needs train.eval_steps or data.eval_path"
        state = self.state
        return itertools.chain.from_iterable(
            self.data.evaluation_loaders(
                rank=state.dp_rank, world_size=state.dp_size, pin_memory=self.device.type == "cuda"
            )
        )

    @torch.no_grad()
    def generate(self, prompts: Sequence[PromptValue], max_new_tokens: int) -> list[str]:
        """The model's answer to each prompt, as in `evaluation.prompts`, without sampling; every rank calls it."""
        with self._evaluating():
            return [self.answer(prompt_of(prompt), max_new_tokens) for prompt in prompts]

    def _check_text_prompts(self) -> None:
        """Check that prompts of the evaluation without media have tokens, and fit the model with the answer."""
        evaluation = self.config.evaluation
        positions = getattr(self.model_config.get_text_config(), "max_position_embeddings", None)
        for number, prompt in enumerate(map(prompt_of, evaluation.prompts or ())):
            if prompt.media:
                continue
            field = f"evaluation.prompts[{number}], {prompt.label}"
            try:
                size = len(prompt_tokens(self.tokenizer, prompt.text, **self._prompt_options))
            except SampleError as error:
                raise ConfigError(f"{field}: {error}", hint="change the prompt or the chat template") from error
            if positions is not None and size + evaluation.max_new_tokens > positions:
                raise ConfigError(
                    f"{field}: its answer exceeds the model's max_position_embeddings={positions}",
                    found=f"{size} tokens and evaluation.max_new_tokens={evaluation.max_new_tokens}",
                    hint="set evaluation.max_new_tokens to less, or shorten the prompt",
                )

    @property
    def _prompt_options(self) -> dict[str, Any]:
        """How prompts become tokens."""
        return {"chat": self.config.task in CHAT_TASKS, "as_processor": self.processor is not self.tokenizer}

    def answer(self, prompt: Prompt, max_new_tokens: int) -> str:
        """The model's answer to one prompt."""
        assert not prompt.media, "only task vlm has prompts with media"
        options = self._prompt_options
        return generate_answer(self.model, self.tokenizer, prompt.text, max_new_tokens, device=self.device, **options)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    @property
    def processor(self) -> Any:
        """What is exported beside the weights: the tokenizer, or the processor that has it."""
        return self.tokenizer

    def export(self, folder: Path) -> None:
        """Write weights, config and processor so that plain Transformers loads them; of adapters, what PEFT loads."""
        lora = self.config.lora
        if lora.r is not None:
            save_adapter(self.model, folder)
            save_processors([self.processor], folder)
            folder = folder / "merged"
        if lora.r is None or lora.merge:
            config = self.inputs.config_path
            export_hf(
                self.model,
                folder,
                processors=[self.processor],
                merge_adapters=lora.merge,
                source=self.inputs.model_path or (config.parent if config.is_file() else config),
                keep_excluded=self.config.model.export_excluded,
            )

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the token frequencies in nats: the loss of a model that predicts them without any context."""
        counts = self.data.counts()
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    @property
    def reference_loss(self) -> float | None:
        counted = self.config.task == "pretrain" and self.data.is_complete and self.data.size <= _COUNTED_FOR_CURVE
        return self.unigram_entropy if counted else None

    def _check_sizes(self) -> None:
        """Check the tokenizer and the routing against the model's config."""
        text_config = self.model_config.get_text_config()
        tokens, vocab_size = len(self.tokenizer), text_config.vocab_size
        if tokens > vocab_size:
            raise ConfigError(
                f"the tokenizer in {self.inputs.tokenizer_path} has {tokens} tokens, more than the model's "
                f"vocab_size={vocab_size}",
                hint="use the tokenizer that ships with the checkpoint, or increase vocab_size in config.json",
            )
        top_k = getattr(text_config, "num_experts_per_tok", None)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        name = next((n for n in names if isinstance(getattr(text_config, n, None), int)), None)
        if isinstance(top_k, int) and name is not None and top_k > getattr(text_config, name) > 0:
            raise ConfigError(
                f"num_experts_per_tok={top_k} exceeds {name}={getattr(text_config, name)}",
                hint=f"fix them in {self.inputs.config_path}",
            )
