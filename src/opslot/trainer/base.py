"""`BaseTrainer`: the loop that every kind of training shares."""

from __future__ import annotations

import contextlib
import errno
import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from opslot._base.errors import TrainingError
from opslot._base.files import write_json, write_text
from opslot.checkpoint import initialize_weights
from opslot.data import count_targets
from opslot.distributed import (
    ParallelState,
    clip_grad_norm,
    gradient_sync,
    init_parallel_state,
    shard_sequence,
    sum_over_ranks,
)
from opslot.distributed.copy_engine import opened_bytes
from opslot.models import load_foundation_weights
from opslot.models.parallelize import parallelize
from opslot.slots import explain
from opslot.trainer import checkpointing
from opslot.trainer.callbacks import (
    Callback,
    CheckpointCallback,
    EvaluationCallback,
    ExportCallback,
    LossCurveCallback,
    MetricsCallback,
    ProgressCallback,
    StepRecord,
    TensorBoardCallback,
    WandbCallback,
)
from opslot.trainer.config import RunConfig
from opslot.trainer.display import make_console
from opslot.trainer.kernels import kernel_record, pin_kernels, require_same_kernels
from opslot.trainer.optimizer import build_optimizer, learning_rate
from opslot.trainer.parse import to_yaml
from opslot.trainer.random_states import restore_random_states, seed_everything
from opslot.trainer.saver import CheckpointSaver
from opslot.trainer.stopping import StopRequest
from opslot.trainer.validate import Inputs, micro_batch_size, validate

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel


# What a disk says that takes no more.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}


class BatchSource(Protocol):
    """Endless micro batches, or steps of them, with a place that can be saved; torchdata's StatefulDataLoader is one
    too."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: last step done.
        completed: False when the run was asked to stop before its last step.
        record: measurements of the last step; None when there was none left to do.
    """

    step: int
    completed: bool
    record: StepRecord | None


class BaseTrainer(ABC):
    """Builds model, data and optimizer, restores a checkpoint, and runs the steps with callbacks around them.

    Nothing is written before everything is built; then the output folder receives the configuration, the kernel
    table and what the callbacks write. Subclasses say what the data and the model are.

    Args:
        config: the run.
        callbacks: called in this order; default `default_callbacks()`.
        console: where messages go; default standard output.

    Raises:
        ConfigError, DataError, CheckpointError: before the first step, each with everything that is wrong.
    """

    def __init__(
        self, config: RunConfig, callbacks: Sequence[Callback] | None = None, console: Console | None = None
    ) -> None:
        self.config = config
        self.console = console or make_console()
        self.inputs: Inputs = validate(config)
        self.output_dir = Path(config.train.output_dir).expanduser()
        self.state = start_processes(config)
        self.device = self.state.device
        self.step = 0
        self.tokens_seen = 0
        self.batches: BatchSource = self.build_data()
        seed_everything(config.train.seed)
        self.model: PreTrainedModel = self._parallelize(self.build_model())
        # Until here all ranks drew the same numbers, for a model that `build_model` may have filled.
        seed_everything(config.train.seed + self.state.rank)
        self.optimizer = build_optimizer(self.model, config.train)
        self.max_steps = self.count_steps()
        self.expected_steps: float | None = self.max_steps
        self._random_states: dict[str, Any] | None = None
        self._restore()
        self.saver = CheckpointSaver(
            self.output_dir / checkpointing.CHECKPOINTS,
            keep=config.train.save_total_limit,
            background=config.train.async_save,
        )
        self.callbacks = list(callbacks) if callbacks is not None else self.default_callbacks()
        self._stop = StopRequest(self._say_that_it_stops)

    @abstractmethod
    def build_data(self) -> BatchSource:
        """Open the training data."""

    @abstractmethod
    def build_model(self) -> PreTrainedModel:
        """Build the model, its kernels bound, on `self.device`; or on meta, then it gets its values once it is sharded:
        those of `model.model_path`, or random ones."""

    @abstractmethod
    def count_steps(self) -> int | None:
        """Optimizer steps of the whole run; None where counting them would delay the first one, then `share_done` ends
        the run."""

    def share_done(self) -> float:
        """How much of the run's data is consumed, from 0 to 1 and beyond; for runs whose steps are not counted."""
        raise NotImplementedError(f"{type(self).__name__}.count_steps() returned None, so it needs share_done()")

    @abstractmethod
    def evaluate(self) -> float:
        """Cross entropy of held-out data, nats a predicted token."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face checkpoint."""

    @property
    def title(self) -> str:
        """One line that names the run in pictures."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        return f"{self.model.config.model_type}, {millions:,.1f}M parameters"

    @property
    def reference_loss(self) -> float | None:
        """A loss to compare with in pictures, nats a token."""
        return None

    @property
    def accumulation_steps(self) -> int:
        """Micro batches that one process runs in an optimizer step."""
        train = self.config.train
        return train.global_batch_size // (micro_batch_size(train) * self.state.dp_size)

    def next_micro_batches(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """This rank's micro batches of an optimizer step; as many on every rank."""
        return [next(batches) for _ in range(self.accumulation_steps)]

    def count_tokens(self, micro_batches: list[dict[str, Any]]) -> int:
        """Tokens of an optimizer step over all ranks, padding included, of which this rank has `micro_batches`."""
        return sum(batch["input_ids"].numel() for batch in micro_batches) * self.state.dp_size

    def default_callbacks(self) -> list[Callback]:
        """Evaluation comes before those who report it, metrics before the checkpoint that counts on them.

        Ranks other than the first have those that take all ranks.
        """
        if self.state.rank:
            return [EvaluationCallback(), CheckpointCallback(), ExportCallback()]
        logging = self.config.train.logging
        chosen: list[Callback] = [EvaluationCallback(), MetricsCallback()]
        if logging.tensorboard:
            chosen.append(TensorBoardCallback())
        if logging.wandb:
            chosen.append(WandbCallback())
        if logging.progress != "off":
            chosen.append(ProgressCallback(self.console))
        return [*chosen, CheckpointCallback(), LossCurveCallback(), ExportCallback()]

    def train(self) -> TrainResult:
        """Run the steps that are left.

        SIGINT and SIGTERM end the run after the step they arrive in, with a checkpoint; a second one ends it at once.

        Raises:
            TrainingError: a loss or gradient that is not finite, before it reaches the weights; a full disk.
            CheckpointError: a checkpoint cannot be written.
        """
        with self._naming_the_disk():
            return self._train()

    def _train(self) -> TrainResult:
        self._write_description()
        self.model.train()
        record: StepRecord | None = None
        with self._stop.listening(), self._closing_callbacks():
            for callback in self.callbacks:
                callback.on_train_start(self)
            batches = iter(self.batches)
            if self._random_states is not None:
                # Last, since a loader's iterator draws a seed for its workers.
                restore_random_states(self._random_states)
            while not self._is_done() and not self._asked_to_stop():
                record = self._train_step(batches)
                for callback in self.callbacks:
                    callback.on_step_end(self, record)
            completed = self._is_done()
            for callback in self.callbacks:
                callback.on_train_end(self, completed)
        return TrainResult(self.step, completed, record)

    def forward(self, batch: dict[str, Any], num_items_in_batch: int) -> Any:
        """Outputs of the model for this rank's part of one micro batch.

        The loss is the sum over its tokens over `num_items_in_batch`, so losses add up over micro batches and ranks.
        """
        on_device = {
            name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in shard_sequence(batch, self.state).items()
        }
        items = torch.tensor(max(1, num_items_in_batch), device=self.device)
        # A cache would also keep Transformers from seeing that position_ids hold several documents.
        return self.model(**on_device, use_cache=False, num_items_in_batch=items)

    def split_loss(self, outputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cross entropy and the weighted router loss, which upstream has added to `outputs.loss`."""
        aux = getattr(outputs, "aux_loss", None)
        if not isinstance(aux, torch.Tensor):
            return outputs.loss, None
        weighted = self.model.config.router_aux_loss_coef * aux
        return outputs.loss - weighted, weighted

    def save_checkpoint(self) -> Path:
        """Write a checkpoint of this moment; with `train.async_save` it is complete after `self.saver.wait()`."""
        return self.saver.save(
            checkpointing.take_snapshot(
                self.step,
                self.model,
                self.optimizer,
                {"tokens_seen": self.tokens_seen, "data": self.batches.state_dict()},
                kernel_record(self.model),
            )
        )

    def say(self, text: str) -> None:
        """A line for the user."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _train_step(self, batches: Iterator[dict[str, Any]]) -> StepRecord:
        started = time.perf_counter()
        train = self.config.train
        micro_batches = self.next_micro_batches(batches)
        (counted,) = sum_over_ranks(sum(count_targets(batch["labels"]) for batch in micro_batches))
        # The ranks of one sequence have the same rows.
        targets = round(counted) // self.state.sp
        lr = learning_rate(train, self.step + 1, self._foresee(self.step + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), device=self.device)
        aux_loss: torch.Tensor | None = None
        for number, batch in enumerate(micro_batches, 1):
            with gradient_sync(self.model, number == len(micro_batches)):
                outputs = self.forward(batch, targets)
                cross_entropy, router = self.split_loss(outputs)
                total = outputs.loss
                if router is not None:
                    # Each micro batch brings a whole router loss to each of its ranks; the step wants their mean.
                    parts = len(micro_batches) * self.state.world_size
                    share = router / parts
                    total = total if parts == 1 else cross_entropy + share
                    aux_loss = share.detach() + (0 if aux_loss is None else aux_loss)
                total.backward()
            loss += cross_entropy.detach()
        grad_norm = self._clip_gradients().item()
        step_loss, step_aux = sum_over_ranks(loss.item(), 0.0 if aux_loss is None else aux_loss.item())
        self._check_finite(step_loss, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        tokens = self.count_tokens(micro_batches)
        self.tokens_seen += tokens
        return StepRecord(
            step=self.step,
            loss=step_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_s=tokens / (time.perf_counter() - started),
            epoch=getattr(self.batches, "epoch", float("nan")),
            tokens=self.tokens_seen,
            memory_gib=_peak_memory(self.device),
            extra={} if aux_loss is None else {"aux_loss": step_aux},
        )

    def _is_done(self) -> bool:
        return self.max_steps is not None and self.step >= self.max_steps

    def _foresee(self, step: int) -> float:
        """Steps of the run, once those up to `step` have taken their data.

        Where they are not counted, what the share of the data says: the same number whatever is tokenized by then, and
        right at the last step.
        """
        if self.max_steps is None:
            share = self.share_done()
            self.expected_steps = step / min(share, 1.0)
            if share >= 1:
                self.max_steps = step
            return self.expected_steps
        return self.max_steps

    def _asked_to_stop(self) -> bool:
        """Whether a signal reached any rank, so that all stop after the same step.

        Raises:
            CheckpointError: on every rank, when a save in the background failed on any.
        """
        stopped, failed = sum_over_ranks(float(self._stop.received), float(self.saver.failed))
        if failed:
            self.saver.wait()
        return stopped > 0

    def _clip_gradients(self) -> torch.Tensor:
        limit = self.config.train.max_grad_norm or math.inf
        return clip_grad_norm(self.model.parameters(), limit)

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        kept = checkpointing.find_checkpoints(self.output_dir / checkpointing.CHECKPOINTS)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise TrainingError(
            f"step {self.step + 1}: the loss is {loss} and the gradient norm {grad_norm}",
            found=f"{last}; the weights have not been changed by this step",
            hint=(
                "lower train.lr, raise train.warmup_steps, or look for the kernel with opslot "
                "verify; go on with train.resume_from: latest"
            ),
        )

    def _parallelize(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model with the kernels of the checkpoint that the run goes on from, over all ranks."""
        train, fsdp = self.config.train, self.config.train.fsdp
        dtype = _dtype(fsdp.compute_dtype)
        if self.inputs.checkpoint is not None:
            recorded = checkpointing.read_state(self.inputs.checkpoint)[1]
            for line in pin_kernels(model, recorded, dtype, self.device):
                self.say(line)
        options: dict[str, Any] = {
            "activation_checkpointing": train.gradient_checkpointing,
            "ulysses_overlap": train.ulysses_overlap,
        }
        if any(parameter.is_meta for parameter in model.parameters()):
            options["load"] = self._fill
        if self.state.mesh is not None:
            options |= {
                "param_dtype": dtype,
                "reduce_dtype": _dtype(fsdp.reduce_dtype),
                "cpu_offload": fsdp.cpu_offload,
                "reshard_after_forward": fsdp.reshard_after_forward,
                "prefetch": fsdp.prefetch,
                "copy_engine": fsdp.copy_engine,
            }
        model = parallelize(model, self.state, **options)
        require_same_kernels(model)
        return model

    def _fill(self, model: PreTrainedModel) -> None:
        """Give a model on meta memory and values; each rank its parts."""
        device = "cpu" if self.config.train.fsdp.cpu_offload else self.device
        folder = self.config.model.model_path
        if folder:
            load_foundation_weights(model, folder, device)
        else:
            initialize_weights(model, self.config.train.seed, device=device)

    def _restore(self) -> None:
        checkpoint = self.inputs.checkpoint
        if checkpoint is None:
            if self.config.train.resume_from == "latest":
                self.say(f"no checkpoint in {self.output_dir}, so this run starts from its first step")
            return
        state, _ = checkpointing.read_state(checkpoint)
        self.batches.load_state_dict(state["data"])
        checkpointing.load_checkpoint(checkpoint, self.model, self.optimizer)
        if self.state.rank < len(state["random"]):
            self._random_states = state["random"][self.state.rank]
        self.step = state["step"]
        self.tokens_seen = state["tokens_seen"]
        if self.step:
            self._foresee(self.step)
        done = ", which was the last: nothing is left to do" if self._is_done() else ""
        self.say(f"resumed from {checkpoint} after step {self.step}{done}")

    def _write_description(self) -> None:
        if self.state.rank:
            return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        write_text(self.output_dir / "config.yaml", to_yaml(self.config))
        write_text(self.output_dir / "kernels.txt", f"{explain(self.model)}\n")
        write_json(self.output_dir / "kernels.json", kernel_record(self.model))

    @contextlib.contextmanager
    def _naming_the_disk(self) -> Iterator[None]:
        """What goes wrong on a full disk inside, as the user's error."""
        try:
            yield
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            file = f" ({error.filename})" if error.filename else ""
            raise TrainingError(
                f"the run's files cannot be written to {self.output_dir}: {error.strerror}{file}",
                hint="make room there, then run again with train.resume_from: latest; checkpoints are intact",
            ) from error

    @contextlib.contextmanager
    def _closing_callbacks(self) -> Iterator[None]:
        with contextlib.ExitStack() as closing:
            closing.callback(self.saver.close)
            for callback in reversed(self.callbacks):
                closing.callback(callback.close, self)
            yield

    def _say_that_it_stops(self, signal_name: str) -> None:
        self.say(f"{signal_name}: finishing step {self.step + 1}, then saving (once more to stop at once)")


def start_processes(config: RunConfig) -> ParallelState:
    """The process group and meshes of a run; once they exist, their state.

    Raises:
        ConfigError: sizes that do not fit the processes.
    """
    train, fsdp = config.train, config.train.fsdp
    return init_parallel_state(
        dp_replicate=fsdp.replicas,
        sp=train.sp_size,
        ep=train.ep_size,
        device_type=None if config.model.device == "auto" else config.model.device,
        group_of_one=fsdp.compute_dtype is not None or fsdp.cpu_offload,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _peak_memory(device: torch.device) -> float:
    """GiB: of the GPU's allocator and what it shares with other GPUs, else of this process."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated(device) + opened_bytes()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
