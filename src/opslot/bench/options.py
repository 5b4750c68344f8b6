"""What a benchmark measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; the options of `opslot bench`, under the same names.

    Attributes:
        ops: only these ops, in this order, and no training step; empty for all.
        models: training steps of these models, and shapes of the first: a config.json, its folder, or a model type.
        layers: another number of layers for `models`.
        tokens: number of tokens that ops are timed with; None for each case's own on a GPU.
        tune: add the times to this machine's profile, which `auto` reads.
        baselines: hf, liger, quack, veomni.
        baseline_paths: by baseline, a folder of packages that only this baseline imports.
        batch, length: samples of a training step, and tokens of each; None for those of the device.
        image_size: side in pixels of an image that each sample begins with; `length` then counts the text.
        audio_seconds: of an audio after it; `length` then counts the text.
        steps: training steps to time; 0 for none.
        steps_only: no ops.
        compile: also time training steps with `model.compile()`, also in mode "reduce-overhead" (CUDA graphs), and with
            `opslot.parallelize(model, compile=True)`.
        curve: number of steps of a loss curve.
        ops_implementation: opslot's, in training steps.
        implementations: of the training step, in this order; empty for opslot and all of `baselines`.
        timeout: seconds that one implementation of a training step may take.
        trace: add torch.profiler's table of a training step.
        compile_ops: time torch.compile of eager ops.
        baselines_only: time the ops of the baselines alone.
        dtype: default bfloat16; float32 on a CPU.
        device: default the best of this machine.
        commit: commit to record outside a git repository.
    """

    ops: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    layers: int | None = None
    tokens: int | None = None
    tune: bool = False
    baselines: tuple[str, ...] = ()
    baseline_paths: Mapping[str, str] = field(default_factory=dict)
    batch: int | None = None
    length: int | None = None
    image_size: int = 0
    audio_seconds: int = 0
    steps: int = 8
    steps_only: bool = False
    compile: bool = False
    curve: int | None = None
    ops_implementation: Mapping[str, str] = field(default_factory=dict)
    implementations: tuple[str, ...] = ()
    timeout: int = 900
    trace: bool = False
    compile_ops: bool = True
    baselines_only: bool = False
    dtype: str | None = None
    device: str | None = None
    commit: str | None = None
