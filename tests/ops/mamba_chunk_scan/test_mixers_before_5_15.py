"""Slots in mixers of Mamba-2 that compute everything in one method, as Transformers before 5.15 has them."""

import pytest
import torch

from opslot.ops.causal_conv1d import forms as conv_forms
from opslot.ops.causal_conv1d.op import reference as convolve
from opslot.ops.mamba_chunk_scan import forms
from opslot.ops.mamba_chunk_scan.op import reference as scan
from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.source import Release, UpstreamModule

SOURCE = '''
import torch
import torch.nn as nn

is_fast_path_available = False


def segment_sum(decay):
    """Sums of the decays of tokens after s up to t, [..., T, S]."""
    total = decay.cumsum(-1)
    later = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf)


class ToyMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate_size, self.num_heads, self.head_dim, self.n_groups, self.ssm_state_size = 16, 4, 4, 2, 8
        self.conv_dim = 16 + 2 * 2 * 8
        self.layer_idx, self.activation, self.act = 0, "silu", nn.SiLU()
        self.time_step_limit = (0.0, float("inf"))
        self.in_proj = nn.Linear(12, 16 + self.conv_dim + 4)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, 4, groups=self.conv_dim, padding=3)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.rand(4)) for _ in range(3))
        self.out_proj = nn.Linear(16, 12)

    def cuda_kernels_forward(self, hidden_states, cache_params, attention_mask):
        raise NotImplementedError

    def torch_forward(self, hidden_states, cache_params=None, attention_mask=None):
        batch_size, seq_len, _ = hidden_states.shape
        dtype = hidden_states.dtype
        sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, x, dt = self.in_proj(hidden_states).split(sizes, dim=-1)
        x = x.transpose(1, 2)
        decoding = cache_params is not None and cache_params.has_previous_state(self.layer_idx)
        if decoding:
            x = cache_params.convolved(self, x)
        else:
            if cache_params is not None:
                cache_params.conv_state = x[..., -4:]
            x = self.act(self.conv1d(x)[..., :seq_len].transpose(1, 2))
        width = self.n_groups * self.ssm_state_size
        hidden_states, B, C = torch.split(x, [self.intermediate_size, width, width], dim=-1)
        A = -torch.exp(self.A_log.float())
        if decoding:
            y = cache_params.scanned(self, hidden_states, dt, A, B, C)
        else:
            dt = nn.functional.softplus(dt + self.dt_bias)
            x = hidden_states.view(batch_size, seq_len, self.num_heads, self.head_dim)
            B, C = (t.view(batch_size, seq_len, self.n_groups, -1).repeat_interleave(2, 2) for t in (B, C))
            decay = segment_sum((A * dt).transpose(1, 2)).exp()
            scores = torch.einsum("bthn,bshn->bhts", C, B) * decay
            y = torch.einsum("bhts,bshp->bthp", scores, x * dt[..., None]) + self.D[:, None] * x
            last = (decay[:, :, -1].transpose(1, 2) * dt)[..., None] * x
            ssm_state = torch.einsum("bshp,bshn->bhpn", last, B)
            y = y.reshape(batch_size, seq_len, -1)
            if ssm_state is not None and cache_params is not None:
                cache_params.ssm_state = ssm_state
        y = y * nn.functional.silu(gate)
        return self.out_proj(y.to(dtype))

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        if is_fast_path_available and "cuda" in self.in_proj.weight.device.type:
            return self.cuda_kernels_forward(hidden_states, cache_params, attention_mask)
        return self.torch_forward(hidden_states, cache_params, attention_mask)


class ToyPreTrainedModel(nn.Module):
    pass


class ToyModel(ToyPreTrainedModel):
    def __init__(self):
        super().__init__()
        self.mixer = ToyMixer()

    def forward(self, hidden_states, **kwargs):
        return self.mixer(hidden_states)
'''


class Cache:
    def has_previous_state(self, layer):
        return hasattr(self, "ssm_state")


@pytest.fixture(scope="module")
def mixers():
    """The same mixer as written and as generated."""
    module = UpstreamModule("transformers.toy", "5.9.0", SOURCE)
    view, patch = ModuleView(module), PatchConfig(module.name)
    method = view.fingerprint("ToyMixer.torch_forward")
    with pytest.MonkeyPatch.context() as context:
        context.setitem(forms._MIXERS, method, "self.time_step_limit")
        found = [match for form in (*conv_forms.FORMS, *forms.FORMS) for match in form.find(view)]
    assert [(match.op, match.symbol) for match in found] == [
        ("causal_conv1d", "ToyMixer"),
        ("mamba_chunk_scan", "ToyMixer"),
    ]
    for match in found:
        match.write(patch)
    text = generate(patch, Release("5.9.0", None, {module.name: module})).text
    models = []
    for source in (SOURCE, text):
        namespace = {}
        exec(source, namespace)
        torch.manual_seed(0)
        models.append(namespace["ToyModel"]().double())
    return models


@pytest.mark.parametrize("convolution", [None, convolve])
@pytest.mark.parametrize("kernel", [None, scan])
def test_equals_the_original_alone_and_packed(mixers, convolution, kernel, monkeypatch):
    original, generated = mixers
    monkeypatch.setattr(
        type(generated.mixer), "_opslot_causal_conv1d", staticmethod(convolution) if convolution else None
    )
    monkeypatch.setattr(type(generated.mixer), "_opslot_mamba_chunk_scan", staticmethod(kernel) if kernel else None)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(generated(x), original(x))
    cu_seqlens = torch.tensor([0, 4, 9, 11, 18], dtype=torch.int32)
    documents = x.flatten(0, 1).split([4, 5, 2, 7])
    alone = torch.cat([original(document[None])[0] for document in documents]).view_as(x)
    torch.testing.assert_close(generated(x, cu_seq_lens_q=cu_seqlens), alone)
    assert not torch.allclose(generated(x), alone)


def test_kernels_fill_the_cache(mixers, monkeypatch):
    original, generated = mixers
    monkeypatch.setattr(type(generated.mixer), "_opslot_causal_conv1d", staticmethod(convolve))
    monkeypatch.setattr(type(generated.mixer), "_opslot_mamba_chunk_scan", staticmethod(scan))
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    expected, found = Cache(), Cache()
    original.mixer(x, expected)
    generated.mixer(x, found)
    torch.testing.assert_close(vars(found), vars(expected))
