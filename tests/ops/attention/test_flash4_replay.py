"""Calls of FlashAttention 4 whose kernels are launched without the library, with a stand-in for it on the CPU."""

import threading
from types import SimpleNamespace

import pytest
import torch

from opslot.ops.attention.flash4_replay import Replay, key_of


class Library:
    """Functions that launch "compiled" kernels from caches, with the arguments of the library's.

    The forward computes q * scale + v summed over the tokens of k; backward is something that depends on each argument.
    """

    def __init__(self, *, grouped=False, copies=False, extra=()):
        self.grouped = grouped
        self.calls = []

        def forward(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, *, out, lse, scale, sinks=None):
            self.calls.append("forward")
            tensors = (q.detach().clone() if copies else q.detach(), k, v, out.detach(), lse)
            rest = (scale, cu_seqlens_q, cu_seqlens_k, *[None] * 5, sinks, None, None, *extra)
            self._launch(self._flash_attn_fwd, "fwd", self.forward_kernel, *tensors, *rest)

        def preprocess(*args):
            self._launch(self._bwd_preprocess, "pre", self.preprocess_kernel, *args)

        def postprocess(*args):
            self._launch(self._bwd_postprocess_convert, "post", self.postprocess_kernel, *args)

        def backward(q, k, v, out, dout, lse, *, dq, dk, dv, scale):
            self.calls.append("backward")
            dpsum, lse_log2 = torch.empty(3), torch.empty(3)
            sums = {"dq": torch.empty(q.shape), "dk": torch.zeros(k.shape), "dv": torch.zeros(v.shape)}
            preprocess(out, dout, dpsum, lse, lse_log2, sums["dq"], None, None, None)
            own = [sums["dk"], sums["dv"]] if self.grouped else [dk, dv]
            tensors = (q.detach(), k, v, dout, lse_log2, dpsum, sums["dq"], *own)
            self._launch(self._flash_attn_bwd, "bwd", self.backward_kernel, *tensors, scale, *[None] * 11)
            postprocess(sums["dq"], dq, scale, None, None)
            if self.grouped:
                postprocess(sums["dk"], dk, scale, None, None)
                postprocess(sums["dv"], dv, 1.0, None, None)

        self._flash_attn_fwd, self._flash_attn_bwd = forward, backward
        self._bwd_preprocess, self._bwd_postprocess_convert = preprocess, postprocess
        for function in (forward, backward, preprocess, postprocess):
            function.compile_cache = {}

    def _launch(self, function, key, kernel, *args):
        if key not in function.compile_cache:
            function.compile_cache[key] = kernel
        function.compile_cache[key](*args)

    def forward_kernel(self, q, k, v, out, lse, scale, cu_q, cu_k, *rest):
        assert not any(x.requires_grad for x in (q, k, v))
        added = [x.sum() for x in (cu_q, rest[5]) if x is not None]
        out.copy_(q * scale + (k + 2 * v).sum() + sum(added))
        lse.copy_(q.sum(-1))

    def preprocess_kernel(self, out, dout, dpsum, lse, lse_log2, dq_sum, cu_q, used, dlse):
        dpsum.copy_((out * dout).sum().expand(3))
        lse_log2.copy_(lse.sum().expand(3))
        dq_sum.zero_()

    def backward_kernel(self, q, k, v, dout, lse_log2, dpsum, dq_sum, dk, dv, scale, *rest):
        dq_sum += dout * scale + lse_log2.sum()
        if not self.grouped:
            dk.zero_()
            dv.zero_()
        dk += k + dpsum.sum()
        dv += v + q.sum()

    def postprocess_kernel(self, total, gradient, scale, cu, used):
        gradient.copy_(total * scale)


def tensors(seed, shape=(2, 4, 3, 8)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def run_forward(library, replay, q, k, v, scale=0.5, bounds=None, longest=(None, None), sinks=None):
    inputs = {"q": q.detach(), "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "sinks": sinks}
    outputs = {"out": torch.empty_like(q), "lse": torch.empty(q.shape[:-1])}

    def run():
        library._flash_attn_fwd(q, k, v, bounds, bounds, scale=scale, sinks=sinks, **outputs)

    replay.call(key_of(inputs, longest, (scale,)), inputs, outputs, run)
    return outputs


def run_backward(library, replay, q, k, v, seed, scale=0.5):
    out, dout, _ = tensors(seed + 100, q.shape)
    lse = out.sum(-1)
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": None, "cu_seqlens_k": None}
    inputs |= {"out": out, "lse": lse, "dout": dout}
    gradients = {"dq": torch.full_like(q, 7.0), "dk": torch.full_like(k, 7.0), "dv": torch.full_like(v, 7.0)}

    def run():
        library._flash_attn_bwd(q, k, v, out, dout, lse, scale=scale, **gradients)

    replay.call(key_of(inputs, (None, None), (scale,)), inputs, gradients, run)
    return gradients


def assert_equal(found, expected):
    assert all(torch.equal(found[name], wanted) for name, wanted in expected.items())


def test_forward_is_launched_again_with_other_tensors():
    library, direct = Library(), Library()
    replay, never = Replay.forward(library), Replay((None,), ())
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    for seed in range(3):
        q, k, v = tensors(seed)
        q.requires_grad_()
        for given in ({}, {"bounds": bounds + seed}, {"sinks": torch.ones(4) * seed}):
            assert_equal(run_forward(library, replay, q, k, v, **given), run_forward(direct, never, q, k, v, **given))
    assert library.calls == ["forward"] * 3
    assert len(direct.calls) == 9


@pytest.mark.parametrize("grouped", [False, True])
def test_backward_is_launched_again_with_new_sums(grouped):
    library, direct = Library(grouped=grouped), Library(grouped=grouped)
    replay, never = Replay.backward(library), Replay((None,), ())
    for seed in range(3):
        q, k, v = tensors(seed)
        found = run_backward(library, replay, q, k, v, seed)
        assert_equal(found, run_backward(direct, never, q, k, v, seed))
    assert library.calls == ["backward"]


def test_other_layouts_options_and_short_documents_run_the_library():
    library = Library()
    replay = Replay.forward(library)
    q, k, v = tensors(0)
    run_forward(library, replay, q, k, v)
    run_forward(library, replay, q, k, v, scale=0.25)
    run_forward(library, replay, *tensors(0, (2, 5, 3, 8)))
    run_forward(library, replay, q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    for longest in (100, 200, 300, 400):
        run_forward(library, replay, q, k, v, longest=(longest, longest))
    # Documents longer than every block are one case.
    assert len(library.calls) == 7


@pytest.mark.parametrize("other", [{"extra": (None,)}, {"copies": True}], ids=["one more", "a copy"])
def test_kernels_with_other_arguments_stay_with_the_library(other):
    """As of another release or architecture."""
    library = Library(**other)
    replay = Replay.forward(library)
    for seed in range(3):
        q, k, v = tensors(seed)
        out = run_forward(library, replay, q, k, v)["out"]
        assert torch.equal(out, q * 0.5 + (k + 2 * v).sum())
    assert library.calls == ["forward"] * 3


def test_libraries_without_caches_run_as_they_are():
    calls = []
    interface = SimpleNamespace(_flash_attn_fwd=lambda *args, out, lse, scale, sinks: calls.append(out.zero_()))
    replay = Replay.forward(interface)
    for _ in range(2):
        q, k, v = tensors(0)
        run_forward(interface, replay, q, k, v)
    assert len(calls) == 2


def test_one_tensor_as_keys_and_values_is_not_mistaken():
    library = Library()
    replay = Replay.forward(library)
    q, k, v = tensors(0)
    run_forward(library, replay, q, k, k)
    out = run_forward(library, replay, q, k, v)["out"]
    assert torch.equal(out, q * 0.5 + (k + 2 * v).sum())
    assert library.calls == ["forward"]


def test_caches_of_the_library_are_put_back_and_other_threads_are_not_recorded():
    library = Library()
    caches = [function.compile_cache for function in (library._flash_attn_fwd, library._flash_attn_bwd)]
    replay = Replay.forward(library)
    q, k, v = tensors(0)
    kernel = library.forward_kernel

    def kernel_with_another_thread(*args):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=run_forward, args=(library, Replay((None,), ()), *tensors(1)))
            other.start()
            other.join()
        kernel(*args)

    library.forward_kernel = kernel_with_another_thread
    run_forward(library, replay, q, k, v)
    run_forward(library, replay, q, k, v)
    assert [function.compile_cache for function in (library._flash_attn_fwd, library._flash_attn_bwd)] == caches
    assert type(library._flash_attn_fwd.compile_cache) is dict
    assert library.calls == ["forward"] * 3


def test_errors_of_the_library_are_raised_and_recorded_as_nothing():
    library = Library()
    replay = Replay.forward(library)
    q, k, v = tensors(0)

    def fails():
        raise ValueError("no such head size")

    inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": None, "cu_seqlens_k": None}
    with pytest.raises(ValueError, match="no such head size"):
        replay.call(key_of(inputs, (None, None), (0.5,)), inputs, {}, fails)
    assert type(library._flash_attn_fwd.compile_cache) is dict
    assert torch.equal(run_forward(library, replay, q, k, v)["out"], q * 0.5 + (k + 2 * v).sum())
