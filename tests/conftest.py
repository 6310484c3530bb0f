"""Settings for all tests.

Hypothesis sets no time limit per example, since test machines are shared and slow. Servers that tests start keep what
they measure in a place of this run, not in the user's cache; the processes of a run share it. They run on CPUs, also
where there are other devices. Ctrl-C works as in a terminal, also if the tests were started in the background of a
shell, which ignores it.
"""

import os
import signal
import tempfile

from hypothesis import settings

settings.register_profile("tests", deadline=None, print_blob=True)
settings.load_profile("tests")
os.environ["TILEWORK_DEVICE"] = "cpu"
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="tilework-tests-")  # Removed when the run ends.
    os.environ["XDG_CACHE_HOME"] = _cache.name
