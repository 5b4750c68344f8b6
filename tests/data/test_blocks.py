"""Files in blocks: no document lost, cut or twice, whatever a block holds; each tokenized once by whoever is first."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opslot._base.errors import DataError
from opslot.data import open_corpus
from opslot.data.sources import read_documents, read_spans, split_files

NEWLINES = ("\n", "\r\n", "\n\n", "\r\n\r\n", "\n\n\n")
pieces = st.lists(st.tuples(st.sampled_from(["", "a", "bü", "word and word", "😀" * 5]), st.sampled_from(NEWLINES)))


def documents_of(files, max_bytes, sample_by="document"):
    problems = []
    blocks = split_files(files, "text", max_bytes, problems)
    assert all(len(block) == 1 or sum(span.size for span in block) <= max_bytes for block in blocks)
    documents = [text for block in blocks for text in read_spans(block, "text", sample_by, problems)]
    assert problems == []
    return documents


@settings(deadline=None)
@given(pieces=pieces, max_bytes=st.integers(1, 40))
def test_lines_are_the_same_in_blocks_of_any_size(tmp_path_factory, pieces, max_bytes):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes("".join(text + end for text, end in pieces).encode())
    whole = [line for line in file.read_text().split("\n") if line]
    assert documents_of([file], max_bytes, "line") == whole


@settings(deadline=None)
@given(pieces=pieces, max_bytes=st.integers(1, 40))
def test_paragraphs_and_cut_documents_lose_nothing(tmp_path_factory, pieces, max_bytes):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes("".join(text + end for text, end in pieces).encode())
    paragraphs = [part.strip("\n") for part in file.read_text().split("\n\n")]
    found = [text.strip("\n") for text in documents_of([file], max_bytes, "paragraph")]
    assert found == [part for part in paragraphs if part]
    cut = documents_of([file], max_bytes)
    assert "".join(cut).replace("\n", "") == file.read_text().replace("\n", "")
    assert all(text.endswith("\n") for text in cut[:-1])


@pytest.mark.parametrize("max_bytes", [1, 7, 30, 200, 5000])
def test_json_lines_in_blocks_of_any_size(tmp_path, max_bytes):
    texts = [f"{number} " + "ü" * (number * 7 % 40) for number in range(60)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, part in zip(files, (texts[:45], texts[45:]), strict=True):
        file.write_text("\n".join(json.dumps({"text": text}) for text in part))
    assert documents_of(files, max_bytes) == texts


@pytest.mark.parametrize("rows", [7, 50])
@pytest.mark.parametrize("max_bytes", [30, 300, 9000])
def test_parquet_rows_in_blocks_of_any_size(tmp_path, rows, max_bytes):
    texts = [f"{number} " + "x" * (number * 7 % 40) for number in range(50)]
    pq.write_table(pa.table({"n": range(50), "text": texts}), tmp_path / "a.parquet", row_group_size=rows)
    assert documents_of([tmp_path / "a.parquet"], max_bytes) == texts


def test_a_line_is_named_by_its_number_in_the_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' * 50 + "bad\n" + '{"text": "good"}\n' * 50)
    problems = []
    blocks = split_files([file], "text", 100, problems)
    found = [len(list(read_spans(block, "text", "document", problems))) for block in blocks]
    assert sum(found) == 100
    assert [problem.split(": ")[0] for problem in problems] == [f"{file}, line 51"]
    with pytest.raises(DataError, match="line 51: not JSON"):
        list(read_documents([file]))


@pytest.fixture
def corpus(tmp_path, tokenizer):
    """Open a corpus of twenty lines a block, of the lines 0 to 199."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number:03}"}) + "\n" for number in range(200)))

    def make(**options):
        return open_corpus([file], tokenizer, cache_dir=str(tmp_path / "cache"), block_bytes=320, **options)

    return make


def texts_of(corpus, tokenizer):
    blocks = [corpus.block(number) for number in range(len(corpus.sizes))]
    return [tokenizer.decode(b.tokens(i)[:-1]) for b in blocks for i in range(len(b.lengths))]


def names(tmp_path):
    return sorted(path.name for path in tmp_path.glob("cache/opslot-*/*"))


def test_a_block_is_tokenized_when_it_is_asked_for(tmp_path, corpus, tokenizer):
    one = corpus()
    assert len(one.sizes) == 10
    assert names(tmp_path) == []
    assert one.block(3).lengths.tolist() == [4] * 20
    assert names(tmp_path) == ["000003.arrow", "lock"]
    assert not one.is_complete
    assert texts_of(one, tokenizer) == [f"{number:03}" for number in range(200)]
    assert one.is_complete
    assert (one.num_documents(), one.num_tokens()) == (200, 800)
    assert corpus().is_complete
    assert one.block(0).tokens(0).dtype == np.uint16


def tokenize_all(corpus, written):
    write = corpus._write

    def count(number, check):
        written.put(number)
        time.sleep(0.01)
        write(number, check)

    corpus._write = count
    corpus.prepare(range(len(corpus.sizes)))


def test_processes_at_once_on_one_cache_share_the_work(corpus, tokenizer):
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


def hold_first_block(corpus, flag):
    def wait(*_):
        flag.set()
        signal.pause()

    corpus._tokenize = wait
    corpus.prepare([0])


def test_a_process_killed_at_a_block_leaves_it_to_others(tmp_path, corpus):
    context = multiprocessing.get_context("fork")
    flag = context.Event()
    process = context.Process(target=hold_first_block, args=(corpus(), flag), daemon=True)
    process.start()
    assert flag.wait(60)
    one = corpus()
    # Another is at it.
    assert not one._write_unless_others_do(0, lambda: None)
    process.kill()
    process.join()
    assert names(tmp_path) == ["lock"]
    assert len(one.block(0).lengths) == 20


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_processes_tokenize_ahead_and_end(corpus, tokenizer):
    one = corpus()
    one.start_processes(2, list(range(10)))
    wait_for(lambda: corpus().is_complete)
    one.check_processes()
    assert texts_of(one, tokenizer) == [f"{number:03}" for number in range(200)]
    one.close()
    one.check_processes()


def test_what_a_process_finds_wrong_is_told_before_it_is_needed(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' * 50 + "bad\n")
    one = open_corpus([file], tokenizer, cache_dir=str(tmp_path / "cache"), block_bytes=170)
    one.start_processes(1, list(range(len(one.sizes))))
    wait_for(lambda: one._processes._members[0][0].exitcode is not None)
    with pytest.raises(DataError, match="line 51: not JSON"):
        one.check_processes()
    with pytest.raises(DataError, match="line 51: not JSON"):
        one.prepare([len(one.sizes) - 1])
    one.close()


def test_a_killed_process_is_an_error(corpus, monkeypatch):
    one = corpus()
    one._tokenize = lambda texts: os.kill(os.getpid(), signal.SIGKILL)
    one.start_processes(1, [0])
    wait_for(lambda: one._processes._members[0][0].exitcode is not None)
    with pytest.raises(DataError, match=r"has ended \(signal 9; out of memory\?\)\n.*lower data\.num_workers"):
        one.check_processes()
    one.close()


def start_and_wait(corpus, pids):
    tokenize = corpus._tokenize

    def slowly(texts):
        time.sleep(0.5)
        return tokenize(texts)

    corpus._tokenize = slowly
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
def test_processes_end_with_a_parent_that_is_killed(corpus):
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


def test_a_long_wait_is_told(corpus, monkeypatch, caplog):
    monkeypatch.setattr("opslot.data.corpus._LONG_SECONDS", 0.0)
    one = corpus()
    with caplog.at_level("INFO", logger="opslot"):
        one.prepare([0])
    assert "for text to be tokenized; data.num_workers says how many do it ahead" in caplog.text


def test_a_file_that_is_gone_at_the_start(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"gone\.txt: No such file or directory"):
        open_corpus([tmp_path / "gone.txt"], tokenizer, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "No such file or directory while the run was reading it"),
        (lambda file: file.write_text("other"), "it has changed while the run was reading it"),
        (lambda file: os.utime(file, ns=(1, 1)), "it has changed while the run was reading it"),
    ],
)
def test_a_file_that_goes_midway(tmp_path, corpus, change, message):
    one = corpus()
    one.block(0)
    change(tmp_path / "a.jsonl")
    assert len(one.block(0).lengths) == 20
    with pytest.raises(DataError, match=message):
        one.block(1)
    assert names(tmp_path) == ["000000.arrow", "lock"]


def test_a_full_disk_leaves_no_half_block(tmp_path, corpus, monkeypatch):
    one = corpus()
    one.block(0)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"cannot be kept in .*/cache: .*No space left on device\n.*make room there"):
        one.block(1)
    assert names(tmp_path) == ["000000.arrow", "lock"]
    monkeypatch.undo()
    assert len(one.block(1).lengths) == 20


def test_a_cache_that_is_complete_is_only_read(tmp_path, corpus, monkeypatch):
    corpus().num_tokens()
    monkeypatch.setattr("os.open", lambda *_: pytest.fail("opened for writing"))
    assert corpus().num_tokens() == 800


def test_a_cache_that_cannot_be_locked_is_refused(corpus, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with pytest.raises(DataError, match=r"Operation not supported\n.*a folder that can be written and locked"):
        corpus().block(0)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:99])])
def test_a_damaged_cache_is_named(tmp_path, corpus, damage):
    one = corpus()
    one.prepare([0])
    (path,) = tmp_path.glob("cache/opslot-*/000000.arrow")
    damage(path)
    with pytest.raises(DataError, match=r"is missing or damaged: .*000000\.arrow.*\n  hint: remove "):
        one.block(0)
