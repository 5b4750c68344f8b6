"""Masks as modules use them that no kernel is bound to."""

import torch

from opslot.ops.attention.layout import Keys, Layout


def test_mask_of_keys_is_dense_for_a_module_that_applies_it_itself():
    """The pooling of Siglip 2 repeats the mask for its nn.MultiheadAttention."""
    padding = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    found = Layout(causal=False, length=4, keys=Keys.of(padding)).repeat(1, 3, 1, 1)
    assert torch.equal(found, padding.bool()[:, None, None].repeat(1, 3, 1, 1))
