"""Files in shards: no document lost, split or repeated, for any shard size; each shard is tokenized once."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opslot._base.errors import DataError
from opslot.data.corpus import TokenShard, open_corpus
from opslot.data.encoder import TextEncoder
from opslot.data.records import read_ranges, split_into_shards

NEWLINES = ("\n", "\r\n", "\n\n", "\r\n\r\n", "\n\n\n")
parts = st.lists(st.tuples(st.sampled_from(["", "a", "bü", "word and word", "😀" * 5]), st.sampled_from(NEWLINES)))


def documents_of(files, max_bytes, sample_by="document"):
    problems = []
    shards = split_into_shards(files, {file: ["text"] for file in files}, max_bytes, problems, sample_by=sample_by)
    assert all(len(shard) == 1 or sum(part.size for part in shard) <= max_bytes for shard in shards)
    documents = [text for shard in shards for text in read_ranges(shard, "text", problems)]
    assert problems == []
    return documents


@settings(deadline=None)
@given(parts=parts, max_bytes=st.integers(1, 40))
def test_lines_in_shards_of_any_size(tmp_path_factory, parts, max_bytes):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes("".join(text + end for text, end in parts).encode())
    whole = [line for line in file.read_text().split("\n") if line]
    assert documents_of([file], max_bytes, "line") == whole


@settings(deadline=None)
@given(parts=parts, max_bytes=st.integers(1, 40))
def test_paragraphs_and_split_documents_lose_nothing(tmp_path_factory, parts, max_bytes):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes("".join(text + end for text, end in parts).encode())
    paragraphs = [part.strip("\n") for part in file.read_text().split("\n\n")]
    found = [text.strip("\n") for text in documents_of([file], max_bytes, "paragraph")]
    assert found == [part for part in paragraphs if part]
    cut = documents_of([file], max_bytes)
    assert "".join(cut).replace("\n", "") == file.read_text().replace("\n", "")
    assert all(text.endswith("\n") for text in cut[:-1])


@pytest.mark.parametrize("max_bytes", [1, 7, 30, 200, 5000])
def test_json_lines_in_shards_of_any_size(tmp_path, max_bytes):
    texts = [f"{number} " + "ü" * (number * 7 % 40) for number in range(60)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, part in zip(files, (texts[:45], texts[45:]), strict=True):
        file.write_text("\n".join(json.dumps({"text": text}) for text in part))
    assert documents_of(files, max_bytes) == texts


@pytest.mark.parametrize("rows", [7, 50])
@pytest.mark.parametrize("max_bytes", [30, 300, 9000])
def test_parquet_rows_in_shards_of_any_size(tmp_path, rows, max_bytes):
    texts = [f"{number} " + "x" * (number * 7 % 40) for number in range(50)]
    pq.write_table(pa.table({"n": range(50), "text": texts}), tmp_path / "a.parquet", row_group_size=rows)
    assert documents_of([tmp_path / "a.parquet"], max_bytes) == texts


def test_error_has_the_line_number_in_the_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' * 50 + "bad\n" + '{"text": "good"}\n' * 50)
    problems = []
    shards = split_into_shards([file], {file: ["text"]}, 100, problems)
    found = [len(list(read_ranges(shard, "text", problems))) for shard in shards]
    assert sum(found) == 100
    assert [problem.split(": ")[0] for problem in problems] == [f"{file}, line 51"]


@pytest.fixture
def corpus(tmp_path, tokenizer):
    """Open a corpus of the lines 0 to 199 with twenty lines per shard."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number:03}"}) + "\n" for number in range(200)))

    def make(**options):
        return open_corpus(
            [file], TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache"), shard_bytes=320, **options
        )

    return make


def texts_of(corpus, tokenizer):
    shards = [corpus.shard(number) for number in range(len(corpus.sizes))]
    return [tokenizer.decode(b.tokens(i)[:-1]) for b in shards for i in range(len(b.lengths))]


def names(tmp_path):
    return sorted(path.name for path in tmp_path.glob("cache/opslot-*/*"))


def test_shard_is_tokenized_on_demand(tmp_path, corpus, tokenizer):
    one = corpus()
    assert len(one.sizes) == 10
    assert names(tmp_path) == []
    assert one.shard(3).lengths.tolist() == [4] * 20
    assert names(tmp_path) == ["000003.arrow", "lock"]
    assert not one.is_complete
    assert texts_of(one, tokenizer) == [f"{number:03}" for number in range(200)]
    assert one.is_complete
    assert (one.num_documents(), one.num_tokens()) == (200, 800)
    assert corpus().is_complete
    assert one.shard(0).tokens(0).dtype == np.uint16


def tokenize_all(corpus, written):
    write = corpus._write

    def count(number, check):
        written.put(number)
        time.sleep(0.01)
        write(number, check)

    corpus._write = count
    corpus.prepare(range(len(corpus.sizes)))


def test_processes_share_the_work_on_one_cache(corpus, tokenizer):
    context = multiprocessing.get_context("fork")
    written = context.Queue()
    processes = [context.Process(target=tokenize_all, args=(corpus(), written), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(written.get(timeout=60) for _ in range(10)) == list(range(10))
    assert written.empty()
    assert texts_of(corpus(), tokenizer) == [f"{number:03}" for number in range(200)]


def hold_first_shard(corpus, flag):
    def wait(*_):
        flag.set()
        signal.pause()

    corpus._encode = wait
    corpus.prepare([0])


def test_shard_of_a_killed_process_is_tokenized_by_another(tmp_path, corpus):
    context = multiprocessing.get_context("fork")
    flag = context.Event()
    process = context.Process(target=hold_first_shard, args=(corpus(), flag), daemon=True)
    process.start()
    assert flag.wait(60)
    one = corpus()
    # The other process has locked it.
    assert not one._write_unless_locked(0, lambda: None)
    process.kill()
    process.join()
    assert names(tmp_path) == ["lock"]
    assert len(one.shard(0).lengths) == 20


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_processes_tokenize_ahead_and_exit(corpus, tokenizer):
    one = corpus()
    one.start_processes(2, list(range(10)))
    wait_for(lambda: corpus().is_complete)
    one.check_processes()
    assert texts_of(one, tokenizer) == [f"{number:03}" for number in range(200)]
    one.close()
    one.check_processes()


def test_error_of_a_process_is_raised_before_its_shard_is_needed(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' * 50 + "bad\n")
    one = open_corpus([file], TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache"), shard_bytes=170)
    one.start_processes(1, list(range(len(one.sizes))))
    wait_for(lambda: one._processes._members[0][0].exitcode is not None)
    with pytest.raises(DataError, match="line 51: not JSON"):
        one.check_processes()
    with pytest.raises(DataError, match="line 51: not JSON"):
        one.prepare([len(one.sizes) - 1])
    one.close()


def test_killed_process_raises(corpus, monkeypatch):
    one = corpus()
    one._encode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    one.start_processes(1, [0])
    wait_for(lambda: one._processes._members[0][0].exitcode is not None)
    with pytest.raises(DataError, match=r"exited \(signal 9; out of memory\?\)\n.*lower data\.num_workers"):
        one.check_processes()
    one.close()


def test_processes_compute_with_torch_after_their_parent_did(corpus):
    """As the processors of images do. A fork has none of the threads that OpenMP started in the parent."""

    def encode(*arguments):
        torch.rand(1 << 20).sin()
        return encode_text(*arguments)

    one = corpus()
    encode_text, one._encode = one._encode, encode
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.rand(1 << 20).sin()
        one.start_processes(1, list(range(len(one.sizes))))
        wait_for(lambda: corpus().is_complete)
        one.check_processes()
    finally:
        one.close()
        torch.set_num_threads(threads)


def start_and_wait(corpus, pids):
    encode = corpus._encode

    def slowly(*arguments):
        time.sleep(0.5)
        return encode(*arguments)

    corpus._encode = slowly
    corpus.start_processes(1, list(range(10)))
    pids.put(corpus._processes._members[0][0].pid)
    signal.pause()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_processes_exit_when_their_parent_is_killed(corpus):
    context = multiprocessing.get_context("fork")
    pids = context.Queue()
    parent = context.Process(target=start_and_wait, args=(corpus(), pids))
    parent.start()
    child = pids.get(timeout=60)
    assert is_running(child)
    parent.kill()
    parent.join()
    wait_for(lambda: not is_running(child))
    assert not corpus().is_complete


def test_long_wait_is_logged(corpus, monkeypatch, caplog):
    monkeypatch.setattr("opslot.data.corpus._LONG_SECONDS", 0.0)
    one = corpus()
    with caplog.at_level("INFO", logger="opslot"):
        one.prepare([0])
    assert "s for tokenization; increase data.num_workers to tokenize ahead" in caplog.text


def test_missing_file_raises(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"gone\.txt: No such file or directory"):
        open_corpus([tmp_path / "gone.txt"], TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "No such file or directory while the run was reading it"),
        (lambda file: file.write_text("other"), "it has changed while the run was reading it"),
        (lambda file: os.utime(file, ns=(1, 1)), "it has changed while the run was reading it"),
    ],
)
def test_changed_file_raises_while_it_is_read(tmp_path, corpus, change, message):
    one = corpus()
    one.shard(0)
    change(tmp_path / "a.jsonl")
    assert len(one.shard(0).lengths) == 20
    with pytest.raises(DataError, match=message):
        one.shard(1)
    assert names(tmp_path) == ["000000.arrow", "lock"]


def test_full_disk_leaves_no_partial_shard(tmp_path, corpus, monkeypatch):
    one = corpus()
    one.shard(0)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"cannot be written to .*/cache: .*No space left on device\n.*free disk space"):
        one.shard(1)
    assert names(tmp_path) == ["000000.arrow", "lock"]
    monkeypatch.undo()
    assert len(one.shard(1).lengths) == 20


def test_complete_cache_is_read_only(tmp_path, corpus, monkeypatch):
    corpus().num_tokens()
    monkeypatch.setattr("os.open", lambda *_: pytest.fail("opened for writing"))
    assert corpus().num_tokens() == 800


def test_cache_without_lock_support_raises(corpus, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with pytest.raises(DataError, match=r"Operation not supported\n.*a folder that can be written and locked"):
        corpus().shard(0)


def flip_a_bit_of_a_token(path):
    data = bytearray(path.read_bytes())
    data[data.find(TokenShard(path).tokens(1).tobytes())] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:99]), flip_a_bit_of_a_token],
    ids=["missing", "truncated", "flipped bit"],
)
def test_damaged_cache_raises(tmp_path, corpus, damage):
    one = corpus()
    one.prepare([0])
    (path,) = tmp_path.glob("cache/opslot-*/000000.arrow")
    damage(path)
    with pytest.raises(DataError, match=r"is missing or damaged: .*000000\.arrow\n  found: .*\n  hint: delete "):
        one.shard(0)
