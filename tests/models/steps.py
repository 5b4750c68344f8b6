"""A training step of a small language model, to compare."""

import torch


def run(model, **more):
    """The loss and, by name, the gradients of the trained parameters, from the same ids."""
    ids = torch.arange(2, 24).reshape(2, 11)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **more).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-4, atol=2e-6, msg=name)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
