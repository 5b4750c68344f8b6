"""The cache and the import hook."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import importlib.util
import inspect
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

import opslot.generated  # noqa: F401
from opslot.patchgen import PatchConfig, PatchError, Slot, cache, engine, materialize, register_patch
from opslot.patchgen.materialization import REGISTERED_PATCHES, cache_key, find_patch, known_archs, require_patch
from opslot.patchgen.names import architecture_from

TOY = '''
    class ToyNorm:
        def forward(self, x):
            """Doc."""
            return self.weight * x


    def fails():
        raise RuntimeError("from the generated file")
'''


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(patch):
    patch.slot_method("ToyNorm.forward", Slot("rms_norm"), args="x, self.weight")
    return patch


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cached_path_is_reused(make_release, toy, own_cache):
    release = make_release(TOY)
    path = materialize("toy", toy, release)
    assert path.is_relative_to(own_cache)
    assert path.as_posix().endswith("models/toy/modeling_toy.py")
    written = path.stat().st_mtime_ns
    assert materialize("toy", toy, release) == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", ["", "garbage", "half", "edit"])
def test_damaged_files_are_generated_again(make_release, toy, damage):
    release = make_release(TOY)
    path = materialize("toy", toy, release)
    good = path.read_text()
    bad = {"half": good[: len(good) // 2], "edit": good.replace("self.weight * x", "self.weight + x")}
    path.write_text(bad.get(damage, damage))
    assert materialize("toy", toy, release) == path
    assert path.read_text() == good


def test_key_depends_on_upstream_patch_and_release(make_release, toy, tmp_path):
    release = make_release(TOY)
    other = PatchConfig(toy.source_module)
    keys = {
        cache_key(toy, release),
        cache_key(other, release),
        cache_key(toy, make_release(TOY, version="9.0.1")),
        cache_key(toy, make_release(TOY + "    # changed\n", root=tmp_path / "changed")),
    }
    assert len(keys) == 4
    assert cache_key(toy, release) == cache_key(toy, make_release(TOY))


def test_key_depends_on_modules_of_inherited_methods(make_release, patch):
    patch.inherit_method("Head.forward", "transformers.layers", "Generic.forward")
    source = "class Head(Generic): ..."
    layers = "class Generic:\n    def forward(self): return {}\n"
    keys = {cache_key(patch, make_release(source, **{"transformers.layers": layers.format(n)})) for n in (1, 2)}
    assert len(keys) == 2


def test_unwritable_cache_falls_back_to_a_private_directory(make_release, toy, tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    monkeypatch.setenv("OPSLOT_CACHE", str(blocker / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = materialize("toy", toy, make_release(TOY))
    assert path.is_relative_to(tmp_path / f"opslot-{os.getuid()}")
    assert stat.S_IMODE((tmp_path / f"opslot-{os.getuid()}").stat().st_mode) == 0o700
    assert materialize("toy", toy, make_release(TOY)) == path


def test_entry_in_a_read_only_cache_is_used(make_release, toy, own_cache, monkeypatch):
    path = materialize("toy", toy, make_release(TOY))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert materialize("toy", toy, make_release(TOY)) == path


def test_full_disk_raises(make_release, toy, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PatchError, match=r"found: No space left on device\n  hint: set OPSLOT_CACHE"):
        materialize("toy", toy, make_release(TOY))


@pytest.mark.parametrize("trap", ["symlink", "writable", "file"])
def test_private_directory_prepared_by_others_is_not_used(tmp_path, monkeypatch, trap):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"opslot-{os.getuid()}"
    if trap == "symlink":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    elif trap == "writable":
        place.mkdir()
        place.chmod(0o777)
    else:
        place.write_text("")
    assert cache.private_root() != place


@pytest.mark.parametrize("place", ["root", "entry", "file"])
def test_cache_that_others_can_write_is_not_read(make_release, toy, own_cache, tmp_path, monkeypatch, place):
    """Anyone who can write there could plant code with a matching hash."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    release = make_release(TOY)
    path = materialize("toy", toy, release)
    good = path.read_text()
    planted = good.rpartition("# opslot cache")[0].replace("self.weight * x", "planted(x)")
    cache.write_sealed(path, planted)
    assert materialize("toy", toy, release) == path, "a hash alone does not tell"
    {"root": own_cache, "entry": path.parent, "file": path}[place].chmod(0o777)
    found = materialize("toy", toy, release)
    assert "planted" not in found.read_text()
    if place == "root":
        assert found.is_relative_to(tmp_path / f"opslot-{os.getuid()}")


def test_cache_of_another_user_is_not_used(make_release, toy, own_cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own_cache.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: own_cache.stat().st_uid + 1)
    monkeypatch.setattr(cache, "private_root", lambda: tmp_path / "private")
    if own_cache.stat().st_uid == 0:
        # All users trust the cache of root.
        os.chown(own_cache, 12345, -1)
    assert cache.cache_homes() == [tmp_path / "private"]
    assert f"the cache {own_cache} belongs to another user or others can write to it" in caplog.text


def test_private_group_may_write(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    found = (tmp_path / "shared").stat()
    assert cache.is_trusted(tmp_path / "shared") == (found.st_uid == found.st_gid)


def test_planted_bytecode_is_not_run(toy_module):
    """A `__pycache__` next to a generated file, with the mtime and size that make Python trust it."""
    file = toy_module.__file__
    source = importlib.util.cache_from_source(file)
    code = importlib._bootstrap_external._code_to_timestamp_pyc(
        compile("planted = True", file, "exec"), int(os.stat(file).st_mtime), os.stat(file).st_size
    )
    os.makedirs(os.path.dirname(source), exist_ok=True)
    with open(source, "wb") as written:
        written.write(code)
    del sys.modules["opslot.generated.toy"]
    again = importlib.import_module("opslot.generated.toy")
    assert not hasattr(again, "planted")
    assert hasattr(again, "ToyNorm")


def test_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.delenv("OPSLOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_root() == tmp_path / "opslot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_root() == tmp_path / "home" / ".cache" / "opslot"


def test_old_entries_are_pruned_and_recent_ones_kept(tmp_path):
    elsewhere = architecture_from("transformers_modules.org.code.modeling_toy")
    days = {"qwen3": (0, 29, 31, 60), "toy": (40, 50), elsewhere: (40,)}
    (tmp_path / "a file").touch()
    for arch, ages in days.items():
        for age in ages:
            entry = tmp_path / arch / f"used {age} days ago"
            entry.mkdir(parents=True)
            os.utime(entry, (time.time() - age * 24 * 3600,) * 2)
        (tmp_path / arch / ".lock").touch()
    cache.prune(tmp_path)
    left = {arch: sorted(entry.name for entry in (tmp_path / arch).iterdir()) for arch in days}
    assert left == {
        "qwen3": [".lock", "used 0 days ago", "used 29 days ago"],
        "toy": [".lock", "used 40 days ago"],
        elsewhere: [".lock"],
    }


def test_concurrent_processes_with_an_empty_cache(own_cache):
    code = "from opslot.patchgen import materialize; print(materialize('qwen3'))"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 2
    assert len(paths) == 1
    files = [path for path in own_cache.rglob("*.py") if path.is_file()]
    assert [str(path) for path in files] == list(paths)


def test_second_process_waits_for_the_first_and_reads_its_module(make_release, toy, monkeypatch):
    made, started, generate = [], threading.Event(), engine.generate

    def slow(*arguments):
        made.append(arguments)
        started.set()
        time.sleep(0.2)
        return generate(*arguments)

    monkeypatch.setattr(engine, "generate", slow)
    release = make_release(TOY)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(materialize, "toy", toy, release)
        started.wait()
        assert materialize("toy", toy, release) == first.result()
    assert len(made) == 1


def test_lock_of_a_killed_process_is_free(make_release, toy, own_cache):
    folder = own_cache / "generated" / "toy"
    run(
        "import os; from pathlib import Path; from opslot.patchgen.cache import locked;"
        f"locked(Path({str(folder)!r})).__enter__(); os._exit(0)"
    )
    assert (folder / ".lock").is_file()
    begun = time.monotonic()
    assert materialize("toy", toy, make_release(TOY)).is_file()
    assert time.monotonic() - begun < cache._LOCK_SECONDS / 2


@pytest.mark.parametrize("obstacle", ["the file system has no locks", "held by another process", "unwritable"])
def test_module_is_generated_without_the_lock(make_release, toy, own_cache, monkeypatch, obstacle):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.1)
    if obstacle.endswith("no locks"):
        monkeypatch.setattr(fcntl, "flock", no_locks)
    elif obstacle == "unwritable":
        (own_cache / "generated" / "toy" / ".lock").mkdir(parents=True)
    held = obstacle.startswith("held")
    with cache.locked(own_cache / "generated" / "toy") if held else contextlib.nullcontext():
        assert materialize("toy", toy, make_release(TOY)).is_file()


@pytest.fixture
def toy_module(toy, make_release, monkeypatch):
    """`opslot.generated.toy`, imported from a fake release."""
    release = make_release(TOY)
    monkeypatch.setattr("opslot.patchgen.materialization.installed_release", lambda: release)
    toy.discover = False
    register_patch("toy", toy)
    yield importlib.import_module("opslot.generated.toy")
    sys.modules.pop("opslot.generated.toy", None)
    del REGISTERED_PATCHES["toy"]


def test_module_identity(toy_module):
    assert toy_module.__name__ == "opslot.generated.toy"
    assert toy_module.__file__.endswith("models/toy/modeling_toy.py")
    assert "return self.weight * x" in inspect.getsource(toy_module.ToyNorm.forward)
    assert pickle.loads(pickle.dumps(toy_module.ToyNorm)) is toy_module.ToyNorm


def test_tracebacks_show_the_lines(toy_module):
    try:
        toy_module.fails()
    except RuntimeError:
        assert 'raise RuntimeError("from the generated file")' in traceback.format_exc()


def test_slot_is_called_before_the_body(toy_module):
    norm = toy_module.ToyNorm()
    norm.weight = 3
    assert norm.forward(2) == 6
    norm._opslot_rms_norm = lambda x, weight: ("kernel", x, weight)
    assert norm.forward(2) == ("kernel", 2, 3)


def test_registering_twice_raises(toy_module, toy):
    register_patch("toy", toy)
    other = PatchConfig(toy.source_module)
    with pytest.raises(PatchError, match="registered with another patch"):
        register_patch("toy", other)
    with pytest.raises(PatchError, match="already imported"):
        register_patch("toy", other, replace=True)
    with pytest.raises(PatchError, match="Python identifier"):
        register_patch("a-b", other)


def test_unknown_architecture_names_the_known_ones():
    with pytest.raises(ModuleNotFoundError, match=r"no patch for 'nothing'; there are patches for .*llama, .*qwen2"):
        importlib.import_module("opslot.generated.nothing")
    with pytest.raises(PatchError, match="no patch for 'nothing'"):
        require_patch("nothing")


def test_known_architectures():
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "seed_oss"} <= set(known_archs())
    assert find_patch("qwen3").source_module == "transformers.models.qwen3.modeling_qwen3"
    assert find_patch("nothing") is None


def test_patchgen_does_not_import_torch_or_transformers():
    """Generating imports neither torch nor transformers; finding a cached module does not import a parser."""
    heavy = "print(sorted({'torch', 'transformers', 'triton', 'libcst'} & set(sys.modules)))"
    code = f"import sys; from opslot.patchgen import materialize; materialize('qwen3'); {heavy}"
    assert run(code) == "['libcst']"
    assert run(code) == "[]"


def test_generating_is_quick(own_cache):
    code = (
        "from time import process_time as clock; start = clock();"
        "from opslot.patchgen import materialize; {}; print(clock() - start)"
    )
    cold = float(run(code.format("materialize('qwen3_moe')")))
    warm = float(run(code.format("materialize('qwen3_moe')")))
    assert cold < 3.0, "the goal is 1.5 s on a quiet machine"
    assert warm < 0.5, "the goal is 0.1 s on a quiet machine"


def test_another_process_unpickles_a_generated_class(forks, tmp_path):
    """The class is pickled by name, so the process imports it; its cache is empty."""
    from opslot.generated.llama import LlamaRMSNorm

    script = tmp_path / "script.py"
    script.write_text(
        f"import pickle\nfound = pickle.loads({pickle.dumps(LlamaRMSNorm)!r})\n"
        "print(found.__module__, found.__qualname__, found._opslot_slots)\n"
    )
    out, err = forks.start(script).communicate()
    assert out.strip() == "opslot.generated.llama LlamaRMSNorm {'rms_norm': ('rms_norm', 'standard')}", err


def test_config_class_is_the_one_of_transformers(forks, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from opslot.generated.qwen3 import Qwen3Config as ours\n"
        "from transformers import Qwen3Config as theirs\n"
        "print(ours is theirs)\n"
    )
    out, err = forks.start(script).communicate()
    assert out.strip() == "True", err
