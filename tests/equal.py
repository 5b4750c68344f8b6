"""Comparison of whole models."""

import torch


def assert_equal_tensors(found, wanted):
    """Two models have equal parameters and buffers bit for bit, including non-persistent buffers."""
    ours, theirs = (
        {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        for model in (found, wanted)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
