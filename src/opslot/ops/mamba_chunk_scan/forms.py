"""Transformers' code that computes the scan of Mamba-2, and other state space models. Does not import torch."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView, Skip, skip_callers
from opslot.patchgen.packed_documents import (
    add_imports,
    bound_arguments,
    documents_of,
    documents_reach,
    pass_documents,
    pass_documents_to,
    undecorated,
)

OP = "mamba_chunk_scan"
_FUNCTION = "mamba2_chunk_scan"
# With einsums, from 5.18; with sums of elementwise multiplications, from 5.15.
_REVIEWED = ("900d8cf1b2a6", "9766343fe097")
_HELPERS = {
    "segment_sum": "d25877a776fa",
    "reshape_into_chunks": "43770a6870be",
    "pad_tensor_by_size": "70663340e323",
}
_DEFAULTS = {
    "D": "None",
    "dt_bias": "None",
    "initial_states": "None",
    "dt_softplus": "False",
    "dt_limit": "(0.0, float('inf'))",
    "return_final_states": "False",
}
_PARAMETERS = ("hidden_states", "dt", "A", "B", "C", "chunk_size", *_DEFAULTS)
_SLOT = Slot(OP)
# A function of mamba_ssm that computes the whole mixer in training where that package is installed.
_FUSED = "mamba2_split_conv1d_scan_combined"
_FUSED_RESULT = "if fused_output is not None:\n    return fused_output"
# Mamba-1's and Mamba-2's scans, of this module or of mamba_ssm.
_SCANS = r"mamba\w*(scan\w*|inner_fn)|(torch_)?selective_scan\w*"
# Mamba-1's scan, from 5.15: token by token, or by another package's scan of all tokens.
_SELECTIVE = "mamba_selective_scan"
_SELECTIVE_REVIEWED = ("3d6186fbb095",)
_SELECTIVE_PARAMETERS = (
    "hidden_states",
    "dt",
    "A",
    "B",
    "C",
    "D",
    "z",
    "delta_bias",
    "delta_softplus",
    "return_last_state",
)
# How the module's own scan is computed.
_SELECTIVE_OPTIONS = ("use_mambapy", "use_associative_scan")
_PER_CHANNEL = Slot(OP, "per_channel")
_CALLS = "opslot.ops.mamba_chunk_scan.calls"

# Mixers of Mamba-2 before 5.15: their method for machines without mamba_ssm.
_MIXER = "torch_forward"
_MIXER_CALL = f"self.{_MIXER}(hidden_states, cache_params, attention_mask)"
_STEP_LIMIT = "self.time_step_limit"
# mamba_ssm's kernels, where installed, take the limit.
_STEP_MINIMUM = 'self.time_step_limit if is_fast_path_available else (self.time_step_min, float("inf"))'
# Fingerprints of that method in 5.9, 5.13 and 5.14, and the limits of its steps.
_MIXERS = {
    # mamba2
    **dict.fromkeys(("d627172a09c7", "d1dc440e553a", "e31dfb8549bc"), _STEP_LIMIT),
    # bamba and granitemoehybrid
    **dict.fromkeys(("4675d060c9ff", "98c3b9f4fbde", "92a224dd42f2"), _STEP_LIMIT),
    # falcon_h1
    **dict.fromkeys(("128ae75dc6d1", "52432d5f500f", "7bc1edc89c9b"), _STEP_LIMIT),
    # nemotron_h and zamba2
    **dict.fromkeys(("0f84a1b4c2c2", "b1a0632f0765", "09bc1a0040f1"), _STEP_MINIMUM),
}

# Mixers of Mamba-1 before 5.15: their method for machines without mamba_ssm.
_SLOW_MIXER = "slow_forward"
# Fingerprints of that method in 5.9 and 5.13, and in 5.14.
_SLOW_MIXERS = {
    *("e6c8f3dee5d8", "b3c8353f0034"),  # jamba
    *("002d35b0e6bf", "c9187243ba1e"),  # mamba
    *("3ec417d2e7bb", "6b841cc3e181"),  # falcon_mamba
}

# {projections}, {before}, {parts}, {state} and {output} are statements of Transformers' method.
_MIXER_WITH_KERNELS = '''\
def _opslot_mamba2_with_kernels({parameters}, cu_seqlens):
    """Transformers' {method} from an empty state, with the convolution and the scan of the slots."""
{projections}
{before}
    {x} = mixer_conv(self, {x}, cu_seqlens){transposed}
{parts}
    # The states of packed documents are not those of rows.
    want_state = cache_params is not None and cu_seqlens is None
    found = self._opslot_mamba_chunk_scan(
        hidden_states.reshape(batch_size, seq_len, self.num_heads, self.head_dim),
        dt,
        A,
        B.reshape(batch_size, seq_len, self.n_groups, self.ssm_state_size),
        C.reshape(batch_size, seq_len, self.n_groups, self.ssm_state_size),
        self.D,
        self.dt_bias,
        None,
        True,
        {limit},
        want_state,
        cu_seqlens,
    )
    y, ssm_state = found if want_state else (found, None)
    y = y.flatten(2)
{state}
{output}
'''

# {projections}, {filled}, {parts} and {output} are statements of Transformers' method; {step} is a time step before
# softplus.
_SLOW_MIXER_WITH_KERNELS = '''\
def _opslot_mamba1_with_kernels({parameters}, cu_seqlens):
    """Transformers' {method} from an empty state, with the convolution and the scan of the slots."""
{projections}
    if cache_params is not None:
{filled}
    hidden_states = mixer_conv(self, hidden_states, cu_seqlens)
{parts}
    # The states of packed documents are not those of rows. A channel is a head of the slot's scan.
    want_state = cache_params is not None and cu_seqlens is None
    B, C = (tensor[:, :, None].to(hidden_states.dtype) for tensor in (B, C))
    tokens, limit = hidden_states.transpose(1, 2)[..., None], (0.0, float("inf"))
    scan = self._opslot_mamba_chunk_scan
    found = scan(tokens, {step}, A, B, C, self.D, None, None, True, limit, want_state, cu_seqlens)
    scan_output, ssm_state = found if want_state else (found, None)
    if want_state:
        cache_params.update_recurrent_state(ssm_state.squeeze(2), self.layer_idx)
    scan_output = scan_output.squeeze(-1).transpose(1, 2) * self.act(gate)
{output}
'''

# Forwards of lightning attention, in blocks, with a state that decays by a constant per head and token.
_LIGHTNING = ("957c1875ec74", "20f4d40bc0a0", "307816f12796")
_LIGHTNING_START = "batch_size, seq_len, hidden_size = hidden_states.shape"
_LIGHTNING_BLOCKS = "range(num_blocks)"
_LIGHTNING_OUTPUT = "attn_output = torch.cat(attn_output, dim=-2)"


def find_scans(module: ModuleView) -> Iterator[Match | Skip]:
    """Classes that call a scan of all tokens; its recurrent form, for single tokens, stays Transformers'."""
    matched = set()
    for function, call_form in ((_FUNCTION, _call), (_SELECTIVE, _selective_call)):
        for method, calls in module.callers(function).items():
            if match := call_form(module, method, calls):
                matched.add(match.symbol)
                yield match
    for match in (*_mixers(module), *_slow_mixers(module)):
        matched.add(match.symbol)
        yield match
    yield from skip_callers(module, OP, _SCANS, matched=matched)


def _call(module: ModuleView, method: str, calls: list[ast.Call]) -> Match | None:
    """A match if the method calls the reviewed function once, with arguments of the op's contract."""
    reviewed = module.fingerprint(_FUNCTION) in _REVIEWED and all(
        module.fingerprint(name) == expected for name, expected in _HELPERS.items()
    )
    arguments = bound_arguments(calls[0], _PARAMETERS, ("z", "seq_idx"))
    fused = module.calls(method, _FUSED)
    if not reviewed or len(calls) != 1 or arguments is None or _is_gated(calls[0]):
        return None
    if len(fused) > 1 or (fused and module.count(method, _FUSED_RESULT) != 1):
        return None
    arguments = _DEFAULTS | arguments
    if set(arguments) != set(_PARAMETERS):
        return None
    size = arguments.pop("chunk_size")
    names = [name for name in _PARAMETERS if name in arguments]
    documents = documents_of(module, method, calls[0])
    values = ", ".join([*(arguments[name] for name in names), documents])

    def write(patch: PatchConfig) -> None:
        original, bound = undecorated(module, patch, _FUNCTION), f"self.{_SLOT.attribute}"
        eager = f"scan_by_document({original}, {size}, {values})"
        template = f"{bound}({values}) if {bound} is not None else {eager}"
        patch.replace(method, ast.unparse(calls[0]), template, slot=_SLOT)
        _leave_out_fused(patch, method, fused, f"{bound} is not None or {documents} is not None")
        add_imports(patch, _CALLS, "scan_by_document")
        pass_documents(module, patch)
        patch.depends_on(module.upstream.name, _FUNCTION, *_HELPERS)

    return Match(method.partition(".")[0], OP, _SLOT.variant, write)


def _leave_out_fused(patch: PatchConfig, method: str, fused: list[ast.Call], condition: str) -> None:
    """Do not call the function that computes the whole mixer: it would mix documents, also where slots are eager."""
    for call in fused:
        patch.replace(method, ast.unparse(call), f"None if {condition} else $match")


def _selective_call(module: ModuleView, method: str, calls: list[ast.Call]) -> Match | None:
    """A match if the method calls Mamba-1's reviewed function once, with a gate."""
    arguments = bound_arguments(calls[0], _SELECTIVE_PARAMETERS, _SELECTIVE_OPTIONS)
    fused = module.calls(method, "mamba_inner_fn")
    if module.fingerprint(_SELECTIVE) not in _SELECTIVE_REVIEWED or len(calls) != 1 or arguments is None:
        return None
    owner = method.partition(".")[0]
    if set(arguments) != set(_SELECTIVE_PARAMETERS) or not documents_reach(module, owner):
        return None
    if len(fused) > 1 or (fused and module.count(method, _FUSED_RESULT) != 1):
        return None
    documents = documents_of(module, method, calls[0])
    values = ", ".join([*(arguments[name] for name in _SELECTIVE_PARAMETERS), documents])
    options = "".join(f", {ast.unparse(k)}" for k in calls[0].keywords if k.arg in _SELECTIVE_OPTIONS)

    def write(patch: PatchConfig) -> None:
        original, bound = undecorated(module, patch, _SELECTIVE), f"self.{_PER_CHANNEL.attribute}"
        eager = f"scan_channels_by_document({original}, {values}{options})"
        template = f"scan_channels({bound}, {values}) if {bound} is not None else {eager}"
        patch.replace(method, ast.unparse(calls[0]), template, slot=_PER_CHANNEL)
        _leave_out_fused(patch, method, fused, f"{bound} is not None or {documents} is not None")
        add_imports(patch, _CALLS, "scan_channels", "scan_channels_by_document")
        pass_documents_to(module, patch, owner)
        pass_documents(module, patch)
        patch.depends_on(module.upstream.name, _SELECTIVE)

    return Match(owner, OP, _PER_CHANNEL.variant, write)


def _mixers(module: ModuleView) -> Iterator[Match]:
    """Classes of Mamba-2 whose `torch_forward` computes everything; from a state it stays Transformers'."""
    for name, method in module.methods(_MIXER):
        limit = _MIXERS.get(module.fingerprint(method) or "")
        if limit is not None and documents_reach(module, name):
            yield Match(name, OP, _SLOT.variant, partial(_write_mixer, module, name, limit))


def _write_mixer(module: ModuleView, name: str, limit: str, patch: PatchConfig) -> None:
    forward, method = f"{name}.forward", f"{name}.{_MIXER}"
    documents = "cu_seqlens_in(kwargs)"
    if "seq_idx" in module.parameters(forward):
        documents = 'cu_seqlens_in({"seq_idx": seq_idx, **kwargs})'
        # It raises where mamba_ssm is not installed.
        patch.replace(forward, "seq_idx is not None", "False")
    bound = f"self.{_SLOT.attribute}"
    patch.replace(forward, "is_fast_path_available", f"{bound} is None and {documents} is None and $match")
    arguments = f"hidden_states, cache_params, attention_mask, {documents}"
    mixer = f"mixer_by_document(self, {bound}, self.{_MIXER}, _opslot_mamba2_with_kernels, {arguments})"
    patch.replace(forward, _MIXER_CALL, mixer, slot=_SLOT)
    _add_mixer(module, patch, method, _with_kernels(module, method, limit))


def _add_mixer(module: ModuleView, patch: PatchConfig, method: str, function: str) -> None:
    """Add the function with kernels of a mixer's method, and pass the boundaries of documents to the mixer."""
    add_imports(patch, _CALLS, "mixer_by_document")
    add_imports(patch, "opslot.ops.causal_conv1d.calls", "mixer_conv")
    if function not in patch.helpers:
        patch.add_helper(function)
    pass_documents_to(module, patch, method.partition(".")[0])
    pass_documents(module, patch)
    patch.depends_on(module.upstream.name, method)


def _with_kernels(module: ModuleView, method: str, limit: str) -> str:
    """Source text of a function with the statements of a mixer's method, but for convolution and scan."""
    body = module.function(method).body
    convolves, scans = (
        next(i for i, s in enumerate(body) if isinstance(s, ast.If) and call in ast.unparse(s))
        for call in ("self.conv1d(", "segment_sum(")
    )
    convolution, scan = body[convolves], body[scans]
    assert isinstance(convolution, ast.If)
    assert isinstance(scan, ast.If)
    at, convolved = next((i, s) for i, s in enumerate(convolution.orelse) if "self.conv1d(" in ast.unparse(s))
    assert isinstance(convolved, ast.Assign)
    statements: dict[str, list[ast.stmt]] = {
        "projections": body[:convolves],
        "before": convolution.orelse[:at],
        "parts": convolution.orelse[at + 1 :] + body[convolves + 1 : scans],
        "state": [s for s in scan.orelse if isinstance(s, ast.If) and "ssm_state" in ast.unparse(s.test)],
        "output": body[scans + 1 :],
    }
    texts = {key: _text(found) for key, found in statements.items()}
    x = ast.unparse(convolved.targets[0])
    return _MIXER_WITH_KERNELS.format(
        parameters=", ".join(["self", *module.parameters(method)]),
        method=_MIXER,
        x=x,
        transposed=".transpose(1, 2)" if ".transpose(1, 2)" in ast.unparse(convolved.value) else "",
        limit=limit,
        **texts,
    )


def _text(statements: list[ast.stmt], indent: str = "    ") -> str:
    return textwrap.indent("\n".join(map(ast.unparse, statements)), indent)


def _slow_mixers(module: ModuleView) -> Iterator[Match]:
    """Classes of Mamba-1 whose `slow_forward` computes everything; from a state it stays Transformers'."""
    for name, method in module.methods(_SLOW_MIXER):
        if module.fingerprint(method) in _SLOW_MIXERS and documents_reach(module, name):
            yield Match(name, OP, _PER_CHANNEL.variant, partial(_write_slow_mixer, module, name))


def _write_slow_mixer(module: ModuleView, name: str, patch: PatchConfig) -> None:
    forward, method = f"{name}.forward", f"{name}.{_SLOW_MIXER}"
    if module.keywords(forward) is None:
        patch.take_keywords(forward)
    bound, documents = f"self.{_PER_CHANNEL.attribute}", "cu_seqlens_in(kwargs)"
    arguments = "hidden_states, cache_params, attention_mask"
    functions = f"self.{_SLOW_MIXER}, _opslot_mamba1_with_kernels"
    mixer = f"mixer_by_document(self, {bound}, {functions}, {arguments}, {documents})"
    patch.replace(forward, f"self.{_SLOW_MIXER}({arguments})", mixer, slot=_PER_CHANNEL)
    fast = f"if {bound} is None and {documents} is None:\n    $match"
    patch.replace(forward, f"return self.cuda_kernels_forward({arguments})", fast)
    _add_mixer(module, patch, method, _slow_mixer_with_kernels(module, method))


def _slow_mixer_with_kernels(module: ModuleView, method: str) -> str:
    """Source text of a function with the statements of a Mamba-1 mixer's method, but for convolution and scan."""
    body = module.function(method).body
    texts = [ast.unparse(statement) for statement in body]
    starts, convolves, discretizes = (
        next(i for i, text in enumerate(texts) if isinstance(body[i], kind) and found in text)
        for kind, found in ((ast.If, "ssm_state"), (ast.If, "self.conv1d("), (ast.Assign, "discrete_A = "))
    )
    softplus, activated = next((i, s) for i, s in enumerate(body) if "softplus(" in texts[i])
    assert isinstance(activated, ast.Assign)
    pads = [
        branch
        for node in ast.walk(body[convolves])
        if isinstance(node, ast.If)
        for branch in (node.body, node.orelse)
        if any(isinstance(s, ast.Assign) and "nn.functional.pad(" in ast.unparse(s) for s in branch)
    ]
    steps = body[convolves + 1 : softplus] + body[softplus + 1 : discretizes]
    return _SLOW_MIXER_WITH_KERNELS.format(
        parameters=", ".join(["self", *module.parameters(method)]),
        method=_SLOW_MIXER,
        projections=_text(body[:starts]),
        filled=_text([s for s in pads[0] if "self.conv1d(" not in ast.unparse(s)], " " * 8),
        parts=_text(steps),
        step=ast.unparse(activated.targets[0]),
        output=_text(body[-2:]),
    )


def _is_gated(call: ast.Call) -> bool:
    """Whether the scan also multiplies its output by a gate `z`."""
    return any(keyword.arg == "z" and ast.unparse(keyword.value) != "None" for keyword in call.keywords)


def find_lightning_attention(module: ModuleView) -> Iterator[Match]:
    """Classes with lightning attention (MiniMax); single tokens that continue from a state stay Transformers'."""
    for name, forward in module.methods():
        if module.fingerprint(forward) in _LIGHTNING:
            cache = "cache" if "cache" in module.parameters(forward) else "past_key_values"
            yield Match(name, OP, _SLOT.variant, partial(_write_lightning, forward, cache))


def _write_lightning(forward: str, cache: str, patch: PatchConfig) -> None:
    bound, documents = f"self.{_SLOT.attribute}", "cu_seqlens_in(kwargs)"
    alone = f"lightning_by_document(self, hidden_states, {documents})"
    patch.insert_before(
        forward, _LIGHTNING_START, f"if {bound} is None and {documents} is not None:\n    return {alone}, None"
    )
    patch.replace(forward, _LIGHTNING_BLOCKS, f"range(num_blocks if {bound} is None else 0)", slot=_SLOT)
    given = f"self.slope_rate, query_states, key_states, value_states, {cache} is not None, {documents}"
    call = f"attn_output, attn_weights_inter = lightning_attention({bound}, {given})"
    patch.replace(forward, _LIGHTNING_OUTPUT, f"if attn_output:\n    $match\nelse:\n    {call}")
    add_imports(patch, _CALLS, "lightning_attention", "lightning_by_document")


FORMS = (find_scans, find_lightning_attention)
