"""`opslot report`: a self-contained page about a run."""

import json
from html.parser import HTMLParser

import pytest

from opslot.cli import main
from opslot.trainer.report import REPORT_FILE

_VOID = {"meta"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.references = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "<run>"
    folder.mkdir()
    return folder


def write_metrics(folder, steps, **extra):
    records = [
        {"step": n, "loss": 5.0 / n, "lr": 1e-3, "tokens": n * 100, "tokens_per_s": 1e4, "mfu": 0.4, **extra}
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_report_of_a_run(train, settings, tmp_path, capsys):
    settings["train"] |= {"eval_steps": 2}
    settings["evaluation"] = {"prompts": ["1 and <b>2"], "max_new_tokens": 4}
    settings["data"]["eval_fraction"] = 0.2
    assert train("--train.logging.peak_tflops", "1")[0] == 0
    assert main(["report", str(tmp_path / "out")]) == 0
    found = Page((tmp_path / "out" / REPORT_FILE).read_text())
    text = " ".join(found.text)
    assert found.tags.count("svg") == 8
    for part in ("MFU", "best evaluation loss", "rms_norm/standard", "max_seq_len: 32", "1 and <b>2"):
        assert part in text
    assert "at step 4" in text
    assert found.references == []


def test_prompts_have_the_names_of_their_media(run, tmp_path):
    write_metrics(run, 3)
    (run / "samples.jsonl").write_text('{"step": 2, "prompt": "what?", "media": ["a.png", "b.mp4"], "answer": "one"}\n')
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert "a.png\nb.mp4\nwhat?" in Page((tmp_path / "page.html").read_text()).text


def test_names_and_samples_are_escaped(run, tmp_path):
    write_metrics(run, 3)
    (run / "samples.jsonl").write_text('broken\n{"step": 2, "prompt": "<script>", "answer": "a"}\n')
    (run / "config.yaml").write_text("a: <i>\n")
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    found = Page((tmp_path / "page.html").read_text())
    assert "script" not in found.tags
    assert "i" not in found.tags
    assert "<run>" in found.text


def test_long_runs_and_odd_values(run):
    write_metrics(run, 5000, eval_loss=float("nan"), grad_norm=float("inf"), memory_gib="odd", data_wait=0.0)
    assert main(["report", str(run)]) == 0
    text = (run / REPORT_FILE).read_text()
    Page(text)
    assert "nan" not in text.lower().replace("nanosecond", "")
    assert "Gradient norm" not in text
    assert "Time waiting for data" in text
    assert len(text) < 100_000


def test_one_step_has_a_page(run):
    write_metrics(run, 1)
    assert main(["report", str(run)]) == 0
    Page((run / REPORT_FILE).read_text())


@pytest.mark.parametrize("metrics", [None, "", "no json\n"])
def test_folder_without_metrics_is_an_error(run, metrics, capsys):
    if metrics is not None:
        (run / "metrics.jsonl").write_text(metrics)
    assert main(["report", str(run)]) == 2
    assert "has no metrics" in capsys.readouterr().err
    assert main(["report", str(run / "missing")]) == 2
    assert "no such folder" in capsys.readouterr().err
