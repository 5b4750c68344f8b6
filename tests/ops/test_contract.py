"""Kernels whose arguments are read by `takes`."""

import inspect
import pickle
from typing import NamedTuple

import pytest

from opslot.ops._common.contract import takes, variants_of


class Sum(NamedTuple):
    """The terms of a sum."""

    left: int
    right: int = 2


@takes(Sum)
def add(given: Sum) -> int:
    return given.left + given.right


def test_kernel_has_the_signature_of_its_arguments():
    assert add(1) == 3
    assert add(1, right=4) == 5
    assert [(p.name, p.default) for p in inspect.signature(add).parameters.values()] == [
        ("left", inspect.Parameter.empty),
        ("right", 2),
    ]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'left'"):
        add()


def test_kernel_is_a_function_of_its_module():
    assert (add.__name__, add.__doc__) == ("add", "The terms of a sum.")
    from opslot.ops.mamba_chunk_scan.op import reference

    assert pickle.loads(pickle.dumps(reference)) is reference


def left_only(left: int) -> Sum:
    """One term."""
    return Sum(left, 0)


(left_only_kernel,) = variants_of(lambda given: given.left + given.right, [left_only], __name__)


def test_kernels_of_variants_have_their_names():
    assert left_only_kernel(3) == 3
    assert (left_only_kernel.__module__, left_only_kernel.__qualname__) == (__name__, "left_only")
    assert (left_only_kernel.__doc__, [*inspect.signature(left_only_kernel).parameters]) == ("One term.", ["left"])
    from opslot.ops.moe_experts.op import split

    assert pickle.loads(pickle.dumps(split)) is split
