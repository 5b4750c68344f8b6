"""Calls `module:function`, the first argument, with a connection; see `Context` in forks.py."""

import importlib
import importlib.util
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

target, path, key, descriptor = sys.argv[1:]
multiprocessing.current_process().authkey = bytes.fromhex(key)
# Functions of tests are imported by name, as in the process that sends them.
sys.path[:] = json.loads(path)
spec = importlib.util.spec_from_file_location("opslot_test_interpreter", Path(__file__).with_name("interpreter.py"))
interpreter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interpreter)
interpreter.speed_up()
module, _, function = target.partition(":")
getattr(importlib.import_module(module), function)(Connection(int(descriptor)))
