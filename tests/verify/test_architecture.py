"""check_architecture passes correct architectures and names the failure in others."""

import pytest
from transformers import Qwen3Config

from opslot import KERNEL_REGISTRY, KernelSpec
from opslot._base.errors import ConfigError
from opslot.verify import check_architecture

FIELD = "rms_norm_implementation"


@pytest.mark.parametrize("arch", ["qwen3_moe", "gemma3_text", "qwen3_next"])
def test_supported_architecture_passes(arch):
    found = check_architecture(arch)
    assert found.ok, str(found)
    assert found.arch == arch
    assert not found.problems
    assert {row.chosen for row in found.kernels} - {"eager"}
    assert str(found).startswith(f"{arch}: passed; eager equals Transformers bit for bit")


def test_wrong_kernel_is_named():
    right = KERNEL_REGISTRY.load("rms_norm", "standard", "torch_fused")
    wrong = lambda hidden_states, weight, eps: right(hidden_states, weight, eps) * 1.001  # noqa: E731
    KERNEL_REGISTRY.register(KernelSpec("broken", "rms_norm", "standard", lambda: wrong))
    try:
        found = check_architecture("qwen3", {FIELD: "broken"})
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "broken")
    assert not found.ok
    assert not found.eager_differences
    assert f"{FIELD}=broken at model" in str(found)
    assert str(found).startswith("qwen3: failed\n")


def test_eager_difference_is_named(monkeypatch):
    from opslot.generated.qwen3 import Qwen3Attention

    forward = Qwen3Attention.forward
    monkeypatch.setattr(
        Qwen3Attention, "forward", lambda self, *a, **k: (forward(self, *a, **k)[0] * (1 + 2**-8), None)
    )
    found = check_architecture("qwen3", "eager")
    assert not found.ok
    assert "loss" in found.eager_differences
    assert found.problems[0].startswith("eager differs from Transformers in loss, grad model.embed_tokens.weight")


def test_config_is_not_changed():
    config = Qwen3Config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=41,
    )
    before = config.to_dict()
    assert check_architecture(config).ok
    assert config.to_dict() == before


def test_architecture_without_slots_fails():
    found = check_architecture("gpt2")
    assert not found.ok
    assert "found nothing to bind" in found.error


def test_unknown_architecture_raises():
    with pytest.raises(ConfigError, match=r"no architecture 'qwen33'(.*\n)+  hint: did you mean .*'qwen3'"):
        check_architecture("qwen33")
