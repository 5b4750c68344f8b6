"""Short convolutions between two gates (LFM): a slot for the convolution, and one for it and its gates."""

import inspect

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.lfm2 import modeling_lfm2

import opslot
from opslot import KERNEL_REGISTRY
from opslot._base.device import DeviceFacts
from opslot.ops.causal_conv1d.forms import find_convolutions
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.source import UpstreamModule
from opslot.slots import KernelRequest
from opslot.slots.protocol import bound_kernel
from opslot.verify import check_architecture
from opslot.verify.random_model import packed_batches, random_ids, random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config

TRITON = {"causal_conv1d_implementation": "triton"}


@pytest.fixture
def model():
    model = random_model(tiny_config("lfm2"))
    opslot.apply(model, "eager")
    if not hasattr(mixer(model), "_opslot_gated_causal_conv1d"):
        pytest.skip("this Transformers has the convolution in two methods")
    return model


def mixer(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("ShortConv"))


def test_packed_documents(model):
    packed, alone = packed_batches(random_ids(model.config))
    expected = train_step(model, alone)
    opslot.apply(model, TRITON)
    assert bound_kernel(mixer(model), "gated_causal_conv1d") is not None
    assert worst_difference(train_step(model, packed), expected) == ""


def test_filters_that_only_the_gated_kernel_takes():
    """Of LFM3, with seven taps: `auto` and the named kernel differ in what they may leave out."""
    if "lfm3" not in CONFIG_MAPPING:
        pytest.skip("not in this Transformers")
    model = random_model(tiny_config("lfm3"))
    with pytest.raises(opslot.ConfigError, match="takes up to 4 taps, this module's filter has 7"):
        opslot.apply(model, TRITON)
    request = KernelRequest("causal_conv1d", "gated", DeviceFacts("gpu", (9, 0)), torch.bfloat16, module=mixer(model))
    assert KERNEL_REGISTRY.resolve(request).chosen == "triton"


def test_a_cache_takes_the_convolution_alone(model):
    """It keeps what is convolved, after the first gate."""
    ids = random_ids(model.config)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        opslot.apply(model, TRITON)
        first = model(input_ids=ids[:, :5], use_cache=True)
        second = model(input_ids=ids[:, 5:9], use_cache=True, past_key_values=first.past_key_values)
        third = model(input_ids=ids[:, 9:10], use_cache=True, past_key_values=first.past_key_values)
    found = torch.cat([first.logits, second.logits, third.logits], 1)
    torch.testing.assert_close(found, expected[:, :10], rtol=1e-4, atol=1e-5)


def test_sharded_sequences_take_the_convolution_alone():
    found = check_architecture("lfm2", ops=TRITON, checks=("sp",))
    assert found["sp"].result == "passed", str(found)


def test_compiles_with_fullgraph(model):
    opslot.apply(model, TRITON)
    layer, states = mixer(model), torch.randn(1, 9, model.config.hidden_size)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(states), layer(states))


@pytest.mark.parametrize(
    ("text", "changed", "slots"),
    [
        ("hidden_states = B * x", "hidden_states = B * x", ["standard", "gated"]),
        ("hidden_states = B * x", "hidden_states = B * x\n        hidden_states = hidden_states.tanh()", ["standard"]),
        ("y = C * hidden_states", "y = C + hidden_states", ["standard"]),
    ],
    ids=["upstream", "another step", "another gate"],
)
def test_only_known_steps_between_the_gates_are_replaced(model, text, changed, slots):
    upstream = inspect.getsource(modeling_lfm2)
    assert upstream.count(text) == 1
    module = ModuleView(UpstreamModule("lfm2", transformers.__version__, upstream.replace(text, changed)))
    assert [match.variant for match in find_convolutions(module)] == slots
