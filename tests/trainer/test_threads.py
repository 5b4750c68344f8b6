import os
import subprocess
import sys

CODE = """
import sys
from opslot.trainer import cli_train
assert cli_train(["missing.yaml"]) == 2
import os
print(os.environ["OMP_WAIT_POLICY"])
"""


def policy(**environment):
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env={**clean, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_idle_threads_sleep_unless_the_user_sets_a_policy():
    assert policy() == "PASSIVE"
    assert policy(OMP_WAIT_POLICY="ACTIVE") == "ACTIVE"
