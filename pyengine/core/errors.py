"""The errors that people who call pyengine are meant to catch.

One exception per decision a caller can take: correct the request, change the settings, provide
another model; and where a process or a device failed: try again, or start again. Every
message names the value that was found and the way out.
"""


class PyEngineError(Exception):
    """Base of every error that pyengine raises on purpose."""


class InvalidRequestError(PyEngineError, ValueError):
    """A request that can never be served; refused at submission, before anything runs."""


class ConfigurationError(PyEngineError, ValueError):
    """Engine settings that contradict each other, the model, or the machine."""


class DeviceMemoryError(PyEngineError):
    """The smallest step does not fit into the device's memory; it was rolled back."""


class ModelLoadError(PyEngineError):
    """A model that is missing, damaged, or of a kind that cannot be loaded."""


class WorkerError(PyEngineError):
    """A worker process failed in a step, which was rolled back; the engine can go on."""


class EngineDeadError(PyEngineError):
    """The engine lost a worker process or its device and has ended: make a new one."""
