"""The engine: requests, the loop, their outputs."""

from pyengine.utils.openmp import wait_briefly
from pyengine.utils.packaging import require_posix

require_posix("pyengine.engine")
wait_briefly()  # before torch is imported
