import os
import subprocess
import sys

import pytest

from opslot.trainer.main import wait_without_spinning

CODE = """
import sys
from opslot.trainer import cli_train
assert cli_train(["missing.yaml"]) == 2
import os
print(os.environ["OMP_WAIT_POLICY"])
"""


def test_idle_threads_sleep():
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "PASSIVE"


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_policy_of_the_user_is_kept(monkeypatch, set_by_user, expected):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_by_user)
    wait_without_spinning()
    assert os.environ["OMP_WAIT_POLICY"] == expected
