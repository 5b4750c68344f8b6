"""The hint for runs whose GPU waits for the host."""

from types import SimpleNamespace

import pytest

from opslot.trainer.callbacks.host_bound import HostBoundCallback
from opslot.trainer.config import RunConfig


def hints(waits, config):
    callback, printed = HostBoundCallback(), []
    trainer = SimpleNamespace(config=config, print=printed.append)
    for data_wait, device_wait in waits:
        callback.on_step_end(trainer, SimpleNamespace(data_wait=data_wait, device_wait=device_wait))
    return printed


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr("opslot.trainer.train_settings.best_device", lambda: SimpleNamespace(type="cuda"))
    return RunConfig()


def test_hint_once_where_the_host_never_waits(config):
    (hint,) = hints([(0.0, 0.5)] * 3 + [(0.0, 0.02)] * 20, config)
    assert hint.startswith("the GPU waits for the host in each step; train.cuda_graphs: true")


@pytest.mark.parametrize("wait", [(0.0, 0.4), (0.4, 0.0)], ids=["device", "data"])
def test_no_hint_where_the_host_waits(config, wait):
    assert hints([(0.0, 0.0)] * 3 + [wait] * 20, config) == []


@pytest.mark.parametrize("changed", ["used", "excluded"])
def test_hint_without_cuda_graphs(config, changed):
    if changed == "used":
        config.train.cuda_graphs = True
    else:
        config.train.sp_size = 2
    (hint,) = hints([(0.0, 0.0)] * 20, config)
    assert hint.endswith("larger micro batches (train.micro_batch_size) use it better")


@pytest.mark.gpu
def test_small_model_on_a_gpu_gets_a_hint(train):
    code, output, _ = train("--train.max_steps", "12", "--model.device", "cuda")
    assert code == 0
    assert output.count("the GPU waits for the host") == 1
