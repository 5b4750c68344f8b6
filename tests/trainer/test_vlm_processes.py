"""Task vlm in two processes: the same losses as in one, and errors of one rank end both."""

import contextlib
import io

import pytest
import yaml

from opslot.trainer.callbacks.writers import read_metrics
from tests.trainer.runs import losses, run_config


def run_and_capture(file):
    from opslot.trainer import cli_train

    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli_train([file])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def write(settings, tmp_path):
    """Write a configuration of task vlm with an output folder of that name; returns the file."""
    from tests.multimodal import write_model, write_samples

    settings["task"] = "vlm"
    settings["model"] = {"config_path": str(write_model(tmp_path / "vlm"))}
    settings["data"] |= {"train_path": str(write_samples(tmp_path / "samples")), "max_seq_len": 193, "shuffle": False}
    settings["train"] |= {"global_batch_size": 2, "micro_batch_size": 1, "max_steps": 3, "lr": 1e-3}

    def make(name, **data):
        file = tmp_path / f"{name}.yaml"
        whole = {**settings, "data": settings["data"] | data}
        whole["train"] = settings["train"] | {"output_dir": str(tmp_path / name)}
        file.write_text(yaml.safe_dump(whole))
        return str(file)

    return make


def damage(tmp_path):
    (tmp_path / "samples" / "img" / "1_0.png").write_bytes(b"no image")


def assert_reported_once(errors):
    assert errors.count("opslot: error: ") == 1
    assert "chat.jsonl, line 2: " in errors
    assert "1_0.png" in errors


def test_undecodable_image_ends_both_ranks(write, ranks, tmp_path):
    file = write("run")
    damage(tmp_path)
    answers = ranks.run(run_and_capture, file, timeout=90)
    assert all(code for code, *_ in answers)
    assert_reported_once("".join(error for *_, error in answers))


@pytest.mark.slow
def test_image_of_one_rank_that_is_damaged_after_tokenization(write, ranks, torchrun, tmp_path):
    assert ranks.run(run_config, write("run"), timeout=90) == [0, 0]
    damage(tmp_path)
    process = torchrun(2, write("again"))
    _, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    assert_reported_once(errors)


def test_ranks_skip_the_same_samples(write, ranks, tmp_path):
    one, two = (write(name, on_bad_sample="skip") for name in ("one", "two"))
    damage(tmp_path)
    assert run_config(one) == 0
    (code, out, _), (other, *_) = ranks.run(run_and_capture, two, timeout=90)
    assert (code, other) == (0, 0)
    assert "1 samples left out: malformed" in out
    curves = [losses(tmp_path / name) for name in ("one", "two")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


DDP = {"data_parallel_mode": "ddp"}


@pytest.mark.quick("sp", "ddp")
@pytest.mark.parametrize(
    "changes", [{}, {"sp_size": 2}, DDP, DDP | {"sp_size": 2}], ids=["fsdp", "sp", "ddp", "ddp-sp"]
)
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


@pytest.mark.parametrize("freeze", [["language_model"], ["vision"]], ids=lambda freeze: freeze[0])
def test_text_on_one_rank_trains_nothing_where_the_language_model_is_frozen(settings, tmp_path, ranks, freeze):
    from tests.multimodal import write_model, write_samples

    settings["task"] = "vlm"
    settings["model"] = {"config_path": str(write_model(tmp_path / "vlm"))}
    settings["data"] |= {"train_path": str(write_samples(tmp_path / "samples", 6)), "max_seq_len": 193}
    # Rank 0 has text, two images, and one image; rank 1 has an image, text, and two images.
    settings["data"] |= {"shuffle": False, "packing": False}
    settings["train"] |= {"global_batch_size": 2, "micro_batch_size": 1, "max_steps": 3, "lr": 1e-3, "freeze": freeze}
    curves = []
    for name in ("one", "two"):
        settings["train"] |= {"output_dir": str(tmp_path / name), **(DDP if name == "two" else {})}
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        codes = [run_config(str(config))] if name == "one" else ranks.run(run_config, str(config), timeout=90)
        assert set(codes) == {0}
        curves.append([(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)])
    assert all(norm > 0 for _, norm in curves[0])
    assert curves[1] == [pytest.approx(row, rel=1e-4) for row in curves[0]]


@pytest.mark.quick("fsdp-1,2,0,3,4,5")
@pytest.mark.parametrize("order", [(1, 2, 0, 3, 4, 5), (0, 3, 1, 2, 4, 5)], ids=lambda order: ",".join(map(str, order)))
@pytest.mark.parametrize("changes", [{}, {"sp_size": 2}], ids=["fsdp", "sp"])
def test_step_of_text_alone_does_not_move_the_encoder(write, settings, tmp_path, ranks, order, changes):
    """Dummy inputs gave it gradients of zero, with which AdamW decays weights and moves them by their momentum."""
    settings["train"] |= {"weight_decay": 0.5, "lr_scheduler": "constant", "checkpoint": {"save_steps": 1}}
    settings["data"] |= {"packing": False}
    one = write("one")
    file = tmp_path / "samples" / "chat.jsonl"
    lines = file.read_text().splitlines()
    # The samples 0 and 3 are text.
    file.write_text("".join(f"{lines[number]}\n" for number in order))
    assert run_config(one) == 0
    settings["train"] |= changes | {"max_steps": 2}
    assert ranks.run(run_config, write("two"), timeout=90) == [0, 0]
    # The checkpoint has no state of parameters that have had no gradient.
    settings["train"] |= {"max_steps": 3, "checkpoint": {"resume_from": "latest"}}
    assert ranks.run(run_config, write("two"), timeout=90) == [0, 0]
    curves = [losses(tmp_path / name) for name in ("one", "two")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
