"""Two processes of which one or all are killed, or with a full disk: checkpoints are kept and runs resume."""

import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from opslot.checkpoint import training_state
from opslot.trainer import checkpointing, cli_train
from tests.trainer.runs import losses, run_config

SCRIPT = """
import os, resource, signal, sys, threading
from opslot.checkpoint import training_state
from opslot.trainer import TextTrainer, cli_train, loss_curve
from opslot.trainer.callbacks.base import Callback

case, file, flag = sys.argv[1:]
rank = int(os.environ["RANK"])
written = threading.Event()

class Mishap(Callback):
    def on_step_end(self, trainer, record):
        if record.step == 3:
            trainer.saver.wait()
            if rank == 1 and case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and case == "full":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        if record.step == 5 and case == "midway" and rank == 0:
            written.wait(60)
            open(flag, "w").close()
            threading.Event().wait()

callbacks, finish = TextTrainer.default_callbacks, training_state._finish
TextTrainer.default_callbacks = lambda self: [*callbacks(self), Mishap()]

def never_finish(unfinished, final, snapshot, files):
    if case == "midway" and snapshot.step == 4:
        written.set()
        threading.Event().wait()
    finish(unfinished, final, snapshot, files)

training_state._finish = never_finish
loss_curve.draw_loss_curve = lambda records, path, **_: path.touch()
sys.exit(cli_train([file]))
"""


@pytest.fixture
def config(settings, tmp_path):
    """Write `settings` for six steps with a checkpoint every second, and changes to `train`; returns the file."""
    settings["train"] |= {"micro_batch_size": 1, "checkpoint.save_steps": 2, "max_steps": 6, "lr_scheduler": "constant"}
    # AdamW's first steps amplify rounding in the smallest gradients to full steps of the learning rate.
    settings["train"]["lr"] = 1e-3

    def write(name, **changes):
        file = tmp_path / f"{name}.yaml"
        train = settings["train"] | {"output_dir": str(tmp_path / name)} | changes
        file.write_text(yaml.safe_dump({**settings, "train": train}))
        return str(file)

    return write


@pytest.fixture
def start(forks, free_port, tmp_path):
    """Start two processes on a case of SCRIPT; returns them and the file that they create in the middle of a save."""
    processes = []

    def run(case, file):
        script, flag = tmp_path / "script.py", tmp_path / "midway"
        script.write_text(SCRIPT)
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(2):
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(forks.start(script, case, file, str(flag), env=env))
        return processes, flag

    yield run
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(10)


def finish(processes, seconds=90):
    outputs = [process.communicate(timeout=seconds) for process in processes]
    return [process.returncode for process in processes], [err for _, err in outputs]


def names(folder):
    return [path.name for path in checkpointing.find_checkpoints(folder / "checkpoints")]


def test_killed_rank_is_named_and_the_run_resumes(config, start, tmp_path):
    processes, _ = start("killed", config("run"))
    assert processes[1].wait(90) == -signal.SIGKILL
    died = time.monotonic()
    codes, errors = finish(processes)
    assert time.monotonic() - died < 60
    assert codes == [1, -signal.SIGKILL]
    assert "rank 1 exited without an error message (killed or out of memory)" in errors[0]
    assert "Traceback" not in errors[0]
    assert names(tmp_path / "run") == ["step_00000002"]
    assert cli_train([config("run", **{"checkpoint.resume_from": "latest"})]) == 0
    assert cli_train([config("straight")]) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)


def test_kill_during_a_save_resumes_from_the_previous_checkpoint(ranks, config, start, tmp_path):
    """Step 5 was taken while the checkpoint of step 4 was being written, so the kill finds it unfinished."""
    processes, flag = start("midway", config("run"))
    deadline = time.monotonic() + 90
    while not flag.exists() and processes[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.kill()
    assert finish(processes)[0] == [-signal.SIGKILL] * 2
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / ".unfinished-step_00000004" / ".metadata").is_file()
    assert names(tmp_path / "run") == ["step_00000002"]
    assert len(losses(tmp_path / "run")) == 5
    assert ranks.run(run_config, config("run", **{"checkpoint.resume_from": "latest"})) == [0, 0]
    assert cli_train([config("straight")]) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith(".")] == []


def test_full_disk_on_one_rank_raises_on_all(config, start, tmp_path):
    codes, errors = finish(start("full", config("run"))[0])
    assert codes == [1, 1]
    output = "".join(errors)
    assert output.count("opslot: error: ") == 1
    assert "the checkpoint of step 4 cannot be written" in output
    assert "rank 1: [Errno 27] File too large" in output
    assert "Traceback" not in output
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_00000002"]
    training_state.read_state(Path(tmp_path / "run" / "checkpoints" / "step_00000002"))
