"""A faster Triton interpreter: work that it repeats at every call, most of a kernel's time on a CPU, is cached."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from types import FunctionType, ModuleType
from typing import Any

_NUMBERS = {"fp32": "float32", "fp64": "float64", "int32": "int32", "int64": "int64"}


def speed_up() -> None:
    """Patch the interpreter of this process; kernels compute the same values as before.

    - At every call of a function, the interpreter searches the language for builtins and replaces them, even where one
      kernel calls another and they are already replaced.
    - It builds a table of all dtypes for each lookup of one.
    - It repeats integer arithmetic to detect overflow, and ignores the result unless in debug mode.
    - It computes the attributes of a type and of a tensor's shape at every operation, and broadcasts operands of equal
      shapes.
    - It converts sign, exponent and significand of bfloat16 numbers to those of float32 and back one by one, and
      subnormal ones wrongly; they differ in the last 16 bits alone.
    - It derives the type of a result from those of the operands, also where both are equal or one is a Python number.
    - It broadcasts operands and copies numbers to blocks, both of which NumPy does within an operation.
    - It compares the size of elements with that of their type at every operation.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    # Triton 3.6 has other internals; with it the tests compile kernels and interpret none.
    if not hasattr(type(interpreter.interpreter_semantic), "_cast_to_computation_type"):
        return
    if getattr(interpreter, "_opslot_fast", False):
        return
    interpreter._opslot_fast = True
    builder = interpreter.interpreter_builder
    _replace_builtins_once(interpreter)
    operators = {} if builder.options.debug else _operators(interpreter)
    interpreter._patch_attr = _patcher(interpreter.interpreter_semantic, interpreter.tl.core.tensor, operators)
    interpreter._get_np_dtype = _cached(interpreter._get_np_dtype, interpreter.tl)
    _compute_types_once(interpreter.tl)
    _broadcast_quickly(interpreter)
    _keep_equal_types(interpreter)
    _create_quickly(interpreter.TensorHandle)
    _cast_quickly(interpreter)
    _unwrap_quickly(interpreter.tl)
    interpreter._convert_float = _of_bfloat16(interpreter)
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _replace_builtins_once(interpreter: ModuleType) -> None:
    is_builtin = interpreter.tl.core.is_builtin
    patch_lang = interpreter._patch_lang

    @functools.cache
    def names(language: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(language) if is_builtin(member)]

    @functools.cache
    def languages(function: FunctionType) -> list[ModuleType]:
        known = (interpreter.tl, interpreter.tl.core)
        return [value for value in function.__globals__.values() if any(value is language for language in known)]

    def patch_builtin(language: Any, *rest: Any) -> None:
        for name in names(language):
            if is_builtin(member := getattr(language, name)):
                interpreter._patch_attr(language, name, member, *rest)

    def patch_once(function: FunctionType) -> Any:
        if any(is_builtin(language.load) for language in languages(function)):
            return patch_lang(function)
        # The caller that replaced them restores them.
        return interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_once


def _cached(get_np_dtype: Any, tl: ModuleType) -> Any:
    scalars = functools.cache(get_np_dtype)

    def cached(language_type: Any) -> Any:
        if isinstance(language_type, tl.block_type):
            language_type = language_type.element_ty
        # Pointers have no hash.
        return get_np_dtype(language_type) if isinstance(language_type, tl.pointer_type) else scalars(language_type)

    return cached


def _patcher(semantic: Any, tensor: type, operators: dict[str, Any]) -> Any:
    """A function that replaces a builtin by the function that it wraps, which gets the interpreter's semantic."""

    @functools.cache
    def replacement(language: Any, name: str, member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return operators[name](call) if language is tensor and name in operators else call

    def patch(language: Any, name: str, member: Any, _builder: Any, *scope: Any) -> None:
        call = replacement(language, name, member)
        if scope:
            scope[0].set_attr(language, name, call)
        else:
            setattr(language, name, call)

    return patch


def _compute_types_once(tl: ModuleType) -> None:
    """Copy the attributes of equal block types, and of the shape of a tensor of the same type."""
    block_type, tensor, constexpr = tl.block_type, tl.core.tensor, tl.constexpr
    init_block, init_tensor, equal = block_type.__init__, tensor.__init__, tl.dtype.__eq__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def shape_of(kind: Any) -> dict[str, Any]:
        made = tensor.__new__(tensor)
        init_tensor(made, None, kind)
        return {name: value for name, value in vars(made).items() if name not in ("handle", "type")}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(shape, constexpr):
            init_block(self, element_ty, shape)
            return
        key = (element_ty.name, *[size.value if isinstance(size, constexpr) else size for size in shape])
        known = blocks.get(key)
        if known is None:
            init_block(self, element_ty, shape)
            self._sizes = key[1:]
            self.shape = shapes.setdefault(self._sizes, self.shape)
            self._shape_of_tensor = shape_of(self)
            known = blocks[key] = dict(vars(self))
        self.__dict__.update(known)

    def value(self: Any, handle: Any, kind: Any) -> None:
        shape = kind.__dict__.get("_shape_of_tensor")
        if shape is None:
            shape = kind._shape_of_tensor = shape_of(kind)
        self.__dict__.update(shape)
        self.handle = handle
        self.type = kind

    block_type.__init__ = block
    tensor.__init__ = value
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _broadcast_quickly(interpreter: ModuleType) -> None:
    import numpy as np

    tl, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    tensor, handle_type, block_type = tl.core.tensor, interpreter.TensorHandle, tl.block_type
    broadcast, cast = semantic.broadcast_impl_value, semantic._cast_to_computation_type

    def splat(self: Any, value: Any, block: Any) -> Any:
        handle = value.handle
        if isinstance(handle.dtype, block_type):
            return None
        data = np.full(block.shape.values, handle.data, dtype=interpreter._get_np_dtype(handle.dtype))
        return tensor(handle_type(data, handle.dtype.scalar), block.with_element_ty(value.dtype))

    def expanded(value: Any, sizes: tuple[int, ...]) -> Any:
        if value.type._sizes == sizes:
            return value
        data = np.broadcast_to(value.handle.data, sizes)
        return tensor(handle_type(data, value.handle.dtype.scalar), block_type(value.dtype, list(sizes)))

    def broadcast_values(self: Any, left: Any, right: Any) -> Any:
        first, second = left.type.is_block(), right.type.is_block()
        if (not first and not second) or (first and second and left.type.shape is right.type.shape):
            return left, right
        if first and second:
            sizes = _broadcast(left.type._sizes, right.type._sizes)
            if sizes is not None:
                return expanded(left, sizes), expanded(right, sizes)
        elif first and (made := splat(self, right, left.type)) is not None:
            return left, made
        elif second and (made := splat(self, left, right.type)) is not None:
            return made, right
        return broadcast(self, left, right)

    def cast_to_computation_type(self: Any, value: Any, dtype: Any) -> Any:
        return value if isinstance(value, tensor) and value.dtype is dtype else cast(self, value, dtype)

    semantic.broadcast_impl_value = broadcast_values
    semantic._cast_to_computation_type = cast_to_computation_type


def _keep_equal_types(interpreter: ModuleType) -> None:
    tl, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    tensor, check = tl.core.tensor, semantic.binary_op_type_checking_impl
    floats = {"fp16", "bf16", "fp32", "fp64"}
    # Of these, quotients and remainders have the same type too.
    kept = {"fp32", "fp64", "int32", "int64"}

    def checked(
        self: Any,
        left: Any,
        right: Any,
        left_pointer: bool = False,
        right_pointer: bool = False,
        arithmetic: bool = True,
        division: bool = False,
    ) -> Any:
        if arithmetic and type(left) is tensor:
            name = left.dtype.name
            if left_pointer and left.dtype.is_ptr():
                if type(right) is tensor and right.dtype.name in kept and not right.dtype.is_floating():
                    return self.broadcast_impl_value(left, right)
            elif name in kept or (name in floats and not division):
                if type(right) is tensor:
                    if right.dtype.name == name:
                        return self.broadcast_impl_value(left, right)
                elif type(right) is int or (type(right) is float and name in floats):
                    number = self._cast_to_computation_type(right, left.dtype)
                    return self.broadcast_impl_value(left, number)
        return check(self, left, right, left_pointer, right_pointer, arithmetic, division)

    semantic.binary_op_type_checking_impl = checked


def _create_quickly(handle_type: Any) -> None:
    def create(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr

    handle_type.__init__ = create


def _cast_quickly(interpreter: ModuleType) -> None:
    semantic, tensor = type(interpreter.interpreter_semantic), interpreter.tl.core.tensor
    cast = semantic.cast
    others = ("bf16", "fp16", "fp64", "int32", "int64")
    pairs = {(name, "fp32") for name in others} | {("fp32", name) for name in others[:3]} | {("int32", "int64")}

    def quick_cast(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        if rounding is None and type(value) is tensor:
            source, target = value.dtype, kind.scalar
            if source is target:
                return value
            if (source.name, target.name) in pairs:
                result = value.type.with_element_ty(target)
                return tensor(self.builder.cast_impl(value.handle, result), result)
        return cast(self, value, kind, rounding)

    semantic.cast = quick_cast


@functools.cache
def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    """The sizes of two blocks of equal rank after broadcasting; None if Triton does not broadcast them."""
    if len(first) != len(second) or any(a != b and 1 not in (a, b) for a, b in zip(first, second)):
        return None
    return tuple(map(max, first, second))


def _operators(interpreter: ModuleType) -> dict[str, Any]:
    """By the name of a method of tensors, a function that takes what it was and returns a quicker one."""
    import numpy as np

    tl = interpreter.tl
    tensor, block_type, constexpr, handle_type = tl.core.tensor, tl.block_type, tl.constexpr, interpreter.TensorHandle
    numbers = {name: np.dtype(kind) for name, kind in _NUMBERS.items()}
    bools = {"int1": np.dtype(bool)}
    # Larger Python numbers may be infinite as float32, or no int32.
    limits = {"fp32": 3e38, "fp64": 3e38, "int32": 2**31 - 1, "int64": 2**31 - 1}

    def type_of(left: Any, right: Any) -> Any:
        """The type of a result, with the elements of one of both; None if they cannot be broadcast."""
        if type(left) is not block_type:
            return right if type(right) is block_type else left
        if type(right) is not block_type or left.shape is right.shape:
            return left
        sizes = _broadcast(left._sizes, right._sizes)
        return None if sizes is None else block_type(left.scalar, list(sizes))

    def quick(ufunc: Any, dtypes: dict[str, Any], compares: bool = False, swapped: bool = False) -> Any:
        def replacing(slow: Any) -> Any:
            def operate(self: Any, other: Any) -> Any:
                kind = type(other)
                if kind is constexpr:
                    other = other.value
                    kind = type(other)
                name = self.dtype.name
                dtype = dtypes.get(name)
                data = self.handle.data
                if dtype is None or data.dtype is not dtype:
                    return slow(self, other)
                if kind is tensor:
                    right = other.handle.data
                    source = other.dtype.name
                    # An int32 becomes an int64.
                    known = source == name or (name == "int64" and source == "int32")
                    if swapped or not known or right.dtype is not dtypes[source]:
                        return slow(self, other)
                    result = type_of(self.type, other.type)
                    if result is None:
                        return slow(self, other)
                    if source != name:
                        result = result.with_element_ty(self.dtype)
                elif (kind is int or (kind is float and dtype.kind == "f")) and dtype is not bools["int1"]:
                    if not -limits[name] <= other <= limits[name]:
                        return slow(self, other)
                    right = dtype.type(other)
                    result = self.type
                else:
                    return slow(self, other)
                values = ufunc(right, data) if swapped else ufunc(data, right)
                if compares:
                    result = result.with_element_ty(tl.int1)
                return tensor(handle_type(values, self.handle.dtype.scalar), result)

            return operate

        return replacing

    def added(slow: Any) -> Any:
        add = quick(np.add, numbers)(slow)

        def operate(self: Any, other: Any) -> Any:
            pointer = self.dtype
            if type(pointer) is not tl.pointer_type or type(other) is not tensor:
                return add(self, other)
            kind = self.type
            result = kind if kind is not pointer else other.type.with_element_ty(pointer)
            if kind is not pointer and type(other.type) is block_type and other.type.shape is not kind.shape:
                sizes = _broadcast(kind._sizes, other.type._sizes)
                result = None if sizes is None else block_type(pointer, list(sizes))
            if result is None or other.dtype.name not in ("int32", "int64"):
                return slow(self, other)
            offsets = other.handle.data.astype(np.uint64)
            size = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
            return tensor(handle_type(self.handle.data + size * offsets, self.handle.dtype.scalar), result)

        return operate

    def indexed(slow: Any) -> Any:
        def index(self: Any, slices: Any) -> Any:
            kind = self.type
            if type(kind) is not block_type:
                return slow(self, slices)
            added = _added_dimension(slices.values if isinstance(slices, tl.tuple) else slices, len(kind._sizes))
            if added is None:
                return slow(self, slices)
            sizes = list(kind._sizes)
            sizes.insert(added, 1)
            data = self.handle.data.reshape(sizes)
            return tensor(handle_type(data, self.handle.dtype.scalar), block_type(kind.scalar, sizes))

        return index

    compared = {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
    }
    return {
        "__add__": added,
        "__sub__": quick(np.subtract, numbers),
        "__mul__": quick(np.multiply, numbers),
        "__radd__": quick(np.add, numbers, swapped=True),
        "__rsub__": quick(np.subtract, numbers, swapped=True),
        "__rmul__": quick(np.multiply, numbers, swapped=True),
        "__and__": quick(np.bitwise_and, bools),
        "__or__": quick(np.bitwise_or, bools),
        **{f"__{name}__": quick(ufunc, numbers, compares=True) for name, ufunc in compared.items()},
        "__getitem__": indexed,
    }


def _added_dimension(slices: Any, rank: int) -> int | None:
    """Which dimension `x[:, None]` or the like adds; None for another index."""
    if not isinstance(slices, (list, tuple)):
        return None
    added = [i for i, item in enumerate(slices) if item is None]
    plain = all(item is None or (type(item) is slice and item == slice(None)) for item in slices)
    return added[0] if plain and len(added) == 1 and len(slices) <= rank + 1 else None


def _unwrap_quickly(tl: ModuleType) -> None:
    constexpr, unwrap = tl.constexpr, tl.core._unwrap_if_constexpr
    unwrapped_types = (constexpr, list, tuple, tl.tuple)
    others: set[type] = set()

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in others:
            return value
        if kind is constexpr:
            return value.value
        if issubclass(kind, unwrapped_types):
            return unwrap(value)
        others.add(kind)
        return value

    tl.core._unwrap_if_constexpr = unwrapped


def _of_bfloat16(interpreter: ModuleType) -> Any:
    """The conversion of floats, by shifts between bfloat16 and float32, whose exponents are the same."""
    import numpy as np

    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) == ("bf16", "fp32"):
            return np.left_shift(values.view(np.uint16), 16, dtype=np.uint32)
        if (source.name, target.name, rounding) == ("fp32", "bf16", None):
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return convert(values, source, target, rounding)

    return converted
