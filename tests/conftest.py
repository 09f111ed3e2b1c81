"""Settings that every test shares. Imports nothing of the engine: unit tests start fast."""

import os
import signal

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to a hub
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads do not spin: cores are shared
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # each of several has one core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every machine and run, and no deadline: cores are shared.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Signals as in a terminal, for the processes that tests start, too.

    A run in the background (`&`, nohup) inherits ignored ones, and hands them on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
