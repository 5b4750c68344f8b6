"""Running statistics of batch norms: frozen, recomputed, and of ranks with different batches."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opslot.distributed import average_statistics, init_parallel_state, keep_frozen_statistics
from opslot.distributed.activations import checkpoint_activations
from opslot.distributed.running_statistics import update_statistics_once


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def equal(found, wanted):
    return all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_norms_use_their_running_statistics(affine):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=affine)), nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    keep_frozen_statistics(model)
    x = torch.randn(5, 3) + 2
    expected = model[0].eval()(x)
    before, trained = statistics(model[0]), statistics(model[1])
    model.train()
    torch.testing.assert_close(model[0](x), expected, rtol=0, atol=0)
    model(x).sum().backward()
    assert equal(statistics(model[0]), before)
    assert not equal(statistics(model[1]), trained)


def test_image_tokenizers_use_their_running_statistics():
    """Emu3's tokens of an image would depend on the other images of the batch."""
    from opslot.verify.media import media_samples
    from opslot.verify.random_model import random_model
    from opslot.verify.tiny import tiny_config

    model = random_model(tiny_config("emu3"))
    batch = media_samples(model).batches["image"]
    before = statistics(model)
    assert any("running_mean" in name for name in before)
    model.train()(**batch)
    assert not equal(statistics(model), before)
    before = statistics(model)
    keep_frozen_statistics(model)
    model.train()(**batch)
    assert equal(statistics(model), before)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_recomputation_does_not_update_statistics(momentum):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum), nn.Tanh()) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    update_statistics_once(layers[1])
    for _ in range(2):
        x = torch.randn(5, 3)
        layers[0](x).sum().backward()
        checkpoint(layers[1], x, use_reentrant=False).sum().backward()
    assert equal(layers[1].state_dict(), layers[0].state_dict())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(layers[1].parameters(), layers[0].parameters()))
    assert layers[1][1].momentum == momentum


def test_checkpointed_model_updates_statistics_once():
    """LASR's encoder has batch norms in its layers."""
    from transformers import AutoModel

    from opslot.verify.tiny import tiny_config

    config = tiny_config("lasr_encoder")
    config.conv_kernel_size = 3
    found = []
    for mode in ("none", "full"):
        torch.manual_seed(0)
        model = AutoModel.from_config(config).train()
        checkpoint_activations(model, mode)
        torch.manual_seed(1)
        model(torch.randn(1, 32, config.num_mel_bins)).last_hidden_state.sum().backward()
        found.append(statistics(model))
    assert any("running_mean" in name for name in found[0])
    assert equal(found[1], found[0])


def on_ranks():
    state = init_parallel_state(device_type="cpu")
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    keep_frozen_statistics(model)
    model[1](torch.full((2, 3), float(state.rank)))
    model[0](torch.ones(2, 3))
    average_statistics(model)
    return model[0].running_mean.tolist(), model[1].running_mean.tolist(), model[1].running_var.tolist()


def test_ranks_have_the_mean_of_their_statistics(ranks):
    found = ranks.run(on_ranks)
    assert found[0] == found[1]
    frozen, mean, _ = found[0]
    assert frozen == [0.0] * 3
    assert mean == pytest.approx([0.05] * 3)
