"""Drift: a changed upstream symbol is found, named, and shown with its lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from opslot.patchgen import PatchConfig, PatchError, Slot
from opslot.patchgen.cli import main
from opslot.patchgen.lock import Lock, check, lock_path, survey
from opslot.patchgen.materialization import require_patch
from opslot.patchgen.releases import find_release
from opslot.patchgen.source import installed_release

SOURCE = '''
    def rotate_half(x):
        """Doc."""
        return -x


    def rotary(q):
        return rotate_half(q)


    class Norm:
        def forward(self, x):
            # a comment
            y = x.float()

            return self.weight * y


    class Attention:
        def forward(self, q):
            return rotary(q)


    def unrelated():
        return 1
'''


@pytest.fixture(autouse=True)
def releases(tmp_path, monkeypatch, make_release):
    """Makes releases inside the cache, where `find_release` looks for sources that are not installed."""
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path / "cache"))

    def make(source: str, version: str):
        return make_release(source, version=version, root=tmp_path / "cache" / "transformers" / version)

    return make


@pytest.fixture
def patch(patch):
    patch.slot_method("Norm.forward", Slot("rms_norm"), args="x, self.weight")
    patch.slot_calls("rotary", Slot("rotary_pos_emb", "full"))
    patch.depends_on("transformers.models.toy.modeling_toy", "rotate_half")
    return patch


@pytest.fixture
def locked(patch, releases) -> Lock:
    lock = Lock()
    symbols, problems = survey("toy", patch, releases(SOURCE, "9.0.0"))
    assert problems == []
    lock.record("toy", "9.0.0", symbols, patch.slots)
    return lock


def report(patch: PatchConfig, release, lock: Lock) -> str:
    return "\n".join(str(problem) for problem in check("toy", patch, release, lock, download=False))


def test_locked_symbols(locked):
    prefix = "transformers.models.toy.modeling_toy:"
    names = [name.removeprefix(prefix) for name in locked.archs["toy"]["9.0.0"]]
    assert names == ["Attention.forward", "Norm.forward", "rotary", "rotate_half"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another comment"),
        ('"""Doc."""', '"""Another doc."""'),
        ("\n\n            return self", "\n            return self"),
        ("return 1", "return 2"),
    ],
)
def test_comments_docstrings_layout_and_other_symbols_are_no_drift(patch, locked, releases, old, new):
    assert old in SOURCE
    assert report(patch, releases(SOURCE.replace(old, new), "9.1.0"), locked) == ""


def test_drift_names_symbol_release_and_lines(patch, locked, releases):
    text = report(patch, releases(SOURCE.replace("self.weight * y", "(1 + self.weight) * y"), "9.1.0"), locked)
    assert text.startswith("toy Norm.forward on transformers 9.1.0: differs from the locked 9.0.0\n")
    assert "    -    return self.weight * y\n" in text
    assert "    +    return (1 + self.weight) * y" in text
    assert "Attention" not in text


def test_drift_of_a_dependency(patch, locked, releases):
    text = report(patch, releases(SOURCE.replace("return -x", "return x"), "9.1.0"), locked)
    assert text.startswith("toy rotate_half on transformers 9.1.0")


def test_drift_without_the_old_text_shows_new_lines(patch, locked, releases, tmp_path):
    (tmp_path / "cache/transformers/9.0.0").rename(tmp_path / "gone")
    changed = SOURCE.replace("y = x.float()", "y = x.double()\n            y = y + 1")
    text = report(patch, releases(changed, "9.1.0"), locked)
    assert "the text of 9.0.0 is not available" in text
    assert text.endswith("    line 13:     y = x.double()\n    line 14:     y = y + 1")


def test_removed_symbol_without_the_old_text(patch, locked, releases, tmp_path):
    (tmp_path / "cache/transformers/9.0.0").rename(tmp_path / "gone")
    text = report(patch, releases(SOURCE.replace("y = x.float()\n", "\n"), "9.1.0"), locked)
    assert "line 11: (1 locked line(s) are gone after this one)" in text


def test_edited_installation_is_reported(patch, locked, releases):
    text = report(patch, releases(SOURCE.replace("x.float()", "x.half()"), "9.0.0"), locked)
    assert "toy Norm.forward on transformers 9.0.0: differs from the locked 9.0.0" in text
    assert "x.half()" in text


def test_every_failure_is_reported(patch, locked, releases):
    changed = SOURCE.replace("class Norm", "class RMSNorm").replace("return rotary(q)", "return q")
    text = report(patch, releases(changed, "9.1.0"), locked)
    assert "has no Norm.forward; similar names: RMSNorm.forward" in text
    assert "at least one call(s) of rotary" in text
    assert text.count("the patch does not apply") == 2
    assert "Norm.forward is gone" in text


def test_lost_slot_names_symbol_and_lines(patch, locked, releases):
    """Like a release whose norm is not a reviewed form: discovery skips the slot."""
    found = PatchConfig(patch.source_module)
    found.slot_calls("rotary", Slot("rotary_pos_emb", "full"))
    found.depends_on("transformers.models.toy.modeling_toy", "rotate_half")
    text = report(found, releases(SOURCE.replace("self.weight * y", "(1 + self.weight) * y"), "9.1.0"), locked)
    assert "toy Norm.forward on transformers 9.1.0: lost the slot rms_norm/standard that it has in 9.0.0" in text
    assert "toy Norm.forward on transformers 9.1.0: differs from the locked 9.0.0\n" in text
    assert "    +    return (1 + self.weight) * y" in text


def test_slot_that_the_lock_does_not_list(patch, locked, releases):
    release = releases(SOURCE, "9.0.0")
    patch.slot_method("Attention.forward", Slot("attention"), args="q")
    assert "Attention.forward on transformers 9.0.0: has the slot attention/standard" in report(patch, release, locked)


def test_symbols_that_differ_from_the_lock(patch, locked, releases):
    patch.depends_on("transformers.models.toy.modeling_toy", "unrelated")
    text = report(patch, releases(SOURCE, "9.0.0"), locked)
    assert "toy unrelated on transformers 9.0.0: the patch relies on it" in text
    del patch.dependencies[:]
    text = report(patch, releases(SOURCE, "9.0.0"), locked)
    assert "toy rotate_half on transformers 9.0.0: locked, but no patch relies on it" in text


def test_nearest_locked_release():
    lock = Lock(archs={"toy": {"5.9.0": {}, "5.17.0": {}, "5.10.1": {}}})
    found = {version: lock.nearest("toy", version) for version in ("5.8.0", "5.9.0", "5.16.9", "5.18.0")}
    assert found == {"5.8.0": "5.9.0", "5.9.0": "5.9.0", "5.16.9": "5.10.1", "5.18.0": "5.17.0"}
    assert lock.nearest("other", "5.9.0") is None


def test_unlocked_architecture(patch, releases):
    assert "not in the lock; run" in report(patch, releases(SOURCE, "9.0.0"), Lock())


def test_lock_file_round_trip(locked, tmp_path):
    path = tmp_path / "patchgen.lock"
    locked.lines["unused"] = ["0"]
    locked.archs["toy"]["9.2.0"] = {"a:b": "absent"}
    locked.slots["toy"]["9.2.0"] = ()
    locked.archs["toy"]["9.10.0"] = dict(locked.archs["toy"]["9.0.0"])
    locked.slots["toy"]["9.10.0"] = locked.slots["toy"]["9.0.0"]
    locked.save(path)
    again = Lock.load(path)
    assert again.archs == locked.archs
    assert again.slots == locked.slots
    assert "unused" not in again.lines
    first = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == first
    assert Lock.load(tmp_path / "missing") == Lock()


@pytest.mark.parametrize("text", ["{", "{}", "[]", json.dumps({"format": 99, "archs": {}, "lines": {}})])
def test_damaged_lock(tmp_path, text):
    path = tmp_path / "patchgen.lock"
    path.write_text(text)
    with pytest.raises(PatchError, match=r"patchgen\.lock (is damaged|has format 99)"):
        Lock.load(path)


def test_check_command(patch, locked, releases, tmp_path, monkeypatch, capsys):
    """A seeded change fails, `--fix` accepts it, and the next check passes."""
    (tmp_path / "toy_patch.py").write_text(
        "from opslot.patchgen import Slot, PatchConfig\n"
        "patch = PatchConfig('transformers.models.toy.modeling_toy')\n"
        "patch.slot_method('Norm.forward', Slot('rms_norm'), args='x, self.weight')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lock = tmp_path / "patchgen.lock"
    releases(SOURCE.replace("x.float()", "x.double()"), "9.1.0")

    def run(*args: str, versions: tuple[str, ...] = ("9.0.0",)) -> tuple[int, str]:
        status = main(["toy_patch", *args, "--lock", str(lock), "--transformers", *versions])
        return status, capsys.readouterr().out

    assert run("--check", "--fix")[0] == 0
    assert run("--check") == (0, "1 architecture, transformers 9.0.0: no problems\n")
    status, out = run("--check", versions=("9.0.0", "9.1.0"))
    assert status == 1
    assert "toy Norm.forward on transformers 9.1.0: differs from the locked 9.0.0" in out
    assert "    +    y = x.double()" in out
    assert run("--check", "--fix", versions=("9.1.0",))[0] == 0
    assert run("--check", versions=("9.0.0", "9.1.0"))[0] == 0
    sys.modules.pop("toy_patch")


@pytest.mark.slow
def test_supported_architectures_agree_with_the_committed_lock():
    """As `patchgen --check` does, which `make lint` runs."""
    lock, release = Lock.load(lock_path()), installed_release()
    assert {"llama", "qwen3_moe", "qwen3_vl", "deepseek_v3", "gemma3", "gpt_oss"} <= set(lock.archs)
    problems = [
        problem
        for arch in lock.archs
        if release.version in lock.archs[arch]
        for problem in check(arch, require_patch(arch, release), release, lock, download=False)
    ]
    assert problems == []


def test_lock_holds_no_upstream_text():
    text = lock_path().read_text()
    assert "return" not in text
    assert "self." not in text


def test_installed_release_is_never_fetched():
    assert find_release(installed_release().version, download=False) == installed_release()


def test_versions_are_checked_before_anything_is_fetched():
    with pytest.raises(PatchError, match="is not a Transformers version"):
        find_release("../5.9.0")
    with pytest.raises(PatchError, match="neither installed nor in"):
        find_release("1.2.3", download=False)


def test_missing_network_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(PatchError, match=r"transformers 5\.9\.9 could not be downloaded: (.|\n)*go online once"):
        find_release("5.9.9")
    assert list(Path(tmp_path, "cache/transformers").glob("*5.9.9*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.9.0", "5.17.0"])
def test_patches_apply_to_other_releases(version, monkeypatch):
    monkeypatch.delenv("OPSLOT_CACHE")
    lock, release = Lock.load(lock_path()), find_release(version)
    problems = [
        problem
        for arch, releases in lock.archs.items()
        if version in releases
        for problem in check(arch, require_patch(arch, release), release, lock)
    ]
    assert problems == []
