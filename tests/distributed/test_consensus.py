"""If one rank fails, the others exit and the user sees its error."""

import contextlib
import errno
import io
import json
import time

import pytest
import torch.distributed as dist

from opslot._base.errors import ConfigError, OtherRankFailed
from opslot.distributed import consensus, fail_together, init_parallel_state, wait_for_ranks

SCRIPT = """
import os, sys, time
import torch.distributed as dist
from opslot._base.errors import ConfigError
from opslot.distributed import consensus, fail_together, init_parallel_state

consensus._LEAD_SECONDS = float(os.environ.get("LEAD", consensus._LEAD_SECONDS))
case, culprit = sys.argv[1], int(sys.argv[2])
rank = init_parallel_state(device_type="cpu").rank
with fail_together():
    dist.barrier()
    if case == "fine":
        time.sleep(2 * rank)
    elif case == "all":
        raise ConfigError("the same mistake everywhere")
    elif rank == culprit:
        if case in ("killed", "waited for"):
            os.kill(os.getpid(), 9)
        time.sleep(0.2)
        if case == "stopped":
            raise KeyboardInterrupt("SIGTERM")
        raise {"user": ConfigError, "defect": IndexError, "exit": SystemExit}[case](f"only rank {rank} sees this")
    elif case == "waited for":
        dist.barrier()
    else:
        time.sleep(60)
print("done", rank, flush=True)
"""


@pytest.fixture
def start(forks, free_port, tmp_path):
    """Start two ranks on a case of SCRIPT."""
    processes = []

    def run(case, culprit=0, lead=None):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {} if lead is None else {"LEAD": str(lead)}
        for rank in range(2):
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(forks.start(script, case, str(culprit), env=env))
        return processes

    yield run
    for process in processes:
        process.kill()


def ended(processes):
    """[(exit code, output)] of two ranks, and the seconds until the last one exited."""
    started = time.monotonic()
    texts = ["".join(process.communicate(timeout=50)) for process in processes]
    return [(p.returncode, text) for p, text in zip(processes, texts, strict=True)], time.monotonic() - started


@pytest.mark.parametrize(
    ("case", "kind", "culprit"), [("user", "ConfigError", 0), ("defect", "IndexError", 1), ("exit", "SystemExit", 1)]
)
def test_other_ranks_exit_and_name_the_failed_rank(start, case, kind, culprit):
    results, seconds = ended(start(case, culprit))
    assert all(code != 0 for code, _ in results)
    message = f"{kind}: only rank {culprit} sees this"
    # Python itself prints the argument of sys.exit.
    assert message.removeprefix("SystemExit: ") in results[culprit][1]
    other = results[1 - culprit][1]
    assert f"opslot: rank {1 - culprit} stops: rank {culprit} failed: " in other
    assert message in other
    assert ("Traceback" in other) == (case != "user")
    assert seconds < 30


@pytest.mark.parametrize("culprit", [0, 1])
def test_other_ranks_name_a_rank_that_a_signal_stopped(start, culprit):
    results, seconds = ended(start("stopped", culprit))
    assert "KeyboardInterrupt: SIGTERM" in results[culprit][1]
    assert results[1 - culprit] == (1, f"opslot: rank {1 - culprit} stops: rank {culprit} was stopped by SIGTERM\n")
    assert seconds < 30


@pytest.mark.parametrize("case", ["user", "all"])
def test_failed_rank_exits_first(start, case):
    """A launcher then stops the others, and shows the error of the first."""
    processes = start(case, lead=20)
    while all(process.poll() is None for process in processes):
        time.sleep(0.02)
    first = [process for process in processes if process.poll() is not None]
    assert len(first) == 1
    assert "ConfigError: " in first[0].read("stderr")
    assert case == "all" or first == processes[:1]


@pytest.mark.parametrize("kind", [ConfigError, IndexError])
def test_torchrun_error_file_has_no_traceback_of_opslot_errors(tmp_path, monkeypatch, kind):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise kind("seen here")
    except kind as error:
        consensus._record(error)
    reported = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert f"{kind.__name__}: seen here" in reported
    assert ("Traceback" in reported) == (kind is IndexError)


def test_unwritable_error_file_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "error.json"))
    consensus._record(ConfigError("seen here"))


def test_error_of_all_ranks_is_reported(start):
    results, _ = ended(start("all"))
    assert all(code != 0 for code, _ in results)
    assert all("the same mistake everywhere" in text for _, text in results)


@pytest.mark.parametrize("culprit", [0, 1])
def test_killed_rank_is_named(start, culprit):
    """The store runs in the process of rank 0."""
    results, seconds = ended(start("killed", culprit))
    assert results[culprit][0] == -9
    code, text = results[1 - culprit]
    assert code == 1
    assert f"opslot: rank {1 - culprit} stops: rank {culprit} exited without an error message (killed" in text
    assert seconds < 30


def test_broken_connection_names_the_killed_rank(start):
    results, _ = ended(start("waited for", 1))
    assert "ParallelError: rank 1 exited without an error message (killed" in results[0][1]


def test_ranks_exit_together_without_an_error(start):
    results, _ = ended(start("fine"))
    assert [code for code, _ in results] == [0, 0]
    assert "done 1" in results[1][1]


def fail_on_a_machine(is_told):
    """Ranks 0 and 1 fail; rank 2 is on a machine that is lost, which may have reported an error before."""
    rank = init_parallel_state(device_type="cpu").rank
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(output):
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setattr(consensus, "_GRACE_SECONDS", 2.0)
        patch.setattr(consensus, "_LEAD_SECONDS", 0.2)
        if rank == 2 and is_told:
            dist.PrefixStore("opslot/0", consensus._own_connection()).set("error", "2 rank 3 exited")
        dist.barrier()
        started = time.monotonic()
        error = fail_together_after(0.5 * rank) if rank < 2 else None
        seconds = time.monotonic() - started
    dist.barrier()
    return error, seconds, output.getvalue()


def fail_together_after(seconds):
    try:
        with fail_together():
            time.sleep(seconds)
            raise ConnectionError
    except (ConnectionError, OtherRankFailed) as error:
        return type(error)


def test_rank_with_the_error_ends_first_when_a_machine_is_lost(ranks):
    (kind, first, _), (other, second, text), _ = ranks.run(fail_on_a_machine, False, world=3)
    assert (kind, other) == (ConnectionError, OtherRankFailed)
    assert first < second
    assert text == ""


def test_error_of_a_lost_machine_is_shown(ranks):
    for rank, (kind, _, text) in enumerate(ranks.run(fail_on_a_machine, True, world=3)[:2]):
        assert kind is OtherRankFailed
        assert text == f"opslot: rank {rank} stops: rank 3 exited\n"


def wait_for_a_late_rank(folder):
    rank = init_parallel_state(device_type="cpu").rank
    found = []
    for number in range(2):
        file = folder / str(number)
        if rank == number:
            time.sleep(0.2)
            file.touch()
        wait_for_ranks()
        found.append(file.exists())
    return found


def test_all_ranks_are_waited_for(ranks, tmp_path):
    assert ranks.run(wait_for_a_late_rank, tmp_path) == [[True, True], [True, True]]


def test_fail_together_does_nothing_in_a_single_process():
    with pytest.raises(KeyError, match="mine"), fail_together():
        raise KeyError("mine")


@pytest.mark.parametrize(("number", "shown"), [(errno.ENOSPC, "[Errno 28] no space"), (errno.ENOENT, "give a folder")])
def test_only_a_full_disk_replaces_the_message_of_the_error_after_it(number, shown):
    error = RuntimeError("give a folder")
    error.__context__ = OSError(number, "no space")
    assert consensus.root_cause(error) == shown
