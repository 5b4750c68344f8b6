import gc

import torch

from opslot._base.tensor_cache import TensorCache


def counted(cache, x, *key):
    """Whether `cache` computes a result."""
    calls = []
    cache.get(x, lambda: calls.append(1), *key)
    return bool(calls)


def test_results_are_shared_until_the_tensor_changes():
    cache, x = TensorCache(4), torch.arange(3)
    assert [counted(cache, x), counted(cache, x), counted(cache, x, 1), counted(cache, x, 1)] == [True, False] * 2
    assert counted(cache, x.clone())
    x[0] = 5
    assert [counted(cache, x), counted(cache, x)] == [True, False]


def test_without_a_tensor():
    cache = TensorCache(4)
    assert [counted(cache, None, 1), counted(cache, None, 1), counted(cache, None, 2)] == [True, False, True]


def test_another_tensor_at_the_same_address():
    cache, shape = TensorCache(4), (1000,)
    for _ in range(3):
        x = torch.zeros(shape)
        assert counted(cache, x)
        del x
        gc.collect()


def test_the_oldest_result_is_dropped():
    cache, tensors = TensorCache(2), [torch.zeros(1) for _ in range(3)]
    assert all(counted(cache, x) for x in tensors)
    assert [counted(cache, x) for x in reversed(tensors)] == [False, False, True]


def test_inference_tensors_are_not_cached():
    cache = TensorCache(2)
    with torch.inference_mode():
        x = torch.zeros(1)
    assert counted(cache, x)
    assert counted(cache, x)
