import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from opslot._base.errors import ConfigError
from opslot.trainer import RunConfig, load_config
from opslot.trainer.parse import _leaf_types, to_yaml
from opslot.trainer.paths import PATHS

REPOSITORY = Path(__file__).parents[2]

ISSUE = """
model:
  config_path: m
  model_path: w
  tokenizer_path: t
  ops_implementation:
    rms_norm_implementation: eager
    moe_implementation: auto
    overrides: {"model.layers.0.*": {rms_norm_implementation: auto}}
data:
  train_path: [a.jsonl, "b/*.parquet"]
  max_seq_len: 1024
  packing: true
train:
  output_dir: out
  max_steps: 100
  global_batch_size: 16
  micro_batch_size: 4
  lr: 3e-4
  lr_scheduler: linear
  warmup_steps: 10
  weight_decay: 0
  max_grad_norm: 1
  seed: 7
  activation_checkpointing: selective
  checkpoint:
    save_steps: 50
    resume_from: latest
  eval_steps: null
  sp_size: 1
  ep_size: 1
"""


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_home_folder_in_quotes_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(
        tmp_path,
        "{model: {config_path: ~/m}, train: {output_dir: ~/out}, data: {train: [{path: [~/a.txt]}, {path: ~/b}]}}",
    )
    config = load_config(["~/run.yaml", "--data.eval_path", "[~/c.txt, d.txt]", "--data.cache_dir=~/cache"])
    assert config.model.config_path == f"{tmp_path}/m"
    assert config.train.output_dir == f"{tmp_path}/out"
    assert config.data.train == [{"path": [f"{tmp_path}/a.txt"]}, {"path": f"{tmp_path}/b"}]
    assert config.data.eval_path == [f"{tmp_path}/c.txt", "d.txt"]
    assert config.data.cache_dir == f"{tmp_path}/cache"


def test_fields_of_paths_are_listed():
    """A field with a path that is not listed would keep "~"."""
    names = {name for name in _leaf_types(RunConfig) if name.endswith(("_path", "_dir", "_from"))}
    assert names <= set(PATHS)


def test_documented_fields_are_read(tmp_path):
    config = load_config(write(tmp_path, ISSUE))
    assert config.train.lr == 3e-4
    assert config.train.max_grad_norm == 1.0
    assert config.train.eval_steps is None
    assert config.data.train_path == ["a.jsonl", "b/*.parquet"]
    assert config.model.ops_implementation["overrides"]["model.layers.0.*"] == {"rms_norm_implementation": "auto"}


def test_command_line_overrides_the_file(tmp_path):
    config = load_config(
        [
            str(write(tmp_path, ISSUE)),
            "--train.lr",
            "1e-3",
            "--train.checkpoint.save_steps=null",
            "--train.optimizer.beta2",
            "0.99",
            "--model.ops_implementation.rms_norm_implementation",
            "auto",
            "--data.train_path",
            "c.txt",
        ]
    )
    assert config.train.lr == 1e-3
    assert config.train.checkpoint.save_steps is None
    assert config.train.optimizer.beta2 == 0.99
    assert config.model.ops_implementation["rms_norm_implementation"] == "auto"
    assert config.model.ops_implementation["moe_implementation"] == "auto"
    assert config.data.train_path == "c.txt"


def test_saved_configuration_round_trips(tmp_path):
    config = load_config(write(tmp_path, ISSUE))
    assert load_config(write(tmp_path, to_yaml(config))) == config
    assert load_config(write(tmp_path, "")) == RunConfig()


def test_all_problems_in_one_error(tmp_path):
    text = """
    model: {config_pth: m, torch_dtype: int8}
    data: {max_seq_len: many, packing: true}
    trian: {lr: 1}
    train: {learning_rate: 1, lr_scheduler: cosin, optimizer: {betas: 1}, sp_size: 1.5}
    """
    with pytest.raises(ConfigError) as caught:
        load_config([str(write(tmp_path, text)), "--train.max_step", "3", "--train.seed", "x"])
    message = str(caught.value)
    assert "10 problems" in message
    for line in (
        "model.config_pth is not a field; did you mean model.config_path?",
        "model.torch_dtype: expected one of float32, bfloat16, found 'int8'",
        "data.max_seq_len: expected int | null, found 'many'",
        "trian.lr is not a field; did you mean train.lr?",
        "train.learning_rate is not a field; use train.lr",
        "train.lr_scheduler: expected one of constant, linear, cosine, warmup_stable_decay, found 'cosin'",
        "train.optimizer.betas is not a field; use train.optimizer.beta1 and train.optimizer.beta2",
        "train.sp_size: expected int, found 1.5",
        "train.max_step is not a field; did you mean train.max_steps?",
        "train.seed: expected int, found 'x'",
    ):
        assert line in message


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("model.torch_dtype", "expected one of float32, bfloat16, found 'auto'; .*leave the field out for float32"),
        ("train.fsdp.param_dtype", "found 'auto'; leave the field out for the default"),
    ],
)
def test_dtype_auto_raises_with_what_the_default_is(field, message):
    with pytest.raises(ConfigError, match=f"{field}: .*{message}"):
        load_config([f"--{field}", "auto"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lr: 1", "is not valid YAML"),
        ("- a\n- b\n", "found: a list\n  hint: give the sections model, data and train"),
        ("train: 3\n", "train is a section, found 3; set its fields"),
    ],
)
def test_invalid_files_raise(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.lr"], "--train.lr needs a value"),
        (["lr=3"], "is not an option"),
        (
            ["--train.lr=3", "run.yaml"],
            "'run.yaml' is not an option; set fields with --section.field VALUE, and give a",
        ),
        (["--lr", "3"], "did you mean train.lr?"),
        (["--train.lora.rank", "4"], "did you mean lora.r?"),
        (["--train.profile", "[2, 3]"], "did you mean train.logging.profile?"),
    ],
)
def test_invalid_overrides_raise(tmp_path, arguments, message):
    with pytest.raises(ConfigError) as caught:
        load_config([str(write(tmp_path, "")), *arguments])
    assert message in str(caught.value)


def test_every_field_is_documented():
    def check(cls):
        assert len(fields(cls)) <= 27
        for field in fields(cls):
            assert f"{field.name}:" in cls.__doc__
            default = field.default_factory() if callable(field.default_factory) else None
            if is_dataclass(default):
                check(type(default))

    check(RunConfig)


def test_help_is_fast_and_lists_examples():
    code = (
        "import sys; from opslot.trainer import cli_train; code = cli_train(['--help']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--train.checkpoint.resume_from" in done.stdout
    assert "opslot train run.yaml --train.max_steps 200 --train.lr 1e-3" in done.stdout


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(file):
    load_config(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {lr: 1e-3}\ndata: {}\ntrain: {max_steps: 3}\n",
            r"train is given here\n(.*\n)*.*and again here, in the same section.*\n.*line 3",
        ),
        (
            "train:\n  lr: 1e-3\n  seed: 1\n  lr: 1e-4\n",
            r"lr is given here\n(.*\n)*.*and again here, in the same section.*\n.*line 4",
        ),
        ("train: 5", "train is a section, found 5; set its fields, such as train.output_dir"),
        ("train:\n  weight_decay:\n", "train.weight_decay: expected float, found None"),
    ],
)
def test_duplicate_and_null_keys_raise(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_null_overrides_require_optional_fields(tmp_path):
    file = str(write(tmp_path, "train: {max_steps: 3}"))
    assert load_config([file, "--train.max_steps", "null"]).train.max_steps is None
    with pytest.raises(ConfigError, match=r"train.weight_decay: expected float, found None"):
        load_config([file, "--train.weight_decay", "null"])


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("evaluation.prompts", "[5]", "[5]; put quotes around a text"),
        ("evaluation.prompts", "[a, true]", "['a', True]; put quotes around a text"),
        ("evaluation.prompts", "[2026-01-01]", "[datetime.date(2026, 1, 1)]; put quotes around a text"),
        ("evaluation.prompts", "[null]", "[None]"),
        ("evaluation.prompts", "[[a]]", "[['a']]"),
        ("evaluation.prompts", "a", "'a'; give a list in brackets"),
        ("lora.target_modules", "[q_proj, 5]", "['q_proj', 5]; put quotes around a text"),
        ("data.train", "[5]", "[5]"),
    ],
)
def test_elements_of_a_list_have_its_type(tmp_path, field, value, found):
    section, name = field.split(".")
    for given in ([f"--{field}", value], [str(write(tmp_path, f"{section}:\n  {name}: {value}"))]):
        with pytest.raises(ConfigError) as caught:
            load_config(given)
        assert re.search(rf"- {field}: expected .*list\[.*, found {re.escape(found)}", str(caught.value))


def test_list_of_quoted_texts_is_an_option():
    assert load_config(["--evaluation.prompts", '["5", x, {text: y}]']).evaluation.prompts == ["5", "x", {"text": "y"}]
    assert load_config(["--lora.target_modules", "[qk]_proj"]).lora.target_modules == "[qk]_proj"


def test_merged_key_can_be_overridden(tmp_path):
    config = load_config(write(tmp_path, "data: {<<: {max_seq_len: 8, text_field: body}, max_seq_len: 16}"))
    assert (config.data.max_seq_len, config.data.text_field) == (16, "body")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("train.learning_rate", "use train.lr"),
        ("train.gradient_checkpointing", "use train.activation_checkpointing: full or selective"),
        ("train.optim", "use train.optimizer.name"),
        ("model.load_in_4bit", "use lora.quantization: nf4"),
        ("model.bnb_4bit_compute_dtype", "use train.fsdp.param_dtype"),
        ("train.bf16", "use train.fsdp.param_dtype: bfloat16"),
        ("train.gradient_accumulation_steps", "use train.global_batch_size and train.micro_batch_size"),
        ("train.per_device_train_batch_size", "use train.micro_batch_size"),
        ("train.num_train_epochs", "use train.num_epochs"),
        ("train.lr_scheduler_type", "use train.lr_scheduler"),
        ("train.logging_steps", "use train.logging.log_steps"),
        ("train.max_length", "use data.max_seq_len"),
        ("data.dataset_text_field", "use data.text_field"),
        ("train.lr_decay_style", "use train.lr_scheduler"),
        ("train.ulysses_parallel_size", "use train.sp_size"),
        ("model_name_or_path", "use model.model_path"),
        ("train.assistant_only_loss", "use data.train_on: assistant"),
        ("train.metric_for_best_model", "use evaluation.best_metric"),
        ("data.dataset_name", "use data.train_path"),
        ("model.path", "use model.model_path"),
        ("train.save_steps", "did you mean train.checkpoint.save_steps?"),
        ("train.resume_from", "did you mean train.checkpoint.resume_from?"),
        ("train.freeze_vit", "use train.freeze: [vision]"),
        ("train.vit_lr", "use train.lr_of: {vision: LR}"),
        ("model.moe_implementation", "use model.ops_implementation.moe_implementation"),
        ("model.rms_norm_implementation", "use model.ops_implementation.rms_norm_implementation"),
        ("train.fsdp.replicas", "use train.fsdp.dp_replicate"),
        ("train.fsdp.compute_dtype", "use train.fsdp.param_dtype"),
        ("cutoff_len", "use data.max_seq_len"),
        ("finetuning_type", "use lora.r for adapters"),
        ("base_model", "use model.model_path"),
        ("sample_packing", "use data.packing"),
        ("val_set_size", "use data.eval_fraction"),
        ("warmup_ratio", "use train.warmup_steps; a value below 1 is a fraction"),
        # Resemble fields of other meanings.
        ("streaming", "`opslot train --help-all` lists the fields"),
        ("loraplus_lr_ratio", "`opslot train --help-all` lists the fields"),
        ("do_train", "opslot does not need it, remove it"),
        ("train.shuffle_dataset", "use data.shuffle"),
        ("train.remove_unused_columns", "opslot does not need it, remove it"),
    ],
)
def test_field_names_of_other_trainers(tmp_path, name, hint):
    with pytest.raises(ConfigError) as caught:
        load_config([str(write(tmp_path, "")), f"--{name}", "1"])
    assert f"{name} is not a field; {hint}" in str(caught.value)


def test_fields_in_sections_of_other_trainers(tmp_path):
    text = (
        "model: {_target_: x.from_pretrained}\noptimizer: {_component_: torch.optim.AdamW, lr: 1e-5}\n"
        "step_scheduler: {global_batch_size: 8}\ntrain: {optimizer: {name: adamw_torch_fused}}"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    for problem in (
        "model._target_ is not a field; opslot does not need it, remove it",
        "optimizer.lr is not a field; did you mean train.lr?",
        "step_scheduler.global_batch_size is not a field; did you mean train.global_batch_size?",
        "found 'adamw_torch_fused'; did you mean adamw_torch?",
    ):
        assert problem in str(caught.value)


def test_hints_name_existing_fields():
    from opslot.trainer.field_hints import _FIELDS
    from opslot.trainer.parse import _leaf_types

    known = {
        *_leaf_types(RunConfig),
        "train.optimizer",
        "train.fsdp",
        "train.logging",
        "train.checkpoint",
        "evaluation",
    }
    for hint in _FIELDS.values():
        for field in re.findall(
            r"\b(?:train|data|model|evaluation)\.[a-z0-9_.]*[a-z0-9_]", hint.replace("model.compile()", "")
        ):
            assert field in known or field.startswith("model.ops_implementation."), hint


def test_field_given_nested_and_dotted_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.lr is given twice, nested and with dots"):
        load_config(write(tmp_path, "train: {lr: 1e-3}\ntrain.lr: 1e-4\n"))


def test_deeply_nested_yaml_raises(tmp_path):
    with pytest.raises(ConfigError, match="YAML that is nested too deeply"):
        load_config(write(tmp_path, "train: " + "[" * 5000 + "]" * 5000))


def test_configuration_without_a_file():
    config = load_config(["--train.lr", "1e-3", "--data.train_path", "a.txt"])
    assert (config.train.lr, config.data.train_path) == (1e-3, "a.txt")


def test_help_lists_only_options_that_exist(capsys):
    from opslot.trainer import cli_train

    cli_train(["--help"])
    assert "train_path+" not in capsys.readouterr().out


def test_help_lists_common_fields_and_help_all_every_field(capsys):
    from opslot.trainer import cli_train
    from opslot.trainer.parse import COMMON, _leaf_types

    assert cli_train(["--help"]) == 0
    common = capsys.readouterr().out
    assert cli_train(["--help-all"]) == 0
    every = capsys.readouterr().out
    fields = _leaf_types(RunConfig)
    assert fields.keys() >= COMMON
    assert all(f"--{name}" in every for name in fields)
    shown = re.findall(r"^  --([a-z_.0-9]+)", common, flags=re.MULTILINE)
    assert set(shown) == COMMON
    assert "opslot train --help-all" in common
