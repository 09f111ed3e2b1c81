"""One file per block manager; `load()` gives those that can be had here."""

import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benches.peers.adapters.base import Manager

MODULES = {"pyengine": "ours", "vllm": "vllm", "sglang": "sglang", "nano-vllm": "nano_vllm"}


@dataclass
class Loaded:
    """The managers that are here, their versions, and why the others are not."""

    managers: list[type[Manager]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def load() -> Loaded:
    """Imports every adapter. A peer that fails to import is missing, and the report says why."""
    report = Path(sys.prefix) / "peers.json"
    installed = json.loads(report.read_text()) if report.exists() else {}
    loaded = Loaded()
    for name, module in MODULES.items():
        try:
            adapter = importlib.import_module(f"{__name__}.{module}")
        except Exception as error:  # a peer may break in any way while it is imported
            if name == "pyengine":
                raise
            reason = installed.get(name, {}).get("missing")
            loaded.missing[name] = reason or f"{type(error).__name__}: {error}"
            continue
        loaded.managers += adapter.MANAGERS
        loaded.versions[name] = adapter.VERSION
    return loaded
