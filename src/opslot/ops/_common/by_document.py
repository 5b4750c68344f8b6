"""What depends on the documents of a packed sequence: hooks that find them, and modules that run once for each.

Discovery puts `by_document` around the forward of the modules of a decoder layer in which tokens may see each other
without a kernel that takes cu_seqlens. Each call gets the part of every argument that belongs to the document.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from torch.utils import _pytree as pytree
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from opslot._base.boundaries import BOUNDARIES, boundaries_of, offsets_of
from opslot._base.errors import KernelError
from opslot._base.host_values import host_values
from opslot._base.tensor_cache import TensorCache
from opslot.distributed import gather_outputs, get_parallel_state
from opslot.ops._common.documents import (
    cu_seqlens_in,
    given_arguments,
    may_pack,
    models_around,
    positions_of_documents,
)
from opslot.patchgen.forms import OTHER_STATES
from opslot.slots import walk_slots
from opslot.slots.protocol import takes_earlier_tokens, why_by_document

P = ParamSpec("P")
T = TypeVar("T")

_DOCUMENTS = (*BOUNDARIES, "seq_idx")


def outside_graphs(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a function that reads where documents are, which torch.compile runs between two graphs.

    Traced, it would be compiled again for other numbers and lengths of documents. With `fullgraph=True` torch raises an
    error with the reason.
    """
    return torch.compiler.disable(reason=reason)


@outside_graphs("it runs Transformers' implementation once for each packed document")
def each_document(run: Callable[..., T], cu_seqlens: Tensor, *tokens: Tensor, state: Tensor | None = None) -> list[T]:
    """Results of `run` on the tokens [1, document, ...] of each document that has some.

    Args:
        run: takes the tokens of a document, and its `state` [1, ...] if there are initial states.
        cu_seqlens: boundaries [documents + 1] over the flattened tokens.
        tokens: tensors [B, S, ...].
        state: initial states [documents, ...].
    """
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*([x[None] for x in tensor.flatten(0, 1).split(lengths)] for tensor in tokens), strict=True)
    if state is None:
        return [run(*document) for document in documents if document[0].shape[1]]
    given = zip(documents, state.split(1), strict=True)
    return [run(*document, state=states) for document, states in given if document[0].shape[1]]


def join_documents(outputs: Iterable[Tensor], tokens: Tensor) -> Tensor:
    """Outputs [1, document, ...] of all documents as [B, S, ...], the first two dims being those of `tokens`."""
    return torch.cat([output[0] for output in outputs]).unflatten(0, tokens.shape[:2])


def add_document_hooks(model: nn.Module, op_name: str) -> list[Any]:
    """Let the models around the slots of an op derive cu_seqlens from positions that restart; returns the hooks.

    Not those in which tokens are also mixed elsewhere.

    Masks of attention are made from such positions, which Transformers does not give to other layers.
    """
    around = models_around(model, {slot.path for slot in walk_slots(model) if slot.op_name == op_name})
    return [holder.register_forward_pre_hook(add_documents, with_kwargs=True) for holder in around]


def add_documents(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: the boundaries of the documents whose positions [B, S] restart, as keyword arguments."""
    given = given_arguments(model, args, kwargs)
    positions = positions_of_documents(given)
    if positions is None or any(given.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx")):
        return None
    found = _boundaries_by_position(positions)
    return (args, {**kwargs, **found}) if found else None


@outside_graphs("it reads position_ids: pass cu_seq_lens_q, or no position_ids where no documents are packed")
def _boundaries_by_position(positions: Tensor) -> dict[str, Any]:
    """The keyword arguments for the documents whose positions [B, S] restart; none where each row is one document."""
    if not may_pack(positions):
        return {}
    return boundaries_of(offsets_of(pad(positions.diff(dim=1) != 1, (1, 0), value=True)))


# Cosine and sine.
_gathered: TensorCache[Tensor] = TensorCache(4)


def ranks_of_shards(module: Any) -> ProcessGroup | None:
    """The ranks whose shards of sequences the attention of `module` joins; None where it has global sequences."""
    kernel = AttentionInterface().get(module.config._attn_implementation)
    return get_parallel_state().sp_group if getattr(kernel, "joins_shards", False) else None


def gather_tokens(x: Tensor, ranks: ProcessGroup) -> Tensor:
    """[B, S, ...] of all ranks' shards [B, S / ranks, ...]; with gradient."""
    if x.requires_grad:
        return gather_outputs(x, 1, ranks)
    return _gathered.get(x, lambda: gather_outputs(x, 1, ranks), ranks)


class Document(NamedTuple):
    """Where a document is: tokens `start` to `stop` of a row, and its number among all documents."""

    number: int
    row: int
    start: int
    stop: int


class PerDocument(list[Any]):
    """What a module returned for each document and cannot be concatenated, such as indices of a document's keys.

    Only a module that runs for each document takes it.
    """


def by_document(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module, run once for each packed document where tokens may see each other in the module.

    Documents come as `cu_seq_lens_q` (or `seq_idx`), which `forward` need not take. Caches are not filled. A rank that
    holds shards of sequences computes the outputs of its tokens, with the earlier tokens of their documents. The states
    that cross attention attends to are those of a row, for each document in it.
    """
    parameters = inspect.signature(forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    names = list(parameters)[1:]

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cu_seqlens = cu_seqlens_in(kwargs)
        if not takes_any:
            kwargs = {name: value for name, value in kwargs.items() if name in parameters}
        if kwargs.get("key_value_states") is not None:
            # Cross attention: no token sees another.
            return forward(self, *args, **kwargs)
        earlier = takes_earlier_tokens(self)
        ranks = ranks_of_shards(self) if earlier else None
        if ranks is None and (cu_seqlens is None or why_by_document(self) is None):
            return forward(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if name not in _DOCUMENTS}
        own = functools.partial(forward, self)
        return _run(own, given, cu_seqlens) if ranks is None else _run_on_shards(own, earlier, given, cu_seqlens, ranks)

    return call


@outside_graphs("it runs a module once for each packed document")
def _run(forward: Callable[..., Any], kwargs: dict[str, Any], cu_seqlens: Tensor | None) -> Any:
    batch, length = _tokens(kwargs)
    documents = list(_documents(cu_seqlens, batch, length))
    results = [
        forward(**{name: _parts(document, batch, length, name, x) for name, x in kwargs.items()})
        for document in documents
    ]
    return _join(results, documents)


@outside_graphs("it runs a module once for each packed document")
def _run_on_shards(
    forward: Callable[..., Any],
    with_earlier: Collection[str],
    kwargs: dict[str, Any],
    cu_seqlens: Tensor | None,
    ranks: ProcessGroup,
) -> Any:
    """The results of this rank's shards of sequences, one call for each part of a document or row in them.

    The arguments `with_earlier` are gathered once, and have all tokens of the document up to the end of its part. All
    communication is there, since the ranks have parts of different numbers of documents.
    """
    batch, length = _tokens(kwargs)
    first, total = dist.get_rank(ranks) * length, ranks.size() * length
    whole = {name: pytree.tree_map(lambda x: gather_tokens(x, ranks), kwargs[name]) for name in with_earlier}
    results, parts = [], []
    for document in _documents(cu_seqlens, batch, total):
        start, stop = max(document.start, first), min(document.stop, first + length)
        if start >= stop:
            continue
        parts.append(document._replace(start=start - first, stop=stop - first))
        named = {name: _parts(parts[-1], batch, length, name, x) for name, x in kwargs.items()}
        until = document._replace(stop=stop)
        results.append(forward(**named | {name: _parts(until, batch, total, name, x) for name, x in whole.items()}))
    return _join(results, parts)


def _parts(document: Document, batch: int, length: int, name: str, x: Any) -> Any:
    return pytree.tree_map(functools.partial(_part, document, batch, length, name), x, is_leaf=_is_whole)


def _join(results: list[Any], documents: list[Document]) -> Any:
    leaves, specs = zip(*map(pytree.tree_flatten, results), strict=True)
    joined = [_joined(list(parts), documents) for parts in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(joined, specs[0])


def _tokens(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rows and tokens of a row, of the first tensor of activations [B, S, ...]."""
    tensors = pytree.tree_leaves(kwargs)
    states = next(x for x in tensors if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2)
    return states.shape[0], states.shape[1]


# Reading from a device waits for it.
_read: TensorCache[list[int]] = TensorCache(1)


def _boundaries(cu_seqlens: Tensor) -> list[int]:
    known = host_values(cu_seqlens)
    return known.tolist() if known.device.type == "cpu" else _read.get(known, known.tolist)


def _documents(cu_seqlens: Tensor | None, batch: int, length: int) -> Iterator[Document]:
    # No document crosses rows; any tokens after the last boundary are also a document.
    given = () if cu_seqlens is None else _boundaries(cu_seqlens)
    bounds = sorted({*given, *range(0, batch * length + 1, length)})
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        row = start // length
        yield Document(number, row, start - row * length, stop - row * length)


def _is_whole(x: Any) -> bool:
    return isinstance(x, Cache) or hasattr(x, "of_document")


def _part(document: Document, batch: int, length: int, name: str, x: Any) -> Any:
    """The part of an argument, or of a leaf of it, that belongs to a document."""
    if isinstance(x, PerDocument):
        return x[document.number]
    if isinstance(x, Cache):
        return None
    if hasattr(x, "of_document"):
        return x.of_document(document.stop - document.start)
    if isinstance(x, Tensor) and name in OTHER_STATES:
        return x.narrow(0, document.row, 1) if x.shape[0] == batch > 1 else x
    if not isinstance(x, Tensor) or not (dims := _token_dims(name, x, batch, length)):
        return x
    rows = [dim for dim in range(dims[0]) if x.shape[dim] == batch]
    if name == "alibi" and x.dim() == 3 and x.shape[0] % batch == 0:
        # Bloom's is [rows * heads, 1, tokens].
        x = x.unflatten(0, (batch, -1))[document.row]
    elif batch > 1 and rows:
        x = x.narrow(rows[0], document.row, 1)
    elif batch > 1 and any(size != 1 for size in x.shape[: dims[0]]):
        raise KernelError(
            f"{name} {tuple(x.shape)} of {batch} rows has no dim of rows, so it has no part for each document",
            hint="pack documents in one row (train.micro_batch_size: 1)",
        )
    for dim in dims:
        x = x.narrow(dim, document.start, document.stop - document.start)
    return x


def _token_dims(name: str, x: Tensor, batch: int, length: int) -> list[int]:
    """The dims of an argument that are those of the tokens of a row."""
    last = x.dim() - 1
    if name == "encoder_attention_mask":
        return [last - 1] if last > 1 and x.shape[last - 1] == length else []
    if "mask" in name or "bias" in name:
        return [dim for dim in range(max(last - 1, 1), last + 1) if x.shape[dim] == length]
    if name == "position_ids":
        return [last] if x.shape[last] == length else []
    if x.dim() == 2 and x.shape[0] == x.shape[1] == length != batch:
        # Integers are of pairs of tokens, such as distances; cosines and sines are as wide as there are tokens.
        return [0] if x.is_floating_point() else [0, 1]
    found = [dim for dim in range(1, x.dim()) if x.shape[dim] == length]
    if found == [2, 3] and last == 3:
        return found
    return found[:1] or [dim for dim in range(x.dim()) if dim == 0 and last < 2 and x.shape[0] == length]


def _joined(parts: list[Any], documents: list[Document]) -> Any:
    """One result from those of all documents."""
    if all(part is None for part in parts):
        return None
    dim = _common_dim(parts, documents)
    if dim is None:
        return PerDocument(parts)
    rows = itertools.groupby(zip(documents, parts, strict=True), key=lambda each: each[0].row)
    return torch.cat([torch.cat([part for _, part in row], dim) for _, row in rows])


def _common_dim(parts: list[Any], documents: list[Document]) -> int | None:
    """The dim of the tokens of each part, where the other dims are equal; None where there is none."""
    if not all(isinstance(part, Tensor) and part.dim() == parts[0].dim() for part in parts):
        return None
    sizes = [document.stop - document.start for document in documents]
    for dim in (*range(1, parts[0].dim()), 0):
        others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if len(others) == 1 and [part.shape[dim] for part in parts] == sizes:
            # Scores of queries and keys are those of one document.
            return None if parts[0].dim() == 4 and dim == 2 and parts[0].shape[2] == parts[0].shape[3] else dim
    return None
