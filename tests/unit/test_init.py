"""The package's front door: what it offers, and what it says when something is missing."""

import ast
from pathlib import Path

import pytest

import pyengine
from pyengine.utils.packaging import needs_extension, needs_extra
from tests.support.processes import run_python


def python(code: str) -> str:
    return run_python(code).stdout.strip()


def test_every_public_name_is_there() -> None:
    for name in pyengine.__all__:
        assert getattr(pyengine, name) is not None
        assert name in dir(pyengine)


def test_nothing_is_loaded_before_it_is_used() -> None:
    """So that Ctrl-C, while a command starts, reaches the command."""
    code = "import sys, pyengine; print('numpy' in sys.modules, 'pyengine.kv_cache' in sys.modules)"
    assert python(code) == "False False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'pyengine' has no attribute 'LMM'"):
        _ = pyengine.LMM  # type: ignore[attr-defined]


def test_sampling_params_come_without_torch() -> None:
    code = "import sys, pyengine; pyengine.SamplingParams(); print('torch' in sys.modules)"
    assert python(code) == "False"


def test_llm_without_a_library_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None; import pyengine\n"
        "pyengine.BlockManager\n"
        "try: pyengine.LLM\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    assert python(code) == needs_extra("engine", "pyengine.LLM", "tokenizers")


LIBRARIES = ["jinja2", "tokenizers", "tqdm"]


@pytest.mark.parametrize("part", ["LLM", "AsyncEngine"])
@pytest.mark.parametrize("missing", [*LIBRARIES, "all"])
def test_without_a_library_there_is_one_short_error(part: str, missing: str) -> None:
    """No chain of tracebacks, and no frame of the import system."""
    names = LIBRARIES if missing == "all" else [missing]
    gone = f"import sys; sys.modules.update(dict.fromkeys({names}))"
    code = f"{gone}; import pyengine; pyengine.{part}()"
    done = run_python(code, status=1)
    lines = done.stderr.splitlines()
    assert len(lines) < 9, done.stderr
    expected = needs_extra("engine", f"pyengine.{part}", names[0])
    assert lines[-1] == f"ModuleNotFoundError: {expected}"
    assert sum(line.startswith("Traceback") for line in lines) == 1


COMMANDS = ["generate hi", "chat", "bench", "info", "list", "pull x/y", "serve"]
COMMANDS += [f"explain {__file__} {__file__}"]


@pytest.mark.parametrize("missing", ["jinja2", "tokenizers"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_library_names_the_extra(command: str, missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; import pyengine.cli\n"
        f"sys.argv = ['pyengine', *{command.split()}]; pyengine.cli.main()"
    )
    done = run_python(code, status=1, input="")
    said = done.stderr.removeprefix("starting ...\n")
    assert said == f"error: {needs_extra('engine', 'the engine', missing)}\n"


def test_sources_without_the_extension_name_the_command_that_builds_it() -> None:
    code = (
        "import sys; sys.modules['pyengine._kv'] = None; import pyengine\n"
        "try: pyengine.BlockManager\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    assert python(code) == needs_extension("pyengine.BlockManager")


WINDOWS = "import sys, numpy, pyengine; sys.platform = 'win32'\n"


def test_on_windows_the_block_manager_runs_and_the_engine_says_that_it_does_not() -> None:
    code = WINDOWS + (
        "pyengine.BlockManager(num_blocks=8, block_size=4), pyengine.SamplingParams()\n"
        "for part in ('LLM', 'AsyncEngine'):\n"
        "    try: getattr(pyengine, part)\n"
        "    except ImportError as error: print(error)\n"
        "try: import pyengine.engine.core\n"
        "except ImportError as error: print(error)\n"
    )
    first, second, third = python(code).splitlines()
    assert first.startswith("pyengine.LLM does not run on Windows")
    assert second.startswith("pyengine.AsyncEngine does not run on Windows")
    assert third.startswith("pyengine.engine does not run on Windows")
    assert "Windows Subsystem for Linux" in first


def test_on_windows_the_command_line_says_that_it_does_not_run() -> None:
    code = WINDOWS + "import pyengine.cli; sys.argv = ['pyengine', 'serve']; pyengine.cli.main()"
    done = run_python(code, status=1)
    assert done.stderr.startswith("error: the command line does not run on Windows")
    assert done.stdout == ""


def test_a_defect_of_our_own_is_not_blamed_on_the_extra() -> None:
    code = (
        "import sys; sys.modules['pyengine.engine.core'] = None; import pyengine\n"
        "try: pyengine.LLM\n"
        "except ModuleNotFoundError as error: print(error.name)\n"
    )
    assert python(code) == "pyengine.engine.core"


def test_type_checkers_see_every_public_name() -> None:
    stub = Path(pyengine.__file__).with_name("__init__.pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(names) == sorted(pyengine.__all__)
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(names) - {"__version__"}
