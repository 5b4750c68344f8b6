import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opslot._base.errors import DataError
from opslot.data import find_files, read_documents


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_files_and_globs_each_once_in_order(tmp_path):
    a, b = write(tmp_path / "b" / "a.txt", "x"), write(tmp_path / "b.txt", "y")
    problems = []
    assert find_files([str(b), f"{tmp_path}/**/*.txt"], "data.train_path", problems) == [b, a]
    assert problems == []


def test_a_glob_may_find_empty_files_a_name_may_not(tmp_path):
    empty = write(tmp_path / "empty.py", "")
    problems = []
    find_files([f"{tmp_path}/*.py", str(empty)], "data.train_path", problems)
    assert problems == [f"data.train_path: {empty} is empty"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "no such file"),
        ("*.parquet", "no file matches"),
        ("", "is empty; name a text"),
        (".", "is a folder; name its files by a glob"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    problems = []
    find_files(name, "data.train_path", problems)
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\ntwo\n\nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("paragraph", ["one\ntwo", "three\n"]),
    ],
)
def test_what_a_document_is_in_plain_text(tmp_path, sample_by, expected):
    file = write(tmp_path / "a.txt", "one\ntwo\n\nthree\n")
    assert list(read_documents([file], sample_by=sample_by)) == expected


def test_jsonl_and_parquet_give_the_same_documents(tmp_path):
    texts = ["ü\nx", "second", ""]
    lines = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps({"n": 1, "body": text}) for text in texts))
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3], "body": texts}), table)
    assert list(read_documents([lines], "body")) == list(read_documents([table], "body")) == ["ü\nx", "second"]


def test_every_malformed_line_is_named(tmp_path):
    first = write(tmp_path / "a.jsonl", '{"text": "good"}\n{"text": \n{"content": "x"}\n[1]\n')
    second = write(tmp_path / "b.jsonl", '{"text": 3}\n')
    with pytest.raises(DataError) as caught:
        list(read_documents([first, second]))
    message = str(caught.value)
    assert f"{first}, line 2: not JSON" in message
    assert f"{first}, line 3: no field 'text'; it has content. Set data.text_field" in message
    assert f"{first}, line 4: holds a list" in message
    assert f"{second}, line 1: field 'text' holds a int" in message


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path):
    file = write(tmp_path / "a.jsonl", "{\n" * 25)
    with pytest.raises(DataError) as caught:
        list(read_documents([file]))
    assert str(caught.value).count("not JSON") == 10
    assert "and 15 more" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8 text (byte 3)"),
        ("a.txt", b" \n", "no text in any of them"),
        ("a.jsonl", b'{"text": ""}\n', "no text in any of them"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\\ud83d cut"}\n',
            "line 2: field 'text' holds \\ud83d, half of a character",
        ),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n", "line 1: not JSON (Exceeds the limit"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"[" * 99999 + b"\n", "line 1: not JSON (maximum recursion depth"),
        ("a.jsonl", b'{"text": "x"\n', "line 1: not JSON (Expecting ',' delimiter: line 1 column 13"),
        ("a.parquet", b"PAR1 but no more", "not a readable parquet file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    with pytest.raises(DataError) as caught:
        list(read_documents([write(tmp_path / name, content)]))
    assert message in str(caught.value)


def test_whole_characters_of_two_halves_are_text(tmp_path):
    assert list(read_documents([write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00"}')])) == ["\U0001f600"]


def test_parquet_strings_of_every_kind(tmp_path):
    texts = pa.array(["one", None, "two", "one"])
    for number, column in enumerate([texts, texts.cast(pa.large_string()), texts.dictionary_encode()]):
        file = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": column}), file)
        assert list(read_documents([file])) == ["one", "two", "one"]


def test_a_file_that_may_not_be_read_is_named_before_reading(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", "x")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for name in (str(file), f"{tmp_path}/*.txt"):
        problems = []
        find_files(name, "data.train_path", problems)
        assert problems == [f"data.train_path: {file} may not be read; check its permissions"]


def test_parquet_without_the_column(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["x"], "n": [1]}), file)
    with pytest.raises(DataError, match="no column 'text'; it has content, n"):
        list(read_documents([file]))
    with pytest.raises(DataError, match="column 'n' holds int64, not strings"):
        list(read_documents([file], "n"))
