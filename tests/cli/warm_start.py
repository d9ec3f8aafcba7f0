"""Run a script as ``hookline run -- python SCRIPT`` does, in a process that has imported torch already.

`test_run_script` starts it by `helpers_warm`. There the ``sitecustomize`` of hookline has not been read, and nobody
imports torch any more: it is read here, and told that torch is there.
"""

import importlib.util
import os
import runpy
import sys

START = os.path.join(os.environ["PYTHONPATH"].partition(os.pathsep)[0], "sitecustomize.py")
spec = importlib.util.spec_from_file_location("sitecustomize", START)
assert spec is not None
assert spec.loader is not None
start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(start)
start._wait_for_a_step()
del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
