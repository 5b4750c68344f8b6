import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opslot._base.errors import DataError
from opslot.data.corpus import open_corpus
from opslot.data.encoder import TextEncoder
from opslot.data.sources import find_files


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_files_and_globs_are_found_once_in_order(tmp_path):
    a, b = write(tmp_path / "b" / "a.txt", "x"), write(tmp_path / "b.txt", "y")
    problems = []
    assert find_files([str(b), f"{tmp_path}/**/*.txt"], "data.train_path", problems) == [b, a]
    assert problems == []


def test_empty_files_are_allowed_in_globs_only(tmp_path):
    empty = write(tmp_path / "empty.md", "")
    problems = []
    find_files([f"{tmp_path}/*.md", str(empty)], "data.train_path", problems)
    assert problems == [f"data.train_path: {empty} is empty"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "no such file"),
        ("*.parquet", "no file matches"),
        ("", "is empty; set it to a text"),
        (".", "is a folder; select its files with a glob"),
    ],
)
def test_missing_paths(tmp_path, monkeypatch, name, message):
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
def test_sample_by(tmp_path, sample_by, expected, read_documents):
    file = write(tmp_path / "a.txt", "one\ntwo\n\nthree\n")
    assert read_documents([file], sample_by=sample_by) == expected


def test_jsonl_and_parquet_have_equal_documents(tmp_path, read_documents):
    texts = ["ü\nx", "second", ""]
    lines = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps({"n": 1, "body": text}) for text in texts))
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3], "body": texts}), table)
    assert read_documents([lines], "body") == read_documents([table], "body") == ["ü\nx", "second"]


def test_every_malformed_line_is_reported(tmp_path, read_documents):
    first = write(tmp_path / "a.jsonl", '{"text": "good"}\n{"text": \n{"content": "x"}\n[1]\n')
    second = write(tmp_path / "b.jsonl", '{"text": 3}\n')
    with pytest.raises(DataError) as caught:
        read_documents([first, second])
    message = str(caught.value)
    assert f"{first}, line 2: not JSON" in message
    assert f"{first}, line 3: no field 'text'; it has content. Set data.text_field" in message
    assert f"{first}, line 4: holds an array" in message
    assert f"{second}, line 1: field 'text' holds a number" in message


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_missing_field_is_one_error_for_a_file(tmp_path, read_documents, suffix):
    file = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        file.write_text('{"messages": []}\n' * 3)
    else:
        pq.write_table(pa.table({"messages": [["x"]] * 3}), file)
    with pytest.raises(DataError) as caught:
        read_documents([file])
    assert str(caught.value).count("For chats, set task: sft") == str(caught.value).count(str(file)) == 1


def test_long_list_of_problems_is_truncated(tmp_path, read_documents):
    file = write(tmp_path / "a.jsonl", "{\n" * 25)
    with pytest.raises(DataError) as caught:
        read_documents([file])
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
            "line 2: field 'text' holds \\ud83d, half of a surrogate pair",
        ),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n", "line 1: not JSON (Exceeds the limit"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"[" * 99999 + b"\n", "line 1: not JSON (maximum recursion depth"),
        ("a.jsonl", '{"text": "é"}\n'.encode("latin-1"), "line 1: not UTF-8 (invalid continuation byte at byte 10)"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "line 1: not UTF-8 (invalid start byte at byte 0)"),
        ("a.jsonl", b'{"text": "x"\n', "line 1: not JSON (Expecting ',' delimiter: line 1 column 13"),
        ("a.parquet", b"PAR1 but no more", "not a readable parquet file"),
    ],
)
def test_unreadable_files_raise(tmp_path, name, content, message, read_documents):
    with pytest.raises(DataError) as caught:
        read_documents([write(tmp_path / name, content)])
    assert message in str(caught.value)


def test_columns_of_one_name_raise(tmp_path, read_documents):
    column = pa.array(["x"])
    pq.write_table(pa.table([column, column], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="it has several columns named 'text'"):
        read_documents([tmp_path / "a.parquet"])


def test_file_names_that_are_not_text(tmp_path, tokenizer):
    name = os.fsdecode(b"caf\xe9.txt")
    try:
        file = write(tmp_path / name, "x")
    except OSError:
        pytest.skip("the file system requires names in UTF-8")
    corpus = open_corpus([file], TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache"))
    assert corpus.num_documents() == 1


def test_surrogate_pairs_are_text(tmp_path, read_documents):
    assert read_documents([write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00"}')]) == ["\U0001f600"]


def test_parquet_strings_of_every_kind(tmp_path, read_documents):
    texts = pa.array(["one", None, "two", "one"])
    for number, column in enumerate([texts, texts.cast(pa.large_string()), texts.dictionary_encode()]):
        file = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": column}), file)
        assert read_documents([file]) == ["one", "two", "one"]


def test_file_without_permission_is_reported(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", "x")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for name in (str(file), f"{tmp_path}/*.txt"):
        problems = []
        find_files(name, "data.train_path", problems)
        assert problems == [f"data.train_path: {file} is not readable; check its permissions"]


def test_parquet_without_the_column_raises(tmp_path, read_documents):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["x"], "n": [1]}), file)
    with pytest.raises(DataError, match="no column 'text'; it has content, n"):
        read_documents([file])
    with pytest.raises(DataError, match="column 'n' holds int64, not strings"):
        read_documents([file], "n")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.html", "README", "a.jsonl.bz2", "a.txt.zst"])
def test_unknown_extensions_are_reported_unless_a_format_is_given(tmp_path, name):
    file = write(tmp_path / name, "x")
    problems = []
    assert find_files(str(file), "data.train_path", problems) == [file]
    (problem,) = problems
    assert problem.startswith(f"data.train_path: {file} has ")
    compressed = name.endswith(("bz2", "zst"))
    assert ("decompress it" if compressed else "set data.format to text, jsonl or parquet") in problem
    problems.clear()
    find_files(str(file), "data.train_path", problems, "text")
    assert problems == []


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".jsonlines", ".jl", ".json", ".JSONL"])
def test_json_lines_extensions(tmp_path, suffix, read_documents):
    file = write(tmp_path / f"a{suffix}", '{"text": "one"}\n')
    problems = []
    assert read_documents(find_files(str(file), "data.train_path", problems)) == ["one"]
    assert problems == []


def test_format_overrides_the_extension(tmp_path, tokenizer):
    file = write(tmp_path / "a.log", '{"text": "ab"}\n')
    lengths, encoder = {}, TextEncoder(tokenizer, append_eos=False)
    for format in ("text", "jsonl"):
        corpus = open_corpus([file], encoder, format=format, cache_dir=str(tmp_path / "cache"))
        lengths[format] = corpus.num_tokens()
    assert lengths == {"text": 15, "jsonl": 2}


def test_links_to_one_file_are_read_once(tmp_path, caplog):
    file = write(tmp_path / "a.txt", "x")
    (tmp_path / "b.txt").symlink_to(file)
    (tmp_path / "c.txt").hardlink_to(file)
    problems = []
    with caplog.at_level("WARNING", logger="opslot"):
        assert find_files(f"{tmp_path}/*.txt", "data.train_path", problems) == [file]
    assert caplog.text.count("are the same file; it is read once") == 2
    assert problems == []


def test_missing_dataset_id_names_the_path_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems = []
    find_files("HuggingFaceFW/fineweb", "data.train_path", problems)
    assert "name its files, such as hf://datasets/HuggingFaceFW/fineweb/**/train*.parquet" in problems[0]


def test_files_of_the_hub(hub, tmp_path):
    hub.repositories["datasets/org/name"] = folder = tmp_path / "remote"
    (folder / "data").mkdir(parents=True)
    for name in ("data/train-0.jsonl", "data/train-1.jsonl", "data/test.jsonl"):
        (folder / name).write_text(f'{{"text": "{name}"}}\n')
    problems = []
    found = find_files("hf://datasets/org/name/data/train-*.jsonl", "data.train_path", problems)
    assert [file.name for file in found] == ["train-0.jsonl", "train-1.jsonl"]
    assert problems == []
    assert find_files("hf://datasets/org/name/*.csv", "data.train_path", problems) == []
    problem = problems.pop()
    assert "no file of the data set matches hf://datasets/org/name/*.csv\n" in problem
    assert "found: data/test.jsonl, data/train-0.jsonl, data/train-1.jsonl\n" in problem
    assert f"hint: see its files on {hub.endpoint}/datasets/org/name" in problem
    assert find_files("hf://datasets/org/other/*.jsonl", "data.train_path", problems) == []
    assert "the repository does not exist" in problems[0]
