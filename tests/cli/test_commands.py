import io
import json
import os
import re

import pytest

from opslot import KERNEL_REGISTRY, KernelSpec
from opslot.bench.run import read_model
from opslot.cli import _parser, main
from opslot.verify import CHECKS
from tests.multimodal import write_model


def test_kernels_json_keys(capsys):
    assert main(["kernels", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"op", "variant", "name", "usable", "reason"} == set(rows[0])
    assert {r["op"] for r in rows} >= {"rms_norm", "attention", "moe_experts", "cross_entropy_loss"}
    eager = [r for r in rows if r["name"] == "eager"]
    assert all(r["usable"] for r in eager)
    assert all(r["reason"] for r in rows if not r["usable"])


def test_kernels_of_an_unknown_op(capsys):
    assert main(["kernels", "--op", "rms_nrm"]) == 2
    assert "did you mean 'rms_norm'" in capsys.readouterr().err


def test_arguments_that_are_not_text_raise(capsys):
    assert main(["generate", "model", "--prompt", os.fsdecode(b"caf\xe9")]) == 2
    assert r"found: caf\xe9" in capsys.readouterr().err


def test_explain_a_folder(moe_config_folder, capsys):
    assert main(["explain", str(moe_config_folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    by_op = {r["op"]: r for r in rows}
    assert set(by_op) == {
        "attention",
        "cross_entropy_loss",
        "load_balancing_loss",
        "moe_experts",
        "rms_norm",
        "rotary_pos_emb",
    }
    assert all(r["why"] for r in rows)
    assert by_op["rms_norm"]["modules"]


def test_explain_a_model_type(capsys):
    assert main(["explain", "qwen3_moe"]) == 0
    assert "Qwen3MoeDecoderLayer.rms_norm x" in capsys.readouterr().out


def test_explain_of_an_unknown_model_type_raises(capsys):
    assert main(["explain", "qwen9"]) == 2
    error = capsys.readouterr().err
    assert "'qwen9' is neither a model's config, nor a YAML file, nor a model type" in error
    assert "a model type such as qwen3" in error


def test_explain_with_a_named_kernel(moe_config_folder, capsys):
    assert main(["explain", str(moe_config_folder), "--set", "rms_norm_implementation=eager"]) == 0
    assert "named by rms_norm_implementation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "/no/such/place"], "no such file or folder"),
        (["explain", "{folder}", "--set", "rms_norm_implementation"], "is not FIELD=VALUE"),
        (["explain", "{folder}", "--set", "rms_norm_implementation=trition"], "did you mean 'triton'"),
        (["explain", "{folder}", "--set", "moe_implementation=fused_npu"], "requires an NPU"),
        (["explain", "{folder}", "--set", "overrides=eager"], "overrides='eager' must map globs"),
        (["verify", "--op", "nothing"], "unknown op 'nothing'"),
        (["verify", "--op", "rms_norm", "--device", "gpu0"], "device 'gpu0' is not a valid device"),
        (["verify", "--op", "rms_norm", "--device", "cuda:99"], "device 'cuda:99': the number of GPUs"),
        (["verify", "--op", "rms_nrm"], "did you mean 'rms_norm'?"),
        (["verify", "--op", "attention,rms_nrm"], "did you mean 'rms_norm'?"),
        (["verify", "--op", "rms_norm", "--dtype", "bfloat16,int8"], "--dtype 'int8' is not a floating dtype"),
        (["verify", "--kernel", "nothing"], "unknown kernel 'nothing'"),
        (["verify", "--kernel", "torch_fusde"], "did you mean 'torch_fused'?"),
        (["verify", "--op", "rms_norm", "--kernel", "sdpa"], "unknown kernel 'sdpa' for 'rms_norm'"),
        (["verify", "--op", "attention", "--kernel", "cudnn", "--device", "cpu"], "can run on this machine"),
    ],
)
def test_invalid_usage_exits_2(moe_config_folder, capsys, arguments, message):
    assert main([a.replace("{folder}", str(moe_config_folder)) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_explain_of_a_training_file_without_model_raises(tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text("")
    assert main(["explain", str(file)]) == 2
    assert "names no model\n  hint: set model.config_path or model.model_path" in capsys.readouterr().err


def test_explain_of_a_training_file_with_a_preset(moe_config_folder, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text(f"model:\n  config_path: {moe_config_folder}\n  ops_implementation: eager\n")
    assert main(["explain", str(file), "--set", "rms_norm_implementation=auto", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["why"] for row in rows if row["op"] == "rotary_pos_emb"} == {"preset eager"}
    assert all("named by" not in row["why"] for row in rows if row["op"] == "rms_norm")


def test_explain_uses_the_compute_dtype_of_a_training_file(moe_config_folder, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text(f"model:\n  config_path: {moe_config_folder}\ntrain:\n  fsdp:\n    param_dtype: bfloat16\n")
    tables = []
    for arguments in (
        [str(file)],
        [str(moe_config_folder), "--dtype", "bfloat16"],
        [str(moe_config_folder), "--dtype", "float32"],
    ):
        assert main(["explain", *arguments]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]


def test_explain_of_an_invalid_model_type_raises(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["qwen3"]}))
    assert main(["explain", str(tmp_path)]) == 2
    assert "names no model_type" in capsys.readouterr().err


def test_convert_round_trip(moe_config_folder, tmp_path, capsys):
    from safetensors.torch import load_file

    import opslot
    from opslot.checkpoint import save_weights

    model = opslot.build_foundation_model(moe_config_folder)
    save_weights(model, tmp_path / "hub")
    assert main(["convert", str(tmp_path / "hub"), str(tmp_path / "stacked"), "--layout", "stacked"]) == 0
    assert main(["convert", str(tmp_path / "stacked"), str(tmp_path / "back"), "--layout", "per_expert"]) == 0
    stacked = load_file(tmp_path / "stacked" / "model.safetensors")
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert main(["convert", str(tmp_path / "hub"), str(tmp_path / "stacked"), "--layout", "stacked"]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_traceback_option(capsys):
    assert main(["kernels", "--op", "nope", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--traceback", "train"], ["train", "--traceback"]])
def test_traceback_of_train(tmp_path, capsys, arguments):
    assert main([*arguments, str(tmp_path / "nothing.yaml")]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "no such file" in err


def test_verify_several_ops(capsys):
    ops = "patch_embed,load_balancing_loss"
    assert main(["verify", "--op", ops, "--device", "cpu", "--dtype", "bfloat16,float32", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {result["op"] for result in results} == {"patch_embed", "load_balancing_loss"}
    assert {result["dtype"] for result in results} == {"bfloat16", "float32"}


def test_interrupted_command_exits_130(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("opslot.cli.kernels.run", interrupted)
    assert main(["kernels"]) == 130
    assert capsys.readouterr().err == "opslot: interrupted\n"
    assert main(["kernels", "--traceback"]) == 130
    assert "KeyboardInterrupt\nopslot: interrupted\n" in capsys.readouterr().err


def test_output_to_a_closed_pipe_is_not_an_error(monkeypatch):
    def closed(_):
        raise BrokenPipeError

    monkeypatch.setattr("opslot.cli.kernels.run", closed)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert main(["kernels"]) == 0


def test_no_command_prints_the_commands(capsys):
    assert main([]) == 2
    assert "opslot discover mistral" in capsys.readouterr().err


def test_help_of_discover_lists_the_checks(capsys):
    with pytest.raises(SystemExit):
        main(["discover", "--help"])
    assert ", ".join(CHECKS) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command",
    [
        "data preview",
        "generate",
        "report",
        "kernels",
        "explain",
        "discover",
        "verify",
        "bisect",
        "bench",
        "convert",
        "merge",
    ],
)
def test_help_shows_examples_on_lines_of_their_own(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert f"\nexamples:\n  opslot {command}" in shown


def test_unknown_command_exits_2():
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--device", "meta"], "on 'meta' nothing is computed"),
        (["bench", "--device", "meta:0"], "on 'meta' nothing is computed"),
        (["verify", "--seed", str(10**20)], "must be a number below 2**32"),
        (["verify", "--seed", "one"], "invalid integer value: 'one'"),
        (["verify", "--workers", "-1"], "-1 must be at least 0"),
        (["bisect", "model", "--seed", str(-(2**40))], "must be a number below 2**32"),
        (["bisect", "model", "--length", "1"], "1 must be at least 2"),
        (["bisect", "model", "--batch", "0"], "0 must be at least 1"),
        (["bisect", "model", "--layers", "0"], "0 must be at least 1"),
        (["data", "preview", "--samples", "-1"], "-1 must be at least 1"),
        (["generate", "model", "--temperature", "-1"], "-1 must be 0 or a finite number above 0"),
    ],
)
def test_invalid_devices_and_numbers_exit_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_verify_exit_codes(capsys):
    from opslot import KERNEL_REGISTRY, KernelSpec

    assert main(["verify", "--op", "attention", "--kernel", "sdpa"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\d+ checks against an fp64 reference: \d+ passed, \d+ unsupported by their kernels\n", out)
    KERNEL_REGISTRY.register(KernelSpec("off_by_a_percent", "rms_norm", "unweighted", lambda: _wrong), replace=True)
    try:
        assert main(["verify", "--op", "rms_norm", "--kernel", "off_by_a_percent"]) == 1
        out = capsys.readouterr().out
        assert re.search(r"off_by_a_percent +float32 +\d+ +failed +", out)
        assert "FAILED rms_norm/unweighted off_by_a_percent" in out
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "unweighted", "off_by_a_percent")


def test_verify_takes_several_ops(capsys):
    arguments = ["--kernel", "torch_fused", "--device", "cpu", "--json"]
    assert main(["verify", "--op", "rms_norm, rotary_pos_emb", *arguments]) == 0
    ops = [row["op"] for row in json.loads(capsys.readouterr().out)]
    assert list(dict.fromkeys(ops)) == ["rms_norm", "rotary_pos_emb"]


def _wrong(hidden_states, eps):
    reference = hidden_states.float() * (hidden_states.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (reference * 1.01).to(hidden_states.dtype)


def test_bisect_exit_codes(moe_config_folder, capsys):
    assert main(["bisect", str(moe_config_folder), "--length", "16"]) == 0
    assert capsys.readouterr().out.startswith("no slot breaks parity")
    right = KERNEL_REGISTRY.load("rms_norm", "standard", "torch_fused")

    def wrong(hidden_states, weight, eps):
        return right(hidden_states, weight, eps) * 1.01

    KERNEL_REGISTRY.register(KernelSpec("wrong", "rms_norm", "standard", lambda: wrong))
    try:
        arguments = [
            "bisect",
            str(moe_config_folder),
            "--layers",
            "1",
            "--set",
            "rms_norm_implementation=wrong",
            "--json",
        ]
        assert main(arguments) == 1
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "wrong")
    found = json.loads(capsys.readouterr().out)
    paths = {path for culprit in found["culprits"] for path in culprit["paths"]}
    assert not found["ok"]
    assert "model.layers.0.self_attn.q_norm" in paths
    assert all(c["kernel"] == "wrong" for c in found["culprits"])


def test_bisect_of_a_model_with_images(tmp_path, capsys):
    write_model(tmp_path)
    assert main(["bisect", str(tmp_path), "--length", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("no slot breaks parity")
    assert "checked on text alone" in captured.err


@pytest.mark.parametrize("layers", [1, 3])
def test_number_of_layers_with_layer_types(moe_config_folder, capsys, layers):
    file = moe_config_folder / "config.json"
    config = json.loads(file.read_text()) | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    file.write_text(json.dumps(config))
    assert main(["bisect", str(moe_config_folder), "--layers", str(layers), "--length", "8"]) == 0
    assert read_model(str(moe_config_folder), layers)["layer_types"] == ["full_attention"] * layers


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("generate ~/m --prompt ~/p --image ~/i", {"model": "{}/m", "prompt": ["~/p"], "media": [("image", "{}/i")]}),
        ("report ~/r -o ~/o", {"folder": "{}/r", "output": "{}/o"}),
        ("explain ~/m", {"model": "{}/m"}),
        ("bisect ~/m", {"model": "{}/m"}),
        ("discover ~/m -o ~/o", {"architecture": "{}/m", "output": "{}/o"}),
        (
            "bench --model ~/m ~/n --output ~/o --plot ~/p --html ~/h --merge ~/a",
            {"models": ["{}/m", "{}/n"], "output": "{}/o", "plot": "{}/p", "html": "{}/h", "merge": ["{}/a"]},
        ),
        ("convert ~/s ~/d --layout stacked", {"source": "{}/s", "destination": "{}/d"}),
        ("merge ~/a ~/d --base ~/b", {"adapter": "{}/a", "destination": "{}/d", "base": "{}/b"}),
    ],
)
def test_home_folder_in_quotes_is_expanded(monkeypatch, command, fields):
    monkeypatch.setenv("HOME", "/home/me")
    options = vars(_parser().parse_args(command.split()))
    assert str({name: options[name] for name in fields}) == str(fields).replace("{}", "/home/me")
