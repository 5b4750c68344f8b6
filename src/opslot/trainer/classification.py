"""`ClassificationTrainer`: labels for texts, or for their words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from opslot._base.errors import ConfigError
from opslot._base.labels import IGNORE_INDEX
from opslot.data.labels import LabelEncoder
from opslot.distributed import sum_over_ranks
from opslot.trainer.run_data import padding_token
from opslot.trainer.text import TextTrainer, require_targets


class ClassificationTrainer(TextTrainer):
    """Trains Transformers' sequence or token classifier of the model's architecture."""

    @property
    def encoder(self) -> LabelEncoder:
        encoder = self.data.encoder
        assert isinstance(encoder, LabelEncoder), "the encoder of task classification"
        return encoder

    def model_options(self) -> dict[str, Any]:
        names = self.encoder.names
        return {
            "architecture": _classifier_of(self.model_config.model_type, bool(self.encoder.per_token)),
            "config_kwargs": {
                "id2label": dict(enumerate(names)),
                "label2id": {name: number for number, name in enumerate(names)},
                "pad_token_id": padding_token(self.tokenizer),
            },
        }

    def count_targets(self, batch: dict[str, Any]) -> int:
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def forward(self, batch: dict[str, Any], num_items_in_batch: int) -> Any:
        """Logits, and the cross entropy summed over the labels and divided by `num_items_in_batch`."""
        on_device = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        labels = on_device.pop("labels").flatten()
        logits = self.model(**on_device, use_cache=False).logits.float()
        flat = logits.reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="sum") / max(1, num_items_in_batch)
        return SimpleNamespace(loss=loss, logits=logits)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss in nats per label, accuracy, and F1 averaged over the labels that occur (macro)."""
        classes = len(self.encoder.names)
        confusion = torch.zeros(classes, classes, dtype=torch.float64)
        total = 0.0
        with self._evaluating():
            for batch, counts in self.evaluated_batches():
                outputs = self.forward(batch, 1)
                if counts:
                    labels = batch["labels"].flatten()
                    predicted = outputs.logits.reshape(-1, classes).argmax(-1).cpu()
                    kept = labels != IGNORE_INDEX
                    index = labels[kept] * classes + predicted[kept]
                    confusion += torch.bincount(index, minlength=classes**2).view(classes, classes)
                    total += outputs.loss.item()
        total, *cells = sum_over_ranks(total, *confusion.flatten().tolist())
        confusion = torch.tensor(cells, dtype=torch.float64).view(classes, classes)
        right, labelled, guessed = confusion.diag(), confusion.sum(1), confusion.sum(0)
        occurs = (labelled + guessed) > 0
        f1 = (2 * right / (labelled + guessed).clamp(min=1))[occurs]
        count = float(confusion.sum())
        require_targets(count)
        return {
            "eval_loss": total / count,
            "eval_accuracy": float(right.sum()) / count,
            "eval_f1": float(f1.mean()),
        }


def _classifier_of(model_type: str, per_token: bool) -> str:
    from transformers.models.auto import modeling_auto

    kind = "TOKEN" if per_token else "SEQUENCE"
    name = getattr(modeling_auto, f"MODEL_FOR_{kind}_CLASSIFICATION_MAPPING_NAMES").get(model_type)
    if name is None:
        raise ConfigError(
            f"Transformers has no {kind.lower()} classifier for model_type {model_type!r}",
            hint="use another model, or labels for "
            + ("whole texts (one label each)" if per_token else "words (a list of labels)"),
        )
    return str(name)
