"""`VLMTrainer`: a model with images, video and audio, on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError
from opslot._base.source import method_parameters
from opslot.data.encoder import SampleError
from opslot.data.loader import TokenLoader
from opslot.data.multimodal.samples import MultimodalEncoder
from opslot.models._multimodal.modalities import inlined_inputs
from opslot.models._sequence.packing import packing_problem
from opslot.models.flop_modules import FRAMES, PATCHES, TOKENS
from opslot.trainer.generating import answer_about_media, conversation
from opslot.trainer.processors import multimodal_class
from opslot.trainer.prompts import Prompt, prompt_of
from opslot.trainer.text import TextTrainer, rounded
from opslot.trainer.validate import micro_batch_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class VLMTrainer(TextTrainer):
    """Trains Transformers' <Model>ForConditionalGeneration on the assistant's turns of conversations with images, video
    and audio, and of conversations without."""

    @property
    def encoder(self) -> MultimodalEncoder:
        encoder = self.data.encoder
        assert isinstance(encoder, MultimodalEncoder), "the encoder of task vlm"
        return encoder

    def model_options(self) -> dict[str, Any]:
        return {"architecture": multimodal_class(self.model_config)}

    def packing_problem(self, model: PreTrainedModel) -> str | None:
        positions = self.encoder.positions
        if positions.axes > 1 and not positions.takes_text_axis:
            return f"it takes no positions of documents beside the {positions.axes} axes of its rotary embedding"
        return packing_problem(model)

    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        self._check_rows(model)
        self._check_prompts()
        return model

    def _check_rows(self, model: PreTrainedModel) -> None:
        """Raise ConfigError where images belong to rows of a batch, and some rows would have none."""
        taken = method_parameters(type(model))
        by_row = bool(inlined_inputs(model)) and ("cross_attention_mask" in taken or not self.encoder.media_tokens)
        size = micro_batch_size(self.config.train)
        if by_row and size > 1 and not self.config.data.packing:
            raise ConfigError(
                f"{type(model).__name__} takes images by row of a batch, not by placeholder, so a row without images "
                "would get those of another",
                found=f"micro batches of {size} samples",
                hint="set train.micro_batch_size: 1",
            )

    def _check_prompts(self) -> None:
        """Raise ConfigError for a prompt of the evaluation with media that the model does not take."""
        for number, prompt in enumerate(map(prompt_of, self.config.evaluation.prompts or ())):
            if not prompt.media:
                continue
            try:
                self.encoder.prompt(conversation(prompt.text, prompt.media), Path())
            except SampleError as error:
                raise ConfigError(
                    f"evaluation.prompts[{number}], {prompt.label}: {error}", hint="give files that this model takes"
                ) from error

    def answer(self, prompt: Prompt, max_new_tokens: int) -> str:
        if not prompt.media:
            return super().answer(prompt, max_new_tokens)
        return answer_about_media(
            self.model, self.encoder, prompt.text, prompt.media, max_new_tokens, device=self.device
        )

    def set_costs(self) -> None:
        super().set_costs()
        flops, cost = self.meter.flops, self.encoder.cost
        # Of images where the model has both: a document has the sum of its costs.
        pairs = (flops.per_row(PATCHES), cost.per_row("vision")), (flops.per_row(FRAMES), cost.per_row("audio"))
        found = next(((counted, estimated) for counted, estimated in pairs if counted and estimated), None)
        if isinstance(self.batches, TokenLoader) and flops.per_row(TOKENS) and found is not None:
            # A frozen encoder has no backward pass.
            self.batches.encoder_cost = rounded(found[0] / flops.per_row(TOKENS) / found[1])

    @property
    def processor(self) -> Any:
        return self.encoder.processor
