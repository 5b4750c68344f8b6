import io
import json
import tarfile

import pytest

from opslot.data.records import columns_in, read_records, split_into_shards


def write_tar(file, members):
    with tarfile.open(file, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file


def read(file):
    problems = []
    shards = split_into_shards([file], {}, 1 << 20, problems)
    records = [record for shard in shards for record in read_records(shard, {}, problems)]
    return records, problems


def test_column_that_names_no_member_is_malformed(tmp_path):
    file = write_tar(tmp_path / "a.tar", [("1.png", b"1"), ("1.json", b'{"images": "photo.png"}')])
    records, (problem,) = read(file)
    assert records == []
    assert "images is 'photo.png', which is none of its files (1.png)" in problem


@pytest.mark.parametrize("suffix", ["mp4", "m4v", "flv", "ts", "mpg"])
def test_videos_of_a_sample(tmp_path, suffix):
    file = write_tar(tmp_path / "a.tar", [("1.json", b"{}"), (f"1.{suffix}", b"1")])
    ((_, record),), _ = read(file)
    assert record["videos"] == [{"bytes": b"1", "path": f"1.{suffix}"}]


def test_members_of_one_name_are_a_sample(tmp_path):
    messages = [{"role": "user", "content": [{"type": "audio", "audio": "b.wav"}, {"type": "image"}]}]
    file = write_tar(
        tmp_path / "a.tar",
        [
            ("s/1.json", b'{"messages": []}'),
            ("s/1.png", b"1"),
            ("s/1.left.png", b"2"),
            ("s/2.txt", b"hello"),
            ("s/2.flac", b"3"),
            ("b.json", json.dumps({"messages": messages}).encode()),
            ("b.wav", b"4"),
            ("b.jpg", b"5"),
        ],
    )
    records, problems = read(file)
    assert not problems
    first, second, third = (record for _, record in records)
    assert [source["bytes"] for source in first["images"]] == [b"1", b"2"]
    assert second == {"text": "hello", "audios": [{"bytes": b"3", "path": "s/2.flac"}]}
    assert third["messages"][0]["content"][0]["audio"] == {"bytes": b"4", "path": "b.wav"}
    assert third["images"] == [{"bytes": b"5", "path": "b.jpg"}]
    assert "audios" not in third
    assert str(records[2][0]) == f"{file}, sample 3"
    assert columns_in(file, "auto", []).names == ["messages", "images"]


@pytest.mark.parametrize(("data", "problem"), [(b"{", "1.json is not JSON"), (b"[]", "1.json holds an array")])
def test_bad_json_is_reported_with_its_sample(tmp_path, data, problem):
    records, problems = read(write_tar(tmp_path / "a.tar", [("1.json", data), ("2.json", b'{"text": "x"}')]))
    assert [record for _, record in records] == [{"text": "x"}]
    assert len(problems) == 1
    assert problems[0].startswith(f"{tmp_path / 'a.tar'}, sample 1: {problem}")


def test_truncated_file_is_reported(tmp_path):
    file = write_tar(tmp_path / "a.tar", [("1.json", b'{"text": "x"}'), ("2.wav", bytes(4000))])
    file.write_bytes(file.read_bytes()[:3000])
    assert "not a readable tar file" in read(file)[1][0]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("a header", "invalid header at byte 2,048"),
        ("cut between members", "cut off after 2,048 bytes"),
        ("two archives", "data after the end of the archive"),
    ],
)
def test_members_that_tarfile_leaves_out_are_reported(tmp_path, damage, reason):
    """It takes a damaged header for the end of the archive."""
    file = write_tar(tmp_path / "a.tar", [(f"{n}.{suffix}", b"{}") for n in range(4) for suffix in ("json", "png")])
    data = bytearray(file.read_bytes())
    if damage == "a header":
        data[2048 + 148] ^= 0xFF
    file.write_bytes({"a header": data, "cut between members": data[:2048], "two archives": data + data}[damage])
    _, (problem,) = read(file)
    assert reason in problem
