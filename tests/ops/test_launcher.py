"""The launcher's direct path, with a kernel that records its launches instead of running."""

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base import kernel_launch
from opslot._base.errors import KernelError
from opslot._base.kernel_launch import KernelLauncher


class Kernel:
    """A fake `triton.jit` function; `compiled` is the fake compiled kernel that Triton returns from a launch."""

    def __init__(self):
        self.slow, self.direct = [], []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.slow.append((grid, *arguments))
            return Compiled(self.direct)

        return launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, log):
        self.log = log

    def run(self, x, y, z, stream, function, metadata, *arguments):
        assert (stream, function, metadata) == ("stream -1", "function", "metadata")
        assert arguments[:3] == (None, None, None), "launch metadata and hooks"
        self.log.append(((x, y, z), *arguments[3:]))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(kernel_launch, "_current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: f"stream {index}", raising=False)
    return Kernel()


GRID = (3, 1, 1)


def test_second_launch_is_direct_with_addresses(kernel):
    launch = KernelLauncher(kernel)
    x, y = torch.zeros(16), torch.zeros(16)
    for _ in range(3):
        launch(GRID, (x, None, y), (16,), (7, 0.5), (True, 64), 4)
    assert kernel.slow == [(GRID, x, None, y, 16, 7, 0.5, True, 64)]
    assert kernel.direct == [(GRID, x.data_ptr(), None, y.data_ptr(), 16, 7, 0.5, True, 64)] * 2


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launches_go_through_triton_while_it_has_hooks(kernel, name):
    triton = pytest.importorskip("triton")
    launch, x = KernelLauncher(kernel), torch.zeros(16)
    hooks, hook = getattr(triton.knobs.runtime, name), print
    launch(GRID, (x,), (16,), (), (1,), 4)
    hooks.add(hook)
    try:
        launch(GRID, (x,), (16,), (), (1,), 4)
    finally:
        hooks.remove(hook)
    launch(GRID, (x,), (16,), (), (1,), 4)
    assert (len(kernel.slow), len(kernel.direct)) == (2, 1)


def test_tuple_of_tensors_is_passed_as_addresses(kernel):
    launch = KernelLauncher(kernel)
    layers = tuple(torch.zeros(16) for _ in range(3))
    for _ in range(2):
        launch(GRID, (layers,), (), (), (3,), 4)
    assert kernel.direct == [(GRID, tuple(x.data_ptr() for x in layers), 3)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (GRID, (x.to(torch.float16),), (16,), (), (1,), 4),
        lambda x: (GRID, (x,), (16,), (), (2,), 4),
        lambda x: (GRID, (x,), (16,), (), (1,), 8),
    ],
    ids=["dtype", "constant", "warps"],
)
def test_other_specializations_are_compiled_separately(kernel, change):
    launch = KernelLauncher(kernel)
    x = torch.zeros(16)
    launch(GRID, (x,), (16,), (), (1,), 4)
    launch(*change(x))
    assert (len(kernel.slow), len(kernel.direct)) == (2, 0)


@pytest.mark.parametrize(
    ("tensors", "strides", "scalars"),
    [
        (lambda x: (x[1:],), (16,), (7,)),
        (lambda x: ((x, x[1:]),), (16,), (7,)),
        (lambda x: ((x[1:], x),), (16,), (7,)),
        (lambda x: (x,), (24,), (7,)),
        (lambda x: (x,), (1,), (7,)),
        (lambda x: (x,), (2**31,), (7,)),
        (lambda x: (x,), (16,), (2**31,)),
    ],
    ids=["address", "second of a tuple", "first of a tuple", "stride", "stride of 1", "wide stride", "wide scalar"],
)
def test_kernels_are_cached_for_each_specialization_of_triton(kernel, tensors, strides, scalars):
    launch = KernelLauncher(kernel)
    x = torch.zeros(32)
    aligned = (GRID, (x,), (16,), (7,), (1,), 4)
    special = (GRID, tensors(x), strides, scalars, (1,), 4)
    launch(*aligned)
    launch(*special)
    assert (len(kernel.slow), len(kernel.direct)) == (2, 0)
    launch(*special)
    assert (len(kernel.slow), len(kernel.direct)) == (2, 1)


def test_specializations_of_one_argument_are_told_apart(kernel):
    launch = KernelLauncher(kernel)
    x = torch.zeros(64)
    calls = [
        (GRID, (x[1:], y), strides, (scalar,), (1,), 4)
        for y in (x, x[1:])
        for strides in ((1, 16), (16, 1), (17, 16), (16, 17), (2**31, 16), (2**31 + 1, 16))
        for scalar in (7, 2**31)
    ]
    for _ in range(2):
        for call in calls:
            launch(*call)
    assert (len(kernel.slow), len(kernel.direct)) == (24, 24)


def test_amd_gpus_launch_through_triton(kernel, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launch, x = KernelLauncher(kernel), torch.zeros(16)
    for _ in range(2):
        launch(GRID, (x,), (16,), (), (1,), 4)
    assert (len(kernel.slow), len(kernel.direct)) == (2, 0)


def test_launch_on_another_device_enters_it(kernel, monkeypatch):
    entered = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            monkeypatch.setattr(kernel_launch, "_current_device", lambda: self.index)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(kernel_launch, "_current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 1)
    KernelLauncher(kernel)(GRID, (torch.zeros(16),), (), (), (), 4)
    assert (entered, len(kernel.slow)) == ([1], 1)


def test_tensors_on_different_devices_raise(kernel, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0 if x.device.type == "meta" else -1)
    with pytest.raises(KernelError, match="pointer 1: it is on meta, others are on cpu"):
        KernelLauncher(kernel)(GRID, (torch.zeros(16), torch.zeros(16, device="meta")), (), (), (), 4)


def test_interpreted_launch_with_a_number_of_warps_that_gpus_reject_raises(kernel, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    launch = KernelLauncher(kernel)
    launch(GRID, (torch.zeros(16),), (), (), (), 4)
    with pytest.raises(AssertionError, match="3 warps"):
        launch(GRID, (torch.zeros(16),), (), (), (), 3)


def test_tensors_without_gpu_raise(kernel, monkeypatch):
    monkeypatch.setattr(kernel_launch, "_current_device", lambda: 0)
    with pytest.raises(KernelError, match="pointer 0: it is on cpu, not a GPU"):
        KernelLauncher(kernel)(GRID, (torch.zeros(16),), (), (), (), 4)


@pytest.mark.parametrize(
    ("x", "weight", "message"), [("meta", "meta", "x: .*meta, not"), ("cpu", "meta", "weight: .*meta")]
)
def test_error_names_op_and_argument(x, weight, message):
    rms_norm = KERNEL_REGISTRY.load("rms_norm", "standard", "triton")
    with pytest.raises(KernelError, match=f"(?s)the Triton kernel of rms_norm cannot take {message}.*eager"):
        rms_norm(torch.ones(3, 8, device=x), torch.ones(8, device=weight), 1e-6)
