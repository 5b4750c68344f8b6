"""The Triton kernels compile for GPUs: the interpreter accepts code and launch options that the compiler rejects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPS = (
    "attention",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "cross_entropy_loss",
    "expand_kv",
    "layer_norm",
    "linear",
    "load_balancing_loss",
    "mamba_chunk_scan",
    "mlp_activation",
    "moe_experts",
    "resize_heads",
    "rms_norm",
    "rotary_pos_emb",
    "swiglu_mlp",
    "unbind_qkv",
)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_for_several_gpus(op, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile_kernels", op]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert int(run.stdout.splitlines()[-1].split()[0]) > 0
