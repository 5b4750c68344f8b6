import json

import pytest

from opslot._base.files import missing_path_hint, replacing, write_json, write_text


def test_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "new" / "file"
    write_text(path, "old\n")
    with replacing(path) as beside:
        beside.write_text("half of the n")
        assert path.read_text() == "old\n"
        beside.write_text("new\n")
    assert path.read_text() == "new\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["os.fsync", "pathlib.Path.replace"])
def test_interrupted_write_keeps_only_the_old_file(tmp_path, monkeypatch, moment):
    def full(*_: object) -> None:
        raise OSError("disk full")

    path = tmp_path / "file"
    write_json(path, {"step": 1})
    monkeypatch.setattr(moment, full)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_files_follow_the_umask(tmp_path):
    write_text(tmp_path / "ours", "text")
    (tmp_path / "plain").write_text("text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_missing_path_names_the_nearest_entry(tmp_path):
    (tmp_path / "Qwen3-0.6B").mkdir()
    assert missing_path_hint(str(tmp_path / "qwen3-0.6b")) == f"did you mean {tmp_path / 'Qwen3-0.6B'}?"
    assert missing_path_hint(str(tmp_path / "llama")).startswith("relative paths start at")
    assert missing_path_hint(str(tmp_path / "no" / "folder")).startswith("relative paths start at")
