"""Programs of others, in the environments that `make clients` makes."""

import os

import pytest

from tests.support.docs import ROOT
from tests.support.processes import run_program

BIN = ROOT / ".venv-clients/bin"
needs_clients = pytest.mark.skipif(not BIN.exists(), reason="`make clients` makes .venv-clients")


def run(command: str, *arguments: str, **environment: str) -> str:
    """The output of a program in .venv-clients, without access to a hub."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    done = run_program([BIN / command, *arguments], env=variables)
    print(done.stdout[-6000:])
    return done.stdout
