"""Stateful dataloaders whose order does not depend on the number of ranks, and whose state is a few integers."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from opslot._base.errors import DataError, list_problems
from opslot._base.host_memory import keep_freed_memory
from opslot._base.logging import get_logger
from opslot.data.balance import balance_micro_batches
from opslot.data.collation import collate, collate_padded, make_sample
from opslot.data.mixture import MixedDataset
from opslot.data.packing import PackedDataset
from opslot.data.step_planning import StepWindow, longest_lookahead, plan_steps

logger = get_logger(__name__)

# Samples whose lengths are read at a time when a step is put together.
_LOOKAHEAD = 64


Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(eq=False, repr=False)
class _Loader:
    """Common part of the loaders. The state is the number of consumed samples over all ranks; samples that workers
    prefetched are not consumed. Follows torch's Stateful protocol, as torchdata's StatefulDataLoader does.

    Attributes:
        rank, world_size: of this process among those that share the data.
        num_workers: processes that assemble batches; 0 assembles them in this process.
        pin_memory: allocate batches in page-locked memory, for copies to a GPU.
        allow_changes: accept the state of other data, see `DataConfig`.
    """

    dataset: PackedDataset | MixedDataset
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    pin_memory: bool = False
    allow_changes: bool = False
    consumed: int = field(default=0, init=False)

    @property
    def epoch(self) -> float:
        """Passes over the data so far, see `PackedDataset.epochs`."""
        return self.dataset.epochs(self.consumed)

    def identity(self) -> dict[str, Any]:
        """Everything that determines which samples the first n are."""
        return self.dataset.identity()

    def state_dict(self) -> dict[str, Any]:
        """The dataloader state: consumed samples, and the identity of the dataset."""
        return {"consumed": self.consumed, "dataset": self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that `state` counts; takes effect at the next `iter`.

        Raises:
            DataError: the state is of another kind of loader; or of other data, unless `allow_changes` is set. Names
                what changed.
        """
        now, then = self.identity(), state.get("dataset")
        if not isinstance(then, dict) or not isinstance(state.get("consumed"), int):
            raise DataError(
                f"the saved dataloader state is not that of a {type(self).__name__}",
                found=f"{', '.join(map(str, state)) or 'nothing'}; expected: consumed, dataset",
                hint="continue with the loader that saved it, or start a new run in another train.output_dir",
            )
        changed = [
            f"{name}: {then.get(name, 'none')} -> {now.get(name, 'none')}"
            for name in (now | then)
            if then.get(name) != now.get(name)
        ]
        if changed and not self.allow_changes:
            raise DataError(
                list_problems(
                    "the run cannot be resumed, because its data has changed since the checkpoint", changed, shown=30
                ),
                hint="restore the files and settings; or set data.allow_changes: true to continue at the same sample "
                "number of the new data; or start a new run from the exported weights (model.model_path)",
            )
        for line in changed:
            logger.warning("the data has changed since the checkpoint (data.allow_changes is set): %s", line)
        self.consumed = state["consumed"]

    def _assembled(self, assemble: Callable[[Any], Any], numbers: Iterator[Any]) -> Iterator[Any]:
        """What `assemble` returns in the workers, for one of `numbers` after the other.

        Raises:
            DataError: of a worker, all of which have then ended.
        """
        loader: DataLoader = DataLoader(
            _Assembled(assemble),
            batch_size=None,
            sampler=numbers,
            collate_fn=_identity,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # Seeds the workers; a draw from torch's default generator would change dropout.
            generator=torch.Generator(),
            worker_init_fn=_start_worker,
        )
        batches: Any = iter(loader)
        try:
            for batch in batches:
                if isinstance(batch, DataError):
                    raise batch
                yield batch
        except (ConnectionError, EOFError) as error:
            if not self.num_workers:
                raise
            # While a worker sent a batch.
            raise _exited(error) from error
        finally:
            if self.num_workers:
                # The traceback of an error holds a reference to `batches`, and workers ignore the SIGTERM of an exit.
                batches._shutdown_workers()
                for worker in batches._workers:
                    # One that is still alive waits for a lock of a worker that was killed.
                    worker.kill()
                    worker.join()


@dataclass(eq=False, repr=False)
class SampleLoader(_Loader):
    """Endless micro batches of a `PackedDataset`.

    The micro batches that the ranks run at the same time are consecutive samples, so the global batch of a step does
    not depend on the number of ranks and the micro batch size. With `step_samples`, packed samples of a step whose
    attention costs about as much run at the same time, since ranks wait for each other.

    Attributes:
        dataset: the samples.
        micro_batch_size: samples per batch of this rank.
        collate_fn: samples to a batch; default `collate`, or `collate_padded` without packing.
        step_samples: samples of an optimizer step over all ranks, at whose ends the state is saved.
    """

    micro_batch_size: int
    _: KW_ONLY
    collate_fn: Collate | None = None
    step_samples: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Before workers are forked, so that they inherit what is known of the previous samples.
        self.dataset.prepare(self.consumed)
        for batch in self._assembled(self._assemble, self.sample_numbers()):
            self.consumed += self.micro_batch_size * self.world_size
            yield batch

    def _assemble(self, numbers: list[int]) -> dict[str, Any]:
        return _collated(self.dataset, numbers, self.collate_fn)

    def sample_numbers(self) -> Iterator[list[int]]:
        """This rank's sample numbers after the consumed ones, batch by batch, without end."""
        first, size, concurrent = self.consumed, self.micro_batch_size, self.micro_batch_size * self.world_size
        is_balanced = self.step_samples is not None and self.world_size > 1 and self.dataset.packing
        # Workers never tokenize: what their samples need is tokenized before they get the numbers.
        while not is_balanced:
            own = range(first + self.rank * size, first + (self.rank + 1) * size)
            self.dataset.prepare(own[-1])
            yield list(own)
            first += concurrent
        assert self.step_samples is not None, "balanced above"
        while True:
            self.dataset.prepare(first + self.step_samples - 1)
            numbers = range(first, first + self.step_samples)
            ranked = sorted(numbers, key=lambda number: (-self.dataset.attended_pairs(number), number))
            for start in range(0, self.step_samples, concurrent):
                rows = np.array(ranked[start : start + concurrent]).reshape(size, self.world_size)
                # Each rank has the most expensive sample of one row and the cheapest one of the next.
                rows[1::2] = rows[1::2, ::-1]
                yield sorted(rows[:, self.rank].tolist())
            first += self.step_samples


def _collated(dataset: PackedDataset | MixedDataset, numbers: list[int], collate_fn: Collate | None) -> dict[str, Any]:
    """Some samples as a batch."""
    collate_fn = collate_fn or (collate if dataset.packing else collate_padded)
    return collate_fn([dataset[number] for number in numbers])


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
    """Raise DataError where a process of a dataloader was killed; torch raises that at any point of the main thread."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise _exited(error.__cause__ or error) from error


def _exited(error: BaseException) -> DataError:
    return DataError(
        "a process of the dataloader exited",
        found=" ".join(str(error).split()) or type(error).__name__,
        hint="if the machine was out of memory, lower data.num_workers, or data.max_pixels and data.max_frames; "
        "continue with train.checkpoint.resume_from: latest",
    )


def _start_worker(_worker: int) -> None:
    keep_freed_memory()
    # Those that stop a run often reach all of its processes; workers are needed until the step is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(eq=False, repr=False)
class TokenLoader(_Loader):
    """Endless optimizer steps of whole documents; each step is a list of this rank's micro batches.

    `plan_steps` assigns the next documents to several steps of at most `step_tokens` tokens, so that each can be shared
    evenly (with a dataset that is not shuffled, a step takes the next documents). It does not depend on the number of
    ranks and the size of micro batches. `balance_micro_batches` distributes a step: no padding, at most `max_tokens`
    tokens in a micro batch, the same number of micro batches on each rank, balanced by estimated FLOPs.

    The state has the documents that were planned together too, and how many of their steps were taken.

    Attributes:
        dataset: of one document per sample (`packing=False`).
        step_tokens: maximum tokens in an optimizer step, over all ranks.
        max_tokens: maximum tokens in a micro batch of this rank, at least `dataset.max_seq_len`.
        attention_cost: a document of n tokens costs n + attention_cost * n**2, and its encoders.
        encoder_cost: a document's `MediaDocument.cost` counts so many times.
        collate_fn: a packed sample to a batch; default `collate`.
        step_size: tokens of the last step, over all ranks.
    """

    step_tokens: int
    max_tokens: int
    _: KW_ONLY
    attention_cost: float = 0.0
    encoder_cost: float = 1.0
    collate_fn: Collate | None = None
    step_size: int = field(default=0, init=False)
    _window: StepWindow | None = field(default=None, init=False)
    _steps_done: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for step, micro_batches in self._assembled(self._assemble, self._own_documents()):
            self.consumed += len(step.numbers)
            self.step_size = int(step.lengths.sum())
            self._window, self._steps_done = step.window, step.steps_done
            yield micro_batches

    def _assemble(self, located: tuple[StepDocuments, list[list[int]]]) -> tuple[StepDocuments, list[dict[str, Any]]]:
        step, own = located
        return step, [_pack(self.dataset, numbers, self.collate_fn) for numbers in own]

    def _own_documents(self) -> Iterator[tuple[StepDocuments, list[list[int]]]]:
        """Each step, and the sample numbers of this rank's micro batches in it."""
        for step in self.step_documents():
            by_rank = balance_micro_batches(
                step.lengths, step.costs, self.world_size, self.max_tokens, planned=step.bins
            )
            yield step, [sorted(step.numbers[indices].tolist()) for indices in by_rank[self.rank]]

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "data.max_tokens_per_batch": "set"}

    def state_dict(self) -> dict[str, Any]:
        window = None if self._window is None else {**self._window._asdict(), "steps_done": self._steps_done}
        return {**super().state_dict(), "window": window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Of a state without a window, each step had the documents that follow those of the last one.
        window, done = state.get("window"), 0
        if window is not None:
            try:
                done = int(window["steps_done"])
                window = StepWindow(**{name: value for name, value in window.items() if name != "steps_done"})
                usable = min(window) >= 0 and window.steps > 0 and window.step_tokens > 0 and done >= 0
            except (TypeError, ValueError, AttributeError, KeyError):
                usable = False
            if not usable:
                raise DataError(
                    "the saved dataloader state has no valid window of planned steps",
                    found=repr(state["window"])[:200],
                    hint="continue from an earlier checkpoint (train.checkpoint.resume_from)",
                )
        super().load_state_dict(state)
        self._window, self._steps_done = window, done

    def steps(self, epochs: float) -> int:
        """Optimizer steps for `epochs` passes over the documents; the last step may exceed them."""
        total = max(1, round(self.dataset.samples_per_epoch * epochs))
        first = count = 0
        window = None
        while first < total:
            window = self._next_window(first, window)
            planned = [sum(map(len, step)) for step in self._plan(window).steps]
            ends = first + np.cumsum(planned)
            count += min(len(planned), int(np.searchsorted(ends, total)) + 1)
            first = int(ends[-1])
        return count

    def step_documents(self) -> Iterator[StepDocuments]:
        """The documents of each step after the consumed ones, without end."""
        window, done, first = self._window, self._steps_done, self.consumed
        while True:
            if window is not None:
                plan = self._plan(window)
                for number in range(done, len(plan.steps)):
                    own = np.concatenate(plan.steps[number])
                    ends = np.cumsum([len(members) for members in plan.steps[number]])
                    bins = [part.tolist() for part in np.split(np.arange(len(own)), ends[:-1])]
                    first += len(own)
                    yield StepDocuments(
                        window.first + own, plan.lengths[own], plan.costs[own], bins, window, number + 1
                    )
            window, done = self._next_window(first, window), 0

    def _next_window(self, first: int, last: StepWindow | None) -> StepWindow:
        """The documents that are planned together after those of `last`, which grow so that training starts early."""
        size, dataset = self.dataset.max_seq_len, self.dataset
        longest = longest_lookahead(self.step_tokens, size) if dataset.shuffle else 1
        lookahead = 1 if last is None else min(2 * last.lookahead, longest)
        steps = lookahead
        if steps > 1:
            lengths = self._lengths(first, steps * self.step_tokens)
            end = dataset.epoch_end(first)
            if end is not None and end <= first + len(lengths):
                # What is left of the epoch is in a step of its own, with the beginning of the next one.
                steps = max(1, int(lengths[: end - first].sum()) // self.step_tokens)
        return StepWindow(first, steps, lookahead, self.step_tokens, self.attention_cost, self.encoder_cost)

    def _plan(self, window: StepWindow) -> _Plan:
        size = self.dataset.max_seq_len
        lengths = self._lengths(window.first, window.steps * window.step_tokens)
        encoder_costs = self.dataset.costs(window.first, window.first + len(lengths)) * window.encoder_cost
        costs = lengths + window.attention_cost * lengths.astype(np.float64) ** 2 + encoder_costs
        return _Plan(lengths, costs, plan_steps(lengths, costs, window, size, self.dataset.seed))

    def _lengths(self, first: int, tokens: int) -> np.ndarray:
        """Tokens of each of the next documents, up to `tokens` of them, int64; at least one document."""
        lengths: list[np.ndarray] = []
        known = count = 0
        while known <= tokens:
            lengths.append(self.dataset.token_counts(first + count, first + count + _LOOKAHEAD))
            known += int(lengths[-1].sum())
            count += _LOOKAHEAD
        ends = np.concatenate(lengths).cumsum()
        taken = max(1, int(np.searchsorted(ends, tokens, side="right")))
        return np.diff(ends[:taken], prepend=0)


class _Plan(NamedTuple):
    """Documents of a window: tokens, costs, and the indices of each step's, bin by bin."""

    lengths: np.ndarray
    costs: np.ndarray
    steps: list[list[list[int]]]


class StepDocuments(NamedTuple):
    """Documents of an optimizer step over all ranks.

    Attributes:
        numbers: of their samples, int64 [documents].
        lengths, costs: tokens of each, and its estimated FLOPs in tokens.
        bins: indices into these, in sets of similar cost.
        window, steps_done: what has been taken with this step, for the dataloader state.
    """

    numbers: np.ndarray
    lengths: np.ndarray
    costs: np.ndarray
    bins: list[list[int]]
    window: StepWindow
    steps_done: int


class _Assembled(Dataset):
    """What a function returns for the numbers of samples, or its DataError, to which torch would add tracebacks."""

    def __init__(self, assemble: Callable[[Any], Any]) -> None:
        self.assemble = assemble

    def __getitem__(self, numbers: Any) -> Any:
        try:
            return self.assemble(numbers)
        except DataError as error:
            return error


# A rank without a document runs a batch without targets, since FSDP needs every rank for its collectives.
_IDLE_TOKENS = 8


def _pack(dataset: PackedDataset | MixedDataset, numbers: list[int], collate_fn: Collate | None) -> dict[str, Any]:
    """The documents of some samples as a batch [1, tokens]."""
    documents = [tokens for number in numbers for tokens in dataset.tokens(number)]
    size = sum(map(len, documents)) or _IDLE_TOKENS
    extras = [extra for number in numbers for extra in dataset.extras(number)]
    return (collate_fn or collate)([make_sample(documents, size, dataset.pad_token_id, extras)])


def _identity(value: Any) -> Any:
    return value


@dataclass(eq=False, repr=False)
class EvaluationLoader(_Loader):
    """Every sample of one epoch once, in batches of at most `micro_batch_size` samples; this rank's of them.

    With `max_tokens`, whole documents are packed into batches [1, at most max_tokens], without padding.

    Attributes:
        dataset: the samples; with `max_tokens`, of one document each (`packing=False`).
        collate_fn: samples to a batch; default `collate`, or `collate_padded` for samples that are padded.
    """

    dataset: PackedDataset
    micro_batch_size: int
    _: KW_ONLY
    max_tokens: int | None = None
    collate_fn: Collate | None = None

    def __iter__(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Batches, and whether each counts: FSDP needs every rank for its collectives, so a rank without a batch runs
        another rank's."""
        return self._assembled(self._assemble, self._own_batches())

    def _own_batches(self) -> Iterator[tuple[list[int], bool]]:
        batches = self._batches()
        while concurrent := list(itertools.islice(batches, self.world_size)):
            own = min(self.rank, len(concurrent) - 1)
            # Workers never tokenize.
            self.dataset.prepare(concurrent[own][-1])
            yield concurrent[own], own == self.rank

    def _batches(self) -> Iterator[list[int]]:
        """The sample numbers of each batch."""
        count = self.dataset.samples_per_epoch
        if self.max_tokens is None:
            for first in range(0, count, self.micro_batch_size):
                yield [*range(first, min(first + self.micro_batch_size, count))]
            return
        numbers: list[int] = []
        size = 0
        for number, length in enumerate(self.dataset.token_counts(0, count).tolist()):
            if size + length > self.max_tokens:
                yield numbers
                numbers, size = [], 0
            numbers.append(number)
            size += length
        yield numbers

    def _assemble(self, given: tuple[list[int], bool]) -> tuple[dict[str, Any], bool]:
        numbers, counts = given
        if self.max_tokens is not None:
            return _pack(self.dataset, numbers, self.collate_fn), counts
        return _collated(self.dataset, numbers, self.collate_fn), counts
