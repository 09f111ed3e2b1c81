"""The command line: `pyengine generate`, `pyengine chat`, `pyengine info`."""

import sys


def main() -> None:
    """Run the command line; where its libraries are missing, name the extra that holds them."""
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
