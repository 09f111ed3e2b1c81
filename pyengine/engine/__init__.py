"""The engine: requests, the loop, their outputs."""

from pyengine.utils.openmp import wait_briefly

wait_briefly()  # before torch is imported
