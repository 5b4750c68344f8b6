"""Slots in mixers that compute everything in one method, as Transformers before 5.15 has them: Mamba-2's, and those of
Mamba-1, which scan token by token."""

import pytest
import torch

from opslot.ops.causal_conv1d import forms as conv_forms
from opslot.ops.causal_conv1d.op import reference as convolve
from opslot.ops.mamba_chunk_scan import forms
from opslot.ops.mamba_chunk_scan.op import reference as scan
from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.source import Release
from opslot.patchgen.upstream import UpstreamModule

MAMBA_2 = '''
import torch
import torch.nn as nn

is_fast_path_available = True


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
        self.layer_idx, self.activation, self.act, self.fast = 0, "silu", nn.SiLU(), False
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
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[..., None]
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
        if is_fast_path_available and self.fast:
            return self.cuda_kernels_forward(hidden_states, cache_params, attention_mask)
        return self.torch_forward(hidden_states, cache_params, attention_mask)
'''

MAMBA_1 = """
import torch
import torch.nn as nn


class ToyMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_kernel_size, self.rank, self.state_size = 4, 3, 8
        self.layer_idx, self.activation, self.act, self.fast = 0, "silu", nn.SiLU(), False
        self.in_proj = nn.Linear(12, 2 * 16)
        self.conv1d = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.x_proj = nn.Linear(16, 3 + 2 * 8, bias=False)
        self.dt_proj = nn.Linear(3, 16)
        self.A_log = nn.Parameter(torch.rand(16, 8).log())
        self.D = nn.Parameter(torch.rand(16))
        self.out_proj = nn.Linear(16, 12)

    def cuda_kernels_forward(self, hidden_states, cache_params=None, attention_mask=None):
        raise NotImplementedError

    def slow_forward(self, input_states, cache_params=None, attention_mask=None):
        dtype = input_states.dtype
        hidden_states, gate = self.in_proj(input_states).transpose(1, 2).chunk(2, dim=1)
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[:, None]
        if cache_params is not None and cache_params.has_previous_state(self.layer_idx):
            ssm_state = cache_params.ssm_state.clone()
        else:
            ssm_state = hidden_states.new_zeros(len(hidden_states), 16, self.state_size)
        if cache_params is not None:
            if cache_params.has_previous_state(self.layer_idx):
                hidden_states = cache_params.convolved(self, hidden_states)
            else:
                padded = nn.functional.pad(hidden_states, (self.conv_kernel_size - hidden_states.shape[-1], 0))
                cache_params.conv_state = padded
                hidden_states = self.act(self.conv1d(hidden_states)[..., : input_states.shape[1]])
        else:
            hidden_states = self.act(self.conv1d(hidden_states)[..., : input_states.shape[1]])
        parts = self.x_proj(hidden_states.transpose(1, 2))
        time_step, B, C = parts.split([self.rank, self.state_size, self.state_size], dim=-1)
        step = self.dt_proj(time_step)
        step = nn.functional.softplus(step).transpose(1, 2)
        A = -torch.exp(self.A_log)
        discrete_A = torch.exp(A[None, :, None] * step[..., None])
        added = step[..., None] * B[:, None] * hidden_states[..., None]
        outputs = []
        for i in range(input_states.shape[1]):
            ssm_state = discrete_A[:, :, i] * ssm_state + added[:, :, i]
            outputs.append((ssm_state * C[:, i, None]).sum(-1))
        scan_output = torch.stack(outputs, dim=-1) + hidden_states * self.D[:, None]
        scan_output = scan_output * self.act(gate)
        if cache_params is not None:
            cache_params.update_recurrent_state(ssm_state, self.layer_idx)
        result = self.out_proj(scan_output.transpose(1, 2).to(dtype))
        return result

    def forward(self, hidden_states, cache_params=None, attention_mask=None):
        if self.fast:
            return self.cuda_kernels_forward(hidden_states, cache_params, attention_mask)
        return self.slow_forward(hidden_states, cache_params, attention_mask)
"""

MODEL = """

class ToyPreTrainedModel(nn.Module):
    pass


class ToyModel(ToyPreTrainedModel):
    def __init__(self):
        super().__init__()
        self.mixer = ToyMixer()

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.mixer(hidden_states, attention_mask=attention_mask)
"""


class Cache:
    def has_previous_state(self, layer):
        return hasattr(self, "ssm_state")

    def update_recurrent_state(self, state, layer):
        self.ssm_state = state


@pytest.fixture(scope="module", params=["mamba_2", "mamba_1"])
def mixers(request):
    """The same mixer as written and as generated."""
    source = (MAMBA_2 if request.param == "mamba_2" else MAMBA_1) + MODEL
    module = UpstreamModule("transformers.toy", "5.9.0", source)
    view, patch = ModuleView(module), PatchConfig(module.name)
    with pytest.MonkeyPatch.context() as context:
        if request.param == "mamba_2":
            context.setitem(forms._MIXERS, view.fingerprint("ToyMixer.torch_forward"), "self.time_step_limit")
        else:
            context.setattr(forms, "_SLOW_MIXERS", {view.fingerprint("ToyMixer.slow_forward")})
        found = [match for form in (*conv_forms.FORMS, *forms.FORMS) for match in form(view)]
    assert [(match.op, match.variant, match.symbol) for match in found] == [
        ("causal_conv1d", "standard", "ToyMixer"),
        ("mamba_chunk_scan", "standard" if request.param == "mamba_2" else "per_channel", "ToyMixer"),
    ]
    for match in found:
        match.write(patch)
    text = generate(patch, Release("5.9.0", None, {module.name: module}))
    models = []
    for written in (source, text):
        namespace = {}
        exec(written, namespace)
        torch.manual_seed(0)
        models.append(namespace["ToyModel"]().double())
    return models


def bind(monkeypatch, mixer, convolution, kernel):
    for slot, bound in {"causal_conv1d": convolution, "mamba_chunk_scan": kernel}.items():
        monkeypatch.setattr(type(mixer), f"_opslot_{slot}", staticmethod(bound) if bound else None)


@pytest.mark.parametrize("convolution", [None, convolve])
@pytest.mark.parametrize("kernel", [None, scan])
def test_equals_the_original_alone_and_packed(mixers, convolution, kernel, monkeypatch):
    original, generated = mixers
    bind(monkeypatch, generated.mixer, convolution, kernel)
    x, mask = torch.randn(2, 9, 12, dtype=torch.float64), torch.ones(2, 9)
    mask[1, :3] = 0
    torch.testing.assert_close(generated(x, mask), original(x, mask))
    cu_seqlens = torch.tensor([0, 4, 9, 11, 18], dtype=torch.int32)
    documents = x.flatten(0, 1).split([4, 5, 2, 7])
    alone = torch.cat([original(document[None])[0] for document in documents]).view_as(x)
    torch.testing.assert_close(generated(x, cu_seq_lens_q=cu_seqlens), alone)
    assert not torch.allclose(generated(x), alone)


@pytest.mark.parametrize(("convolution", "kernel"), [(convolve, None), (None, scan), (convolve, scan)])
def test_kernels_run_instead_of_those_of_mamba_ssm(mixers, convolution, kernel, monkeypatch):
    original, generated = mixers
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    expected = original(x)
    monkeypatch.setattr(generated.mixer, "fast", True)
    with pytest.raises(NotImplementedError):
        generated(x)
    bind(monkeypatch, generated.mixer, convolution, kernel)
    torch.testing.assert_close(generated(x), expected)


def test_kernels_fill_the_cache(mixers, monkeypatch):
    original, generated = mixers
    bind(monkeypatch, generated.mixer, convolve, scan)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    expected, found = Cache(), Cache()
    original.mixer(x, expected)
    generated.mixer(x, found)
    torch.testing.assert_close(vars(found), vars(expected))
