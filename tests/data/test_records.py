"""Compressed files, JSON arrays, Arrow files and saved data sets."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest

from opslot._base.errors import DataError
from opslot.data.corpus import open_corpus
from opslot.data.encoder import TextEncoder
from opslot.data.mixture import MixedDataset
from opslot.data.packing import PackedDataset
from opslot.data.sources import find_files

TEXTS = [f"text {number} ü" for number in range(40)]
RECORDS = [{"text": text, "n": {"deep": [1, "]"]}} for text in TEXTS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.gz", gzip.compress(LINES[:100], mtime=0) + gzip.compress(LINES[100:], mtime=0)),
        ("a.jsonl.zst", zstd(LINES)),
        ("a.json", json.dumps(RECORDS).encode()),
        ("a.json", json.dumps(RECORDS, indent=2).encode()),
        ("a.json.gz", gzip.compress(b" \n" + json.dumps(RECORDS).encode(), mtime=0)),
        ("a.json", LINES),
    ],
)
def test_json_files(tmp_path, name, content, read_documents, monkeypatch):
    # Items of an array cross the parts that are read at a time.
    monkeypatch.setattr("opslot.data.records._SEARCHED_BYTES", 50)
    (tmp_path / name).write_bytes(content)
    problems = []
    assert read_documents(find_files(str(tmp_path / name), "data.train_path", problems)) == TEXTS
    assert problems == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "cannot be decompressed"),
        ("a.jsonl.gz", LINES, "cannot be decompressed"),
        ("a.jsonl.zst", zstd(LINES)[:40], "a.jsonl.zst: "),
        ("a.json", b'[{"text": "a"}, 3]', "item 2: holds a number; the array must hold objects"),
        ("a.json", b'[{"text": "a"}, {"text": ', "not a JSON array"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"t": 1}\n', mtime=0), "line 2: no field 'text'"),
        ("a.arrow", b"no arrow", "not a readable arrow file"),
    ],
)
def test_damaged_files(tmp_path, name, content, message, read_documents):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_documents([tmp_path / name])
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("max_bytes", [50, 1 << 20])
def test_arrow_files_in_shards_of_any_size(tmp_path, tokenizer, kind, max_bytes):
    table = pa.table({"n": range(len(TEXTS)), "text": TEXTS})
    write = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with write(str(tmp_path / "a.arrow"), table.schema) as sink:
        sink.write_table(table, max_chunksize=7)
    encoder = TextEncoder(tokenizer, append_eos=False)
    cache = str(tmp_path / "cache")
    corpus = open_corpus([tmp_path / "a.arrow"], encoder, shard_bytes=max_bytes, cache_dir=cache)
    assert (len(corpus.sizes) > 1) == (max_bytes == 50)
    shards = [corpus.shard(number) for number in range(len(corpus.sizes))]
    found = [tokenizer.decode(shard.tokens(i)) for shard in shards for i in range(len(shard.lengths))]
    assert found == TEXTS


def test_missing_splits_and_files_of_saved_datasets(tmp_path):
    folder = tmp_path / "saved"
    (folder / "test").mkdir(parents=True)
    (folder / "dataset_dict.json").write_text('{"splits": ["test"]}')
    (folder / "test" / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    problems = []
    assert find_files(str(folder), "data.train_path", problems) == []
    assert "has the splits test and none of train; select one as a folder" in problems.pop()
    assert find_files(str(folder), "data.eval_path", problems) == []
    assert "lacks data-0.arrow, which its state.json lists" in problems.pop()
    (folder / "test" / "state.json").write_text("[]")
    assert find_files(str(folder / "test"), "data.train_path", problems) == []
    assert "is not a readable saved data set" in problems.pop()


def test_mixture_visits_each_data_set_in_its_own_order(corpus_of, tmp_path, tokenizer):
    sets = []
    for count in (30, 12):
        file = tmp_path / f"{count}.jsonl"
        file.write_text("".join(f'{{"text": "{"x" * (1 + i % 5)}{i}"}}\n' for i in range(count)))
        corpus = open_corpus([file], TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache"))
        sets.append(PackedDataset(corpus, 16, packing=False, seed=3))
    mixed = MixedDataset(sets, [1, 3], ["a", "b"], seed=3)
    assert mixed.samples_per_epoch == 42
    located = [mixed.locate(number) for number in range(9000)]
    for source in (0, 1):
        assert [index for own, index in located if own == source] == list(
            range(sum(own == source for own, _ in located))
        )
    assert 0.73 < sum(own for own, _ in located) / 9000 < 0.77
    again = MixedDataset(sets, [1, 3], ["a", "b"], seed=3)
    assert again.locate(8999) == located[-1]
    for number in (0, 41, 5000):
        source, index = located[number]
        assert np.array_equal(mixed.tokens(number)[0], sets[source].tokens(index)[0])
        assert mixed.token_counts(number, number + 1)[0] == len(mixed.tokens(number)[0])
    assert mixed.identity()["a: data.train_path"].endswith("weight 0.25")
