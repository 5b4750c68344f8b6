"""mamba_chunk_scan: the chunked reference equals the token-by-token recurrence, and documents are independent."""

import importlib
import itertools
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import DeviceFacts, facts_of
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.mamba_chunk_scan import op
from opslot.slots import KernelRequest
from tests.gradients import gradients, leaves_of, to_float64
from tests.ops.mamba_chunk_scan.inputs import OPTIONS, assert_same, draw_states, inputs


def token_by_token(x, dt, A, B, C, D, dt_bias, initial_states=None, dt_softplus=True, dt_limit=(0.01, 2.0)):
    """The recurrence of the paper."""
    dt = dt + dt_bias
    dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    groups = x.shape[2] // B.shape[2]
    B, C = (tensor.repeat_interleave(groups, 2) for tensor in (B, C))
    state = initial_states
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        added = torch.einsum("bhp,bhn->bhpn", x[:, t] * dt[:, t, :, None], B[:, t])
        state = state * (dt[:, t, :, None] * A.view(A.shape[0], -1)).exp()[:, :, None] + added
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 64, 130])
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize(("columns", "width"), [((), 16), ((24,), 1)])
def test_chunked_equals_token_by_token_recurrence(length, softplus, columns, width):
    given = inputs(length, batch=2, width=width, columns=columns)
    states = draw_states(2, 4, width, 24).requires_grad_()
    options = {"dt_softplus": softplus, "dt_limit": (0.01, 2.0)}
    found = op.reference(**given, **options, initial_states=states, return_final_states=True)
    expected = token_by_token(**given, **options, initial_states=states)
    assert_same(found, expected)
    leaves = [*given.values(), states]
    assert_same(gradients(found, leaves), gradients(expected, leaves), atol=1e-10)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("columns", "width"), [((), 16), ((24,), 1)])
def test_packed_documents_equal_separate_documents(index, columns, width):
    documents = [3, 65, 0, 1, 20]
    given = inputs(sum(documents), width=width, columns=columns)
    states = draw_states(len(documents), 4, width, 24)
    bounds = list(itertools.accumulate(documents, initial=0))
    offsets = torch.tensor(bounds, dtype=index)
    found = op.reference(**given, **OPTIONS, initial_states=states, return_final_states=True, cu_seqlens=offsets)
    alone = []
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        document = {n: t[:, a:b] if t.dim() > 2 else t for n, t in given.items()}
        known = states[i : i + 1]
        alone.append((given["x"][:, :0], known) if a == b else token_by_token(**document, initial_states=known))
    expected = torch.cat([out for out, _ in alone], 1), torch.cat([state for _, state in alone])
    assert_same(found, expected)
    leaves = list(given.values())
    assert_same(gradients(found, leaves), gradients(expected, leaves), atol=1e-10)


@pytest.mark.parametrize("name", ["triton", "torch_chunked"])
def test_documents_are_independent(name):
    kernel = KERNEL_REGISTRY.load("mamba_chunk_scan", "standard", name)
    given = {n: t.detach() for n, t in inputs(80, heads=1, groups=1, dtype=torch.float32).items()}
    other = {n: t.clone() for n, t in given.items()}
    other["x"][:, :70] = 1e6
    cu_seqlens = torch.tensor([0, 70, 80])
    out = [kernel(**each, **OPTIONS, cu_seqlens=cu_seqlens) for each in (given, other)]
    assert torch.equal(out[0][:, 70:], out[1][:, 70:])


def test_wide_heads_with_a_decay_per_value_raise():
    with pytest.raises(KernelError, match=r"A: its shape is \(4, 24\)"):
        op.reference(**inputs(3, columns=(24,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_matches_transformers(dtype):
    upstream = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(upstream, "mamba2_chunk_scan"):
        pytest.skip("this release has no function of the scan")
    given = inputs(150, batch=2, dtype=dtype)
    options = OPTIONS | {"return_final_states": True}
    expected = upstream.mamba2_chunk_scan(**rename(given), chunk_size=32, **options)
    found = op.reference(**given, **options)
    assert found[1].dtype == expected[1].dtype == torch.float32
    tolerance = 16 * torch.finfo(dtype).eps
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=tolerance * want.abs().max().item())


def rename(given):
    return {"hidden_states" if name == "x" else name: tensor for name, tensor in given.items()}


def test_autocast_does_not_round_the_states():
    given = {n: t.detach() for n, t in inputs(130, dtype=torch.float32).items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = op.reference(**given, **OPTIONS)
    assert torch.equal(found, op.reference(**given, **OPTIONS))


@pytest.mark.parametrize("name", ["triton", "torch_chunked"])
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": torch.zeros(1, 8, 3, 16)}, "x"),
        ({"dt": torch.zeros(1, 8, 2)}, "dt"),
        ({"C": torch.zeros(1, 8, 1, 24)}, "C"),
        ({"D": torch.zeros(4, 16)}, "D"),
        ({"initial_states": torch.zeros(2, 4, 16, 24)}, "initial_states"),
        ({"cu_seqlens": torch.tensor([0, 4, 8]), "initial_states": torch.zeros(1, 4, 16, 24)}, "initial_states"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: it ends with 5 where there are 8 tokens"),
    ],
)
def test_invalid_arguments_raise_with_the_argument(name, change, argument):
    kernel = KERNEL_REGISTRY.load("mamba_chunk_scan", "standard", name)
    with pytest.raises(KernelError, match=f"cannot take {argument}"):
        kernel(**(inputs(8, dtype=torch.float32) | change))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": torch.zeros(1, 8, 4, 16, dtype=torch.float64)}, "x"),
        ({"B": torch.zeros(1, 8, 2, 24, dtype=torch.bfloat16)}, "B"),
        ({"x": torch.zeros(1, 8, 4, 129)}, "x"),
        ({"A": torch.zeros(4, dtype=torch.float64)}, "A"),
    ],
)
def test_triton_errors_name_kernel_and_argument(change, argument):
    given = inputs(8, dtype=torch.float32) | change
    with pytest.raises(KernelError, match=f"mamba_chunk_scan_implementation='triton' cannot take {argument}"):
        load_triton(given["A"])(**given)


def load_triton(A):
    """The kernel of the variant of the decays `A`."""
    return KERNEL_REGISTRY.load("mamba_chunk_scan", "per_channel" if A.dim() == 2 else "standard", "triton")


def assert_like_fp64(arguments, rtol=1e-5, want=(True, True)):
    """The kernel in fp32 is as near to the reference in fp64 as `rtol`, or twice as far as the reference in fp32.

    Compares outputs and gradients; `want`: the outputs used in the loss.
    """
    exact = to_float64(arguments)
    kernel = load_triton(arguments["A"])
    results = []
    for function, given in ((kernel, arguments), (op.reference, arguments), (op.reference, exact)):
        outputs = function(**given)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        used = [output for output, wanted in zip(outputs, want, strict=False) if wanted]
        results.append([x.double() for x in (*outputs, *gradients(used, leaves_of(given)))])
    for found, eager, known in zip(*results, strict=True):
        atol = max(rtol * max(1.0, known.abs().max().item()), 2 * (eager - known).abs().max().item())
        torch.testing.assert_close(found, known, rtol=0, atol=atol)


# Sizes of a call in each variant; the channels of per_channel are not a multiple of a tile's.
SIZES = [
    pytest.param({"heads": 2, "groups": 1, "width": 24, "state": 40}, id="standard"),
    pytest.param({"heads": 34, "groups": 1, "width": 1, "state": 2, "columns": (2,)}, id="per_channel"),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_triton_states_of_packed_documents(sizes):
    documents = [3, 66, 0, 1]
    given = inputs(sum(documents), dtype=torch.float32, **sizes)
    given["initial_states"] = draw_states(4, *(sizes[n] for n in ("heads", "width", "state"))).float().requires_grad_()
    given["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(documents)])
    assert_like_fp64(given | OPTIONS | {"return_final_states": True})


def test_triton_initial_states_may_be_overwritten_before_backward():
    """As a cache does with those of the tokens before."""
    given = inputs(20, dtype=torch.float32)
    first = draw_states(1, 4, 16, 24).float().requires_grad_()
    results = []
    for overwrites in (False, True):
        states = first * 1
        out, last = load_triton(given["A"])(**given, **OPTIONS, initial_states=states, return_final_states=True)
        if overwrites:
            states.copy_(last)
        results.append(torch.autograd.grad(out.square().sum(), [first, given["x"]], retain_graph=True))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("sizes", SIZES)
def test_triton_gradients_from_the_final_state_alone(sizes):
    given = inputs(40, dtype=torch.float32, **sizes)
    given["C"], given["D"] = given["C"].detach(), given["D"].detach()
    assert_like_fp64(given | OPTIONS | {"return_final_states": True}, want=(False, True))


@pytest.mark.parametrize("missing", [("D", "dt_bias"), ()])
@pytest.mark.parametrize("sizes", SIZES)
def test_triton_optional_arguments_and_plain_steps(missing, sizes):
    given = {n: t for n, t in inputs(40, dtype=torch.float32, **sizes).items() if n not in missing}
    given["dt"] = given["dt"].detach().exp().requires_grad_()
    assert_like_fp64(given)


@pytest.mark.parametrize("sizes", [{"heads": 2, "groups": 1}, *SIZES[1:]])
def test_triton_steps_of_any_size(sizes):
    """softplus over its whole range, steps at and beyond the limits, and sums of the log decay down to -600."""
    given = inputs(70, dtype=torch.float32, **sizes)
    raw = torch.linspace(-30, 30, 70).view(1, 70, 1).expand(1, 70, sizes["heads"]).clone()
    given["dt"] = raw.requires_grad_()
    assert_like_fp64(given | {"dt_softplus": True, "dt_limit": (0.0, 10.0)}, rtol=5e-5)


def test_triton_sums_parts_of_a_group(monkeypatch):
    """Heads of a group in several programs, of which the last has fewer heads."""
    from opslot.ops.mamba_chunk_scan.kernels.call import ScanCall

    given = inputs(40, heads=6, groups=2, dtype=torch.float32)
    for parts in (1, 2, 3):
        monkeypatch.setattr(ScanCall, "parts", parts)
        assert_like_fp64(given | OPTIONS)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 2, "groups": 1, "width": 64, "state": 64},
        {"heads": 32, "groups": 1, "width": 1, "state": 4, "columns": (4,)},
    ],
)
def test_triton_bf16_gradients_are_within_the_unit_roundoff(sizes):
    """Gradients of the decays are differences of nearly equal sums, which must come from the same rounded values."""
    given = inputs(130, dtype=torch.bfloat16, **sizes)
    for name in ("dt", "A", "dt_bias"):
        given[name] = given[name].detach().float().requires_grad_()
    exact = to_float64(given)
    found, expected = [load_triton(given["A"])(**given, **OPTIONS)], [op.reference(**exact, **OPTIONS)]
    pairs = zip(gradients(found, leaves_of(given)), gradients(expected, leaves_of(exact)), strict=True)
    errors = {name: ((got - want).norm() / want.norm()).item() for name, (got, want) in zip(given, pairs, strict=True)}
    assert max(errors.values()) <= torch.finfo(torch.bfloat16).eps / 2, errors


@pytest.mark.parametrize(("columns", "width", "state"), [((), 16, 24), ((2,), 1, 2)])
def test_triton_reads_slices_of_a_projection_without_copying(monkeypatch, columns, width, state):
    sizes = {"heads": 2, "width": width, "groups": 1, "state": state, "columns": columns}
    given = inputs(20, batch=2, dtype=torch.float32, **sizes)
    triton = load_triton(given["A"])
    mixed = torch.cat([given[n].detach().flatten(2) for n in ("x", "B", "C", "dt")], -1)
    x, b, c, dt = mixed.split([2 * width, state, state, 2], -1)
    views = {"x": x.unflatten(2, (2, width)), "B": b.unflatten(2, (1, -1)), "C": c.unflatten(2, (1, -1)), "dt": dt}
    expected = triton(**given, **OPTIONS)

    def forbidden(tensor):
        assert tensor.shape[0] != 40, f"copied {tuple(tensor.shape)}"
        return tensor.clone()

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", lambda tensor, **_: forbidden(tensor))
        assert torch.equal(triton(**(given | views), **OPTIONS), expected)
    # Batch rows that are not contiguous are copied.
    turned = {n: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t for n, t in given.items()}
    assert torch.equal(triton(**turned, **OPTIONS), expected)
    # So are channels that are not adjacent, as those of a convolution over tokens.
    turned["x"] = given["x"].detach().transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(triton(**turned, **OPTIONS), expected)


@pytest.mark.parametrize("name", ["triton", "torch_chunked"])
@pytest.mark.parametrize(("variant", "columns", "width"), [("standard", (), 16), ("per_channel", (24,), 1)])
def test_empty_input(name, variant, columns, width):
    kernel = KERNEL_REGISTRY.load("mamba_chunk_scan", variant, name)
    given = inputs(0, dtype=torch.float32, columns=columns, width=width)
    states = torch.randn(1, 4, width, 24, requires_grad=True)
    out, final = kernel(**given, initial_states=states, return_final_states=True)
    assert out.shape == (1, 0, 4, width)
    assert torch.equal(final, states)
    (dstates,) = torch.autograd.grad(final.square().sum(), states)
    assert torch.equal(dstates, 2 * states.detach())
    assert torch.equal(kernel(**given, return_final_states=True)[1], torch.zeros(1, 4, width, 24))


@pytest.mark.parametrize(("columns", "width"), [((), 16), ((2,), 1)])
def test_triton_compiles_with_fullgraph(columns, width):
    given = inputs(3, heads=1, groups=1, width=width, state=2, columns=columns, dtype=torch.bfloat16)
    options = OPTIONS | {"cu_seqlens": torch.tensor([0, 1, 3])}
    kernel = load_triton(given["A"])
    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: kernel(**given, **options), fullgraph=True, backend="aot_eager")
    expected, found = kernel(**given, **options), compiled(**given)
    assert torch.equal(found, expected)
    leaves = list(given.values())
    for got, want in zip(gradients([found], leaves), gradients([expected], leaves), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("width", "fits"), [(128, True), (256, False)])
def test_unsupported_head_size_is_reported_when_bound(width, fits):
    pytest.importorskip("triton")
    module = torch.nn.Module()
    module.head_dim = width
    request = KernelRequest("mamba_chunk_scan", "standard", DeviceFacts("gpu", (9, 0)), torch.bfloat16, module)
    if fits:
        assert KERNEL_REGISTRY.resolve(request, "triton").chosen == "triton"
        return
    with pytest.raises(ConfigError, match="heads up to 128 wide, this module's are 256"):
        KERNEL_REGISTRY.resolve(request, "triton")


@pytest.mark.parametrize(("head", "state"), [(8, 8), (24, 40), (32, 64), (64, 16), (128, 256)])
def test_tiles_in_16_bit_have_one_layout_in_shared_memory(head, state):
    """See plan_for: ptxas 12.8 computes wrong addresses where narrower tiles are mixed with these."""
    pytest.importorskip("triton")
    plan = importlib.import_module("opslot.ops.mamba_chunk_scan.kernels.call").plan_for(head, state, 2, 227 * 1024)
    assert min(plan.head, plan.rows, plan.columns, plan.read, plan.shared, plan.chunk) >= 64


COMPILE_SELECTIVE = """
    import json

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from opslot.ops.mamba_chunk_scan.kernels import selective, selective_gradients

    BF16 = {"x_ptr", "dt_ptr", "B_ptr", "C_ptr", "dout_ptr", "out_ptr", "dx_ptr", "ddt_ptr"}

    def kind(name):
        if name.endswith("_ptr"):
            return "*bf16" if name in BF16 else "*i32" if name in ("start_ptr", "length_ptr") else "*fp32"
        return "fp32" if name in ("low", "high") else "i32"

    found = {}
    constants = {"HEADS": 64, "GROUP": 64, "N": 16, "HAS_BIAS": True, "SOFTPLUS": True, "CHANNELS": selective.CHANNELS}
    constants |= {"BACKWARD": True, "HAS_D": True, "BN": 16, "PRECISION": "tf32"}
    for kernel, chunk in (
        (selective.added_kernel, selective.FORWARD_CHUNK),
        (selective.selective_outputs_kernel, selective.FORWARD_CHUNK),
        (selective_gradients.selective_gradients_kernel, selective.BACKWARD_CHUNK),
    ):
        names = kernel.arg_names
        given = {n: v for n, v in (constants | {"CHUNK": chunk}).items() if n in names}
        signature = {n: "constexpr" if n in given else kind(n) for n in names}
        attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
        source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in given.items()}, attrs)
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
        found[kernel.fn.__name__] = done.asm["ptx"].count("shfl.sync")
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_threads_have_all_tokens_of_a_channel():
    """Where tokens of a chunk are in several threads, the scan exchanges values between them for each token."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = textwrap.dedent(COMPILE_SELECTIVE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "added_kernel": 0,
        "selective_outputs_kernel": 0,
        "selective_gradients_kernel": 0,
    }


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("width", "state", "groups", "channels"),
    [
        (64, 128, 2, None),
        (128, 256, 1, None),
        (64, 64, 4, None),
        (24, 40, 1, None),
        (32, 64, 4, None),
        (1, 16, 1, 320),
        (1, 5, 2, 72),
        (1, 64, 1, 40),
        (1, 100, 1, 3),
    ],
)
def test_triton_on_a_gpu(width, state, groups, channels):
    """Packed documents with given states, forward and backward, within the error of bf16 matmuls."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    variant = "per_channel" if channels else "standard"
    spec = KERNEL_REGISTRY.get("mamba_chunk_scan", variant, "triton")
    if spec.unsupported(KernelRequest(spec.op_name, variant, facts_of("cuda"))):
        pytest.skip("triton cannot run here")
    heads = channels or 8
    columns = (state,) if channels else ()
    given = inputs(400, 1, heads, width, groups, state, dtype=torch.bfloat16, device="cuda", columns=columns)
    for name in ("dt", "A", "dt_bias"):
        given[name] = given[name].detach().float().requires_grad_()
    given["initial_states"] = draw_states(2, heads, width, state).to("cuda", torch.float32).requires_grad_()
    options = OPTIONS | {
        "return_final_states": True,
        "cu_seqlens": torch.tensor([0, 150, 400], device="cuda", dtype=torch.int32),
    }
    exact = to_float64(given)
    triton = load_triton(given["A"])
    found, expected = triton(**given, **options), op.reference(**exact, **options)
    found += gradients(found, leaves_of(given))
    expected += gradients(expected, leaves_of(exact))
    for got, want in zip(found, expected, strict=True):
        assert (got.double() - want).norm() <= 1e-2 * want.norm()
    again = triton(**given, **options)
    again += gradients(again, leaves_of(given))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
