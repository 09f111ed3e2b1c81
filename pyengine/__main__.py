"""`python -m pyengine` is `pyengine`, of the Python that runs it."""

from pyengine.cli import main

if __name__ == "__main__":
    main()
