"""FlashAttention 4's compiled kernels, launched again without the Python of the library.

Each call of the library spends a few tenths of a millisecond on the host before it launches kernels that it compiled
earlier, which bounds training of small models. The first call with given shapes, strides and options runs the library,
and what it launches is recorded. Where that has the form below, later calls with the same shapes, strides and options
launch it directly; any other form, as of another release, stays with the library.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Arguments of a kernel by position: the name of a tensor, or one of these for what is none. Tensors in `_BUFFERS` are
# allocated by the library.
_SCALAR = "scalar"
_NONE = "none"
_BUFFERS = {"dpsum", "lse_log2", "dq_sum", "dk_sum", "dv_sum"}
# The kernel adds to these; it writes all of the others.
_ZEROED = {"dk_sum", "dv_sum"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BOUNDARIES = "cu_seqlens_q cu_seqlens_k"
_FORWARD = (_names(f"q k v out lse scalar {_BOUNDARIES} none none none scalar scalar sinks none none"),)
_BEFORE = _names("out dout dpsum lse lse_log2 dq_sum cu_seqlens_q none none")
_AFTER = _names("dq_sum dq scalar cu_seqlens_q none")


def _gradients(dk: str, dv: str) -> tuple[str, ...]:
    end = "none none scalar scalar none none none none none"
    return _names(f"q k v dout lse_log2 dpsum dq_sum {dk} {dv} scalar {_BOUNDARIES} {end}")


_BACKWARD = (
    (_BEFORE, _gradients("dk", "dv"), _AFTER),
    # Several query heads add to the gradients of one key/value head.
    (
        _BEFORE,
        _gradients("dk_sum", "dv_sum"),
        _AFTER,
        _names("dk_sum dk scalar cu_seqlens_k none"),
        _names("dv_sum dv scalar cu_seqlens_k none"),
    ),
)
# Functions of the library that keep compiled kernels in an attribute of this name.
_CACHE = "compile_cache"
_MOST = 1024
# The library rounds lengths up to blocks of at most this, and compiles other kernels for a single block.
_BLOCK = 256


class _Recorder:
    """Stands in for a cache of compiled kernels while one thread records what it launches."""

    def __init__(self, cache: Any, launches: list[tuple[Any, tuple[Any, ...]]]) -> None:
        self.cache, self.launches, self.thread = cache, launches, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.cache

    def __setitem__(self, key: Hashable, kernel: Any) -> None:
        self.cache[key] = kernel

    def __getitem__(self, key: Hashable) -> Any:
        kernel = self.cache[key]
        if threading.get_ident() != self.thread:
            return kernel

        def launch(*args: Any) -> Any:
            self.launches.append((kernel, args))
            return kernel(*args)

        return launch


@dataclass(frozen=True)
class _Buffer:
    """A tensor that the library allocates."""

    shape: torch.Size
    dtype: torch.dtype
    zeroed: bool

    def allocate(self, device: torch.device) -> Tensor:
        make = torch.zeros if self.zeroed else torch.empty
        return make(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Recorded:
    """Kernels with their arguments: a str names a tensor, anything else is passed as it is."""

    launches: tuple[tuple[Any, tuple[Any, ...]], ...]
    buffers: Mapping[str, _Buffer]

    def run(self, tensors: dict[str, Tensor | None]) -> None:
        device = tensors["q"].device  # type: ignore[union-attr]
        for name, buffer in self.buffers.items():
            tensors[name] = buffer.allocate(device)
        for kernel, arguments in self.launches:
            kernel(*[tensors[argument] if type(argument) is str else argument for argument in arguments])


class Replay:
    """Calls of one direction, forward or backward.

    Args:
        functions: of the library, with a cache each.
        forms: what it may launch; each kernel's arguments by position.
    """

    def __init__(self, functions: Sequence[Any], forms: Sequence[tuple[tuple[str, ...], ...]]) -> None:
        self._functions, self._forms = functions, forms
        self._lock = threading.Lock()
        self._recorded: OrderedDict[Hashable, _Recorded | None] = OrderedDict()
        self._works = all(hasattr(function, _CACHE) for function in functions)

    @classmethod
    def forward(cls, interface: Any) -> Replay:
        """Of `_flash_attn_fwd` in the library's `interface`."""
        return cls((interface._flash_attn_fwd,), (_FORWARD,))

    @classmethod
    def backward(cls, interface: Any) -> Replay:
        """Of `_flash_attn_bwd` in the library's `interface`."""
        names = ("_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
        return cls([getattr(interface, name, None) for name in names], _BACKWARD)

    def call(
        self, key: Hashable, inputs: Mapping[str, Tensor | None], outputs: Mapping[str, Tensor], run: Callable[[], Any]
    ) -> None:
        """Fill `outputs`: by launching what was recorded for `key`, else by `run()`, which is recorded."""
        if key in self._recorded:
            recorded = self._recorded[key]
            if recorded is None:
                run()
            else:
                recorded.run({**inputs, **outputs})
        elif self._works and self._lock.acquire(blocking=False):
            try:
                self._recorded[key] = self._record(inputs, outputs, run)
                if len(self._recorded) > _MOST:
                    self._recorded.popitem(last=False)
            finally:
                self._lock.release()
        else:
            run()

    def _record(
        self, inputs: Mapping[str, Tensor | None], outputs: Mapping[str, Tensor], run: Callable[[], Any]
    ) -> _Recorded | None:
        launches: list[tuple[Any, tuple[Any, ...]]] = []
        with self._recording(launches):
            run()
        found = (_match(form, launches, {**inputs, **outputs}) for form in self._forms)
        return next((recorded for recorded in found if recorded is not None), None)

    @contextmanager
    def _recording(self, launches: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[None]:
        with ExitStack() as after:
            for function in self._functions:
                after.callback(setattr, function, _CACHE, getattr(function, _CACHE))
                setattr(function, _CACHE, _Recorder(getattr(function, _CACHE), launches))
            yield


def _match(
    form: tuple[tuple[str, ...], ...],
    launches: Sequence[tuple[Any, tuple[Any, ...]]],
    tensors: Mapping[str, Tensor | None],
) -> _Recorded | None:
    """What was launched, if its arguments are those of `form`, and None otherwise."""
    if [len(args) for _, args in launches] != [len(names) for names in form]:
        return None
    buffers: dict[str, Tensor] = {}
    matched = []
    for (kernel, args), names in zip(launches, form, strict=True):
        arguments: list[Any] = []
        for name, arg in zip(names, args, strict=True):
            if name in (_SCALAR, _NONE):
                if isinstance(arg, Tensor) or (name == _NONE and arg is not None):
                    return None
                arguments.append(arg)
                continue
            wanted = buffers.setdefault(name, arg) if name in _BUFFERS else tensors.get(name)
            if not _is_same(arg, wanted):
                return None
            arguments.append(None if arg is None else name)
        matched.append((kernel, tuple(arguments)))
    allocated = {name: _Buffer(x.shape, x.dtype, name in _ZEROED) for name, x in buffers.items()}
    return _Recorded(tuple(matched), allocated)


def _is_same(arg: Any, wanted: Tensor | None) -> bool:
    if not isinstance(arg, Tensor) or wanted is None:
        return arg is None and wanted is None
    return (
        arg.data_ptr() == wanted.data_ptr()
        and arg.shape == wanted.shape
        and arg.stride() == wanted.stride()
        and arg.dtype == wanted.dtype
    )


def key_of(tensors: Mapping[str, Tensor | None], longest: Sequence[int | None], options: tuple[Any, ...]) -> Hashable:
    """What decides what the library launches: the layout of the tensors, lengths in blocks, and options."""
    layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors.values()]
    lengths = [length if length is None or length <= _BLOCK else _BLOCK + 1 for length in longest]
    return (*layouts, *lengths, options)
