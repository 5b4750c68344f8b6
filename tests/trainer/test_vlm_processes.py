"""Task vlm in two processes: the same losses as in one."""

import pytest
import yaml

from opslot.trainer.callbacks import read_metrics


def run_config(file):
    from opslot.trainer import cli_train

    return cli_train([file])


@pytest.mark.quick("sp")
@pytest.mark.parametrize("changes", [{}, {"sp_size": 2}], ids=["fsdp", "sp"])
def test_packed_samples(settings, tmp_path, ranks, changes):
    from tests.multimodal import write_model, write_samples

    settings["task"] = "vlm"
    settings["model"] = {"config_path": str(write_model(tmp_path / "vlm"))}
    settings["data"] |= {"train_path": str(write_samples(tmp_path / "samples")), "max_seq_len": 193}
    settings["train"] |= {"global_batch_size": 2, "micro_batch_size": 1, "max_steps": 2, "lr": 1e-3}
    curves = []
    for name, own in (("one", None), ("two", changes)):
        settings["train"] |= {"output_dir": str(tmp_path / name), **(own or {})}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings))
        codes = [run_config(str(file))] if own is None else ranks.run(run_config, str(file), timeout=90)
        assert set(codes) == {0}
        curves.append([(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)])
    assert curves[1] == [pytest.approx(row, rel=1e-4) for row in curves[0]]
