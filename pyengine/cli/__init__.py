"""The command line: `pyengine generate`, `chat`, `info` and `trace replay`."""

import gc
import os
import sys


def main() -> None:
    """Run the command line; where its libraries are missing, name the extra that holds them."""
    # Threads of torch's OpenMP spin while they wait for each other. Where another process wants
    # one of the cores, that costs a prefill of 40 tokens 4 s instead of 0.3 s (2 cores, 1 busy).
    # OpenMP reads the setting when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Importing torch and transformers makes a million objects and frees none: looking for garbage
    # meanwhile takes a fifth of the time to the first token. `open_llm` turns it on again.
    gc.disable()
    try:
        from pyengine.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print(
            "error: the command line needs typer: pip install 'pyengine[engine]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # commands handle their own
        raise SystemExit(130) from None
    app()
