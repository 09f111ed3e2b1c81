"""List the functions, classes and files of pyengine that one call of `LLM.generate` enters.

    python tools/call_walk.py [--list] [MODEL]

The call generates six tokens for one prompt, after a first call that does all one-time work.
Comprehensions and lambdas count as part of their function.
"""

import argparse
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "pyengine")


class CallWalk:
    """A profile function that records the functions that are entered while it is active."""

    def __init__(self) -> None:
        self.is_on = False
        self.entered: dict[CodeType, None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See `sys.setprofile`."""
        if self.is_on and event == "call":
            self.entered[frame.f_code] = None

    def functions(self) -> Iterator[tuple[str, str]]:
        """File and qualified name of each, in the order of entry."""
        for code in self.entered:
            if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
                yield str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname


def class_of(name: str) -> str:
    """The class of a method; empty for a function."""
    return name.split(".<locals>", 1)[0].rpartition(".")[0]


def main() -> None:
    """Make a model, call it, and say what the call entered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--list", action="store_true", help="print every function")
    options = parser.parse_args()
    walk = CallWalk()
    threading.setprofile(walk)
    sys.path.insert(0, str(ROOT))
    from pyengine import LLM, SamplingParams

    # With one thread, the engine does not adapt their number.
    llm = LLM(options.model, num_blocks=64, num_threads=1, dtype="float32")
    params = SamplingParams(max_tokens=6, temperature=0.0)
    llm.generate("A warm-up", params, use_tqdm=False)
    sys.setprofile(walk)
    walk.is_on = True
    llm.generate("The capital of France is", params, use_tqdm=False)
    walk.is_on = False
    sys.setprofile(None)
    functions = list(walk.functions())
    if options.list:
        for file, name in functions:
            print(f"{file}: {name}")
    classes = {(file, class_of(name)) for file, name in functions if class_of(name)}
    files = {file for file, _ in functions}
    print(f"{len(functions)} functions of {len(classes)} classes in {len(files)} files")


if __name__ == "__main__":
    main()
