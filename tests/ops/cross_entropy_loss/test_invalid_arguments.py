"""Arguments that the kernels of cross_entropy_loss reject."""

import re

import pytest
import torch

from opslot._base.errors import KernelError
from tests.ops.cross_entropy_loss.inputs import DEVICE, inputs, load


def test_label_outside_the_vocabulary_raises(name):
    hidden, weight, labels = inputs(grad=False)
    labels[1, 5] = 37
    if name == "triton":
        assert load(name)(hidden, weight, labels).isnan()
    elif DEVICE == "cpu":
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            load(name)(hidden, weight, labels)


@pytest.mark.parametrize("variant", ["causal", "sequence_classification", "token_log_probs"])
@pytest.mark.parametrize("label", [37, -1, 2**40])
def test_invalid_label_is_named(variant, label):
    hidden, weight, labels = inputs(grad=False)
    if DEVICE != "cpu":
        pytest.skip("on a device, torch itself raises an assertion")
    labels[1, 5] = label
    with pytest.raises(KernelError, match=f"cannot take labels: label {label} is out of bounds: the vocabulary has 37"):
        load("chunk_loss", variant)(hidden, weight, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(0, 16)}, "weight: shape (0, 16), a vocabulary of nothing"),
        ({"hidden_states": torch.tensor(1.0)}, "hidden_states: it is one number, not [..., H]"),
        ({"num_items_in_batch": "5"}, "num_items_in_batch: '5', not one number"),
        ({"num_items_in_batch": [5]}, "num_items_in_batch: [5], not one number"),
        ({"num_items_in_batch": torch.tensor(5.0, requires_grad=True)}, "num_items_in_batch: it requires a gradient"),
    ],
)
def test_invalid_head_or_num_items_raises(name, change, message):
    hidden, weight, labels = inputs(grad=False)
    given = {"hidden_states": hidden, "weight": weight, "labels": labels}
    with pytest.raises(KernelError, match=re.escape(message)):
        load(name)(**(given | {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in change.items()}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(37, 8)}, r"weight: shape \(37, 8\)"),
        ({"weight": torch.zeros(37, 16, dtype=torch.float64)}, "weight: torch.float64"),
        ({"labels": torch.zeros(2, 4, dtype=torch.long)}, r"labels: shape \(2, 4\)"),
        ({"labels": torch.zeros(2, 9)}, "labels: torch.float32"),
        ({"bias": torch.zeros(36)}, r"bias: torch.float32 of shape \(36,\)"),
        ({"num_items_in_batch": torch.ones(2)}, r"num_items_in_batch: shape \(2,\)"),
        ({"label_smoothing": 1.5}, r"label_smoothing: 1\.5, not between 0 and 1"),
    ],
)
def test_shape_mismatch_raises(name, change, words):
    hidden, weight, labels = inputs(grad=False)
    arguments = {"hidden_states": hidden, "weight": weight, "labels": labels}
    arguments |= {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(KernelError, match=words) as caught:
        load(name)(**arguments)
    assert f"'{name}'" in str(caught.value)
    assert "cross_entropy_loss_implementation" in str(caught.value)


@pytest.mark.parametrize("argument", ["softcap", "logit_scale"])
@pytest.mark.parametrize("variant", ["causal", "token_log_probs"])
def test_scale_that_requires_grad_raises(name, variant, argument):
    with pytest.raises(KernelError, match=f"{argument}: it requires a gradient"):
        load(name, variant)(*inputs(), **{argument: torch.tensor(2.0, requires_grad=True)})


def test_bool_labels_raise(name):
    hidden, weight, labels = inputs()
    with pytest.raises(KernelError, match=r"labels: torch\.bool, not integer"):
        load(name)(hidden, weight, labels > 3)


def test_meta_inputs_raise(name):
    with pytest.raises(KernelError, match=f"{name}.*hidden_states: it is on meta"):
        load(name)(*(x.detach().to("meta") for x in inputs()))
