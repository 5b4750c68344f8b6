"""`BaseTrainer`: the loop that every kind of training shares."""

from __future__ import annotations

import contextlib
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from opslot._base.errors import DataError, TrainingError
from opslot.checkpoint.training_state import load_snapshot, read_state, take_snapshot
from opslot.data.collation import count_targets
from opslot.data.loader import worker_errors
from opslot.distributed import (
    average_statistics,
    gather_objects,
    gradient_sync,
    on_first_rank,
    shard_sequence,
    sum_over_ranks,
    wait_for_ranks,
)
from opslot.distributed.gradient_norm import clip_grad_norm_on_host
from opslot.models._multimodal.unused_modules import drop_gradients_of_unused_modules
from opslot.models._own_loss import call_with_share_of_loss
from opslot.slots import explain
from opslot.trainer.best import BestEvaluation
from opslot.trainer.callbacks.base import Callback, StepRecord
from opslot.trainer.callbacks.host_bound import HostBoundCallback
from opslot.trainer.callbacks.profile import ProfileCallback
from opslot.trainer.callbacks.progress import ProgressCallback
from opslot.trainer.callbacks.writers import (
    CheckpointCallback,
    EvaluationCallback,
    ExportCallback,
    LossCurveCallback,
    MetricsCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)
from opslot.trainer.checkpointing import CHECKPOINTS, find_checkpoints
from opslot.trainer.commits import with_commits
from opslot.trainer.config import RunConfig
from opslot.trainer.display import make_console
from opslot.trainer.lora import without_gradient
from opslot.trainer.loss_scaling import LossScaler
from opslot.trainer.optimizer import build_optimizer, learning_rate, require_same_optimizer, set_learning_rate
from opslot.trainer.out_of_memory import memory_errors
from opslot.trainer.output_folder import start_output
from opslot.trainer.output_lock import OutputLock
from opslot.trainer.parse import config_changes
from opslot.trainer.prepare import prepare_model
from opslot.trainer.prompts import PromptValue
from opslot.trainer.random_states import random_states, restore_random_states, seed_everything
from opslot.trainer.saver import CheckpointSaver
from opslot.trainer.setup import disk_errors, dtype_of, peak_memory, start_processes, with_defaults
from opslot.trainer.stopping import StopRequest
from opslot.trainer.throughput import StepMeter
from opslot.trainer.validate import RunInputs, micro_batch_size, validate

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel


_MOST_STEPS_WITHOUT_TARGETS = 10
_LABELS = ("labels", "shift_labels")  # other integer inputs, such as positions and grids, are read on the host


class BatchSource(Protocol):
    """An endless stateful dataloader of micro batches, or of lists of them; torchdata's StatefulDataLoader is one."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: number of the last step.
        completed: False when a signal stopped the run before its last step.
        record: measurements of the last step; None when the run was already complete.
        signal: number of the signal that stopped the run, or None.
    """

    step: int
    completed: bool
    record: StepRecord | None
    signal: int | None = None


class BaseTrainer(ABC):
    """Builds model, data and optimizer, restores a checkpoint, and runs the training steps and callbacks.

    Nothing is written before everything is built; then the output folder receives the configuration, the kernel
    table and the files of the callbacks. Subclasses build the data and the model.

    Args:
        config: the configuration of the run.
        callbacks: called in this order; default `default_callbacks()`.
        console: where messages are printed; default standard output.

    Raises:
        ConfigError, DataError, CheckpointError: before the first step, each with all problems found.
    """

    def __init__(
        self, config: RunConfig, callbacks: Sequence[Callback] | None = None, console: Console | None = None
    ) -> None:
        config, self.commits = on_first_rank(lambda: with_commits(with_defaults(config)))
        self.config = config
        self.console = console or make_console()
        self.inputs: RunInputs = validate(config)
        # Each machine downloads models and data of the hub, and the slowest one may take hours.
        wait_for_ranks()
        for warning in self.inputs.warnings:
            self.print(f"warning: {warning}")
        self.output_dir = Path(config.train.output_dir)
        self._lock = OutputLock(self.output_dir)
        self.state = start_processes(config)
        self.device = self.state.device
        self.step = 0
        self.tokens_seen = 0
        self.batches: BatchSource = self.build_data()
        seed_everything(config.train.seed)
        self.loss_scaler = LossScaler(dtype_of(config.train.fsdp.param_dtype))
        with memory_errors(self):
            self.model: PreTrainedModel = prepare_model(self.build_model(), config, self.state, self.inputs, self.print)
            # All ranks seed alike until the weights exist; dropout differs by rank.
            seed_everything(config.train.seed + self.state.rank)
            self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.meter = StepMeter(self.model, config.train, self.device, self.state.world_size)
            self.optimizer = build_optimizer(self.model, config.train)
            self.max_steps = self.count_steps()
            self.expected_steps: float | None = self.max_steps
            self._random_states: dict[str, Any] | None = None
            self._steps_without_targets = 0
            self.best = BestEvaluation(config.evaluation.best_metric)
            self._restore()
        self._first_step = self.step
        self.saver = CheckpointSaver(
            self.output_dir / CHECKPOINTS,
            keep=config.train.checkpoint.save_total_limit,
            background=config.train.checkpoint.async_save,
        )
        self.callbacks = list(callbacks) if callbacks is not None else self.default_callbacks()
        self._stop_signal: int | None = None
        self._stop = StopRequest(self.print)

    @abstractmethod
    def build_data(self) -> BatchSource:
        """Open the training data."""

    @abstractmethod
    def build_model(self) -> PreTrainedModel:
        """Build the model with its kernels bound, on `self.device` or on meta.

        A model on meta is initialized after sharding: from `model.model_path`, or with random weights.
        """

    @abstractmethod
    def count_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if counting them would delay the first one. `progress` then decides
        when the run ends."""

    def progress(self) -> float:
        """Share of the run's data that is consumed, from 0 to 1 and beyond; for runs whose steps are not counted."""
        raise NotImplementedError(f"{type(self).__name__}.count_steps() returned None, so it needs progress()")

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out data: "eval_loss", in nats per target, and others that start with "eval_"."""

    def generate(self, prompts: Sequence[PromptValue], max_new_tokens: int) -> list[str]:
        """The model's answer to each prompt; every rank calls it."""
        raise NotImplementedError(f"{type(self).__name__} generates nothing")

    def count_targets(self, batch: dict[str, Any]) -> int:
        """Number of labels that the loss of a micro batch averages over."""
        return count_targets(batch["labels"])

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face checkpoint."""

    @property
    def title(self) -> str:
        """One line that names the run, e.g. above the loss curve."""
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        text = f"{self.model.config.model_type}, {sum(size for size, _ in sizes) / 1e6:,.1f}M parameters"
        if all(is_trained for _, is_trained in sizes):
            return text
        trained = sum(size for size, is_trained in sizes if is_trained)
        return f"{text}, {trained / 1e6:,.2f}M of them trained{'' if self.config.lora.r is None else ' (LoRA)'}"

    @property
    def reference_loss(self) -> float | None:
        """A loss in nats per token that the loss curve shows as a dashed line."""
        return None

    @property
    def accumulation_steps(self) -> int:
        """Micro batches per rank and optimizer step."""
        train = self.config.train
        return train.global_batch_size // (micro_batch_size(train) * self.state.dp_size)

    def next_micro_batches(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """This rank's micro batches of an optimizer step; the number is the same on every rank."""
        return [next(batches) for _ in range(self.accumulation_steps)]

    def count_tokens(self, micro_batches: list[dict[str, Any]]) -> float:
        """This rank's share of the tokens of an optimizer step, padding included; equal on ranks of one sequence."""
        return sum(batch["input_ids"].numel() for batch in micro_batches)

    def default_callbacks(self) -> list[Callback]:
        """Evaluation first, since the others report its result; metrics before the checkpoint that relies on them.

        Ranks other than 0 only get the callbacks that all ranks take part in.
        """
        profile: list[Callback] = [ProfileCallback(self.state.rank)] if self.config.train.logging.profile else []
        if self.state.rank:
            return [*profile, EvaluationCallback(), CheckpointCallback(), ExportCallback()]
        logging = self.config.train.logging
        chosen: list[Callback] = [*profile, EvaluationCallback(), MetricsCallback()]
        if logging.tensorboard:
            chosen.append(TensorBoardCallback())
        if logging.wandb:
            chosen.append(WandbCallback())
        if logging.trackio:
            chosen.append(TrackioCallback())
        if logging.progress != "off":
            chosen.append(ProgressCallback(self.console))
        if self.device.type == "cuda":
            chosen.append(HostBoundCallback())
        return [*chosen, CheckpointCallback(), LossCurveCallback(), ExportCallback()]

    def train(self) -> TrainResult:
        """Run the remaining steps.

        SIGINT and SIGTERM end the run after the current step, with a checkpoint; a second signal ends it immediately.

        Raises:
            ConfigError: another run writes to the output folder.
            DataError: no step has a token to predict, or a process of the dataloader was killed.
            TrainingError: a loss or gradient that is not finite, before it reaches the weights; a full disk or GPU.
            CheckpointError: a checkpoint cannot be written.
        """
        self.model.train()
        with disk_errors(self.output_dir), memory_errors(self), worker_errors(), contextlib.ExitStack() as locked:
            on_first_rank(self._lock.acquire)
            locked.callback(self._lock.release)
            start_output(self.output_dir, self.config, self.model)
            record, completed = self._run_steps()
        return TrainResult(self.step, completed, record, None if completed else self._stop_signal)

    def _run_steps(self) -> tuple[StepRecord | None, bool]:
        record = None
        with self._stop.listening(), self._closing_callbacks(), contextlib.ExitStack() as opened:
            for callback in self.callbacks:
                callback.on_train_start(self)
            batches = iter(self.batches)
            opened.callback(getattr(batches, "close", lambda: None))  # Workers ignore the SIGTERM of an exit.
            if self._random_states is not None:
                # After `iter`: a loader's iterator draws a seed for its workers.
                restore_random_states(self._random_states)
            while not self._is_done() and not self._stop_requested():
                record = self._train_step(batches)
                for callback in self.callbacks:
                    callback.on_step_end(self, record)
            completed = self._is_done()
            for callback in self.callbacks:
                callback.on_train_end(self, completed)
        return record, completed

    def forward(self, batch: dict[str, Any], num_items_in_batch: int) -> Any:
        """Outputs of the model for this rank's part of one micro batch.

        The loss is summed over the tokens and divided by `num_items_in_batch`, so losses of micro batches and ranks add
        up to the mean of the step.
        """
        inputs = {}
        for name, value in shard_sequence(batch, self.state).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value = value.to(self.device, non_blocking=True)
                # On the device: the processes of the dataloader have cast features, and the host must not wait.
                value = value.to(self.model.dtype) if value.element_size() > 2 else value
            elif name in _LABELS:
                value = value.to(self.device, non_blocking=True)
            inputs[name] = value
        return call_with_share_of_loss(self.model, inputs, num_items_in_batch)

    def split_loss(self, outputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cross entropy and the weighted auxiliary loss of the routers, which Transformers adds to `outputs.loss`."""
        aux = getattr(outputs, "aux_loss", None)
        if not isinstance(aux, torch.Tensor):
            return outputs.loss, None
        weighted = self.model.config.get_text_config().router_aux_loss_coef * aux
        return outputs.loss - weighted, weighted

    def save_checkpoint(self) -> Path:
        """Write a checkpoint of the current step; with `async_save` it is complete after `self.saver.wait()`."""
        return self.saver.save(
            take_snapshot(
                self.step,
                self.model,
                self.optimizer,
                {
                    "tokens_seen": self.tokens_seen,
                    "data": self.batches.state_dict(),
                    "config": asdict(self.config),
                    "commits": self.commits,
                    "loss_scale": self.loss_scaler.state_dict(),
                    "best": self.best.state_dict(),
                    "random": gather_objects(random_states()),
                },
                explain(self.model).to_dict(),
            )
        )

    def stop_early(self) -> None:
        """End the run, as complete, after the current step."""
        self.max_steps = self.step

    def print(self, text: str) -> None:
        """A line for the user."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _train_step(self, batches: Iterator[dict[str, Any]]) -> StepRecord:
        self.meter.start()
        train = self.config.train
        with self.meter.waiting_for("data"):
            micro_batches = self.next_micro_batches(batches)
        counted, flops, taken = sum_over_ranks(
            sum(self.count_targets(batch) for batch in micro_batches),
            self.meter.count(micro_batches),
            self.count_tokens(micro_batches),
        )
        # The ranks of one sequence have the same labels.
        targets, flops, tokens = round(counted) // self.state.sp, flops / self.state.sp, round(taken / self.state.sp)
        lr = learning_rate(train, self.step + 1, self._expect_steps(self.step + 1))
        self._check_targets(targets)
        set_learning_rate(self.optimizer, lr)
        while True:
            step_loss, step_aux, grad_norm = self._forward_backward(micro_batches, targets)
            overflow = math.isfinite(step_loss) and not math.isfinite(grad_norm)
            if not (overflow and self.loss_scaler.back_off()):
                break
            self.optimizer.zero_grad(set_to_none=True)
        self._check_finite(step_loss, grad_norm)
        if self.step == self._first_step and (unused := without_gradient(self.model)):
            self.print(
                f"warning: no gradient in step {self.step + 1} for the adapters of {', '.join(unused)}; "
                "if the model never calls these layers, leave them out of lora.target_modules"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        average_statistics(self.model)
        self.loss_scaler.step()
        self.step += 1
        self.tokens_seen += tokens
        return StepRecord(
            step=self.step,
            loss=step_loss,
            grad_norm=grad_norm,
            lr=lr,
            epoch=getattr(self.batches, "epoch", float("nan")),
            tokens=self.tokens_seen,
            memory_gib=peak_memory(self.device),
            **self.meter.measurements(tokens, flops),
            extra={} if step_aux is None else {"aux_loss": step_aux},
        )

    def _forward_backward(self, micro_batches: list[dict[str, Any]], targets: int) -> tuple[float, float | None, float]:
        """Accumulate the gradients of a step; returns its loss, auxiliary loss and gradient norm, over all ranks."""
        loss = torch.zeros((), device=self.device)
        aux_loss: torch.Tensor | None = None
        for number, batch in enumerate(micro_batches, 1):
            with gradient_sync(self.model, number == len(micro_batches)):
                outputs = self.forward(batch, targets)
                cross_entropy, router = self.split_loss(outputs)
                total = outputs.loss
                if router is not None:
                    # Each micro batch of each rank has an auxiliary loss; the step's is their mean.
                    parts = len(micro_batches) * self.state.world_size
                    share = router / parts
                    total = total if parts == 1 else cross_entropy + share
                    aux_loss = share.detach() + (0 if aux_loss is None else aux_loss)
                # Text trains nothing where the language model is frozen.
                if total.requires_grad:
                    (total * self.loss_scaler.scale if self.loss_scaler.enabled else total).backward()
            loss += cross_entropy.detach()
        drop_gradients_of_unused_modules(self.model)
        self.loss_scaler.unscale(self._trained)
        max_norm = self.config.train.max_grad_norm or math.inf
        grad_norm = clip_grad_norm_on_host(self._trained, max_norm, self.meter.waiting_for("device"))
        step_loss, step_aux = sum_over_ranks(loss.item(), 0.0 if aux_loss is None else aux_loss.item())
        return step_loss, None if aux_loss is None else step_aux, grad_norm

    def _check_targets(self, targets: int) -> None:
        """Raise where step after step has nothing to predict; a single such step is possible in small batches."""
        self._steps_without_targets = 0 if targets else self._steps_without_targets + 1
        count, done = self._steps_without_targets, self.step + 1 - self._first_step
        if count == _MOST_STEPS_WITHOUT_TARGETS or (count == done and self.step + 1 == self.max_steps):
            raise DataError(
                f"no token to predict in the last {count} steps",
                found="every document in them has one token only, or all labels are ignored",
                hint="use longer documents (data.sample_by), or set data.append_eos: true",
            )

    def _is_done(self) -> bool:
        return self.max_steps is not None and self.step >= self.max_steps

    def _expect_steps(self, step: int) -> float:
        """Steps of the run, estimated when the data of steps up to `step` has been taken.

        Where steps are not counted, the estimate follows `progress`: it does not depend on how much is tokenized yet,
        and it is exact at the last step.
        """
        if self.max_steps is None:
            share = self.progress()
            self.expected_steps = step / min(share, 1.0)
            if share >= 1:
                self.max_steps = step
            return self.expected_steps
        return self.max_steps

    def _stop_requested(self) -> bool:
        """Whether any rank received a signal, so that all stop after the same step.

        Raises:
            CheckpointError: on every rank, when a background save failed on any.
        """
        numbers = (signal.SIGINT, signal.SIGTERM)
        *received, failed = sum_over_ranks(
            *(float(self._stop.signal == number) for number in numbers), float(self.saver.failed)
        )
        if failed:
            self.saver.wait()
        self._stop_signal = next((int(n) for n, count in zip(numbers, received, strict=True) if count), None)
        return self._stop_signal is not None

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        kept = find_checkpoints(self.saver.folder)
        last = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise TrainingError(
            f"step {self.step + 1}: the loss is {loss} and the gradient norm {grad_norm}",
            found=f"{last}; this step has not changed the weights",
            hint="lower train.lr, raise train.warmup_steps, or check the kernels with opslot verify; "
            "then continue with train.checkpoint.resume_from: latest",
        )

    def _restore(self) -> None:
        checkpoint = self.inputs.checkpoint
        if checkpoint is None:
            if self.config.train.checkpoint.resume_from == "latest":
                self.print(f"no checkpoint in {self.output_dir}; starting from step 1")
            return
        state, _ = read_state(checkpoint)
        require_same_optimizer(checkpoint, state.get("config") or {}, self.config.train.optimizer)
        self.batches.load_state_dict(state["data"])
        load_snapshot(checkpoint, self.model, self.optimizer)
        if self.state.rank < len(state["random"]):
            self._random_states = state["random"][self.state.rank]
        self.step = state["step"]
        self.tokens_seen = state["tokens_seen"]
        if "loss_scale" in state:
            self.loss_scaler.load_state_dict(state["loss_scale"])
        if "best" in state:
            self.best.load_state_dict(state["best"])
        if self.step:
            self._expect_steps(self.step)
        if self.best.is_over(self.config.evaluation.early_stopping_patience):
            self.stop_early()
        self.print(f"resumed from {checkpoint} (step {self.step})")
        for change in config_changes(state.get("config"), asdict(self.config)):
            self.print(f"changed since that checkpoint: {change}")
        if self._is_done():
            self.print(f"step {self.step} was the last one; nothing left to train")

    @contextlib.contextmanager
    def _closing_callbacks(self) -> Iterator[None]:
        with contextlib.ExitStack() as closing:
            closing.callback(self.saver.close)
            for callback in reversed(self.callbacks):
                closing.callback(callback.close, self)
            yield
