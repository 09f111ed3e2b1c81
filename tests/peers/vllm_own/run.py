"""vLLM's own tests of its block management, with our manager and with vLLM's.

    python tests/peers/vllm_own/run.py --python .venv-peers/bin/python

They are in its source distribution on PyPI, which is fetched once: those of its core, and those of
its KV connectors that drive a Scheduler. A test is in scope if it makes a manager and every one
that it makes is ours; one for which any goes back to vLLM's is listed with the reason. It fails if
a test in scope that passes with vLLM's manager fails with ours, but for those of `LEFT_OUT`, with
the reason; or if any other ends differently. `insides.py` shows those tests vLLM's structures.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VERSION = "0.32.0"
DIST = f"vllm-{VERSION}"
CORE = "tests/v1/core"
UNIT = "tests/v1/kv_connector/unit"
CONNECTORS = [  # those that drive a Scheduler and need no further package
    f"{UNIT}/{name}.py"
    for name in (
        "test_cache_pollution_prevention",
        "test_decode_bench_connector",
        "test_error_propagation",
        "test_invalid_blocks_correctness",
        "test_kv_load_failure_recovery",
        "test_remote_decode_lifecycle",
        "test_remote_prefill_lifecycle",
        "test_scheduler_kv_connector_override",
        "offloading_connector/test_scheduler",
    )
]
TORCHVISION = "torchvision==0.28.*"  # that of torch 2.13
JSON = "application/vnd.pypi.simple.v1+json"

LEFT_OUT: dict[str, str] = json.loads((HERE / "left_out.json").read_text(encoding="utf-8"))


def index_url() -> str:
    """The package index that pip uses."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or found or "https://pypi.org/simple"


def fetch(folder: Path) -> Path:
    """The source distribution, fetched if it is not there; its digest is the index's."""
    target = folder / f"{DIST}.tar.gz"
    if target.exists():
        return target
    request = urllib.request.Request(f"{index_url().rstrip('/')}/vllm/", headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=120) as answer:
        files = json.load(answer)["files"]
    [file] = [file for file in files if file["filename"] == target.name]
    print(f"fetching {target.name}", flush=True)
    with urllib.request.urlopen(file["url"], timeout=600) as answer:
        data = answer.read()
    digest = hashlib.sha256(data).hexdigest()
    if digest != file["hashes"]["sha256"]:
        raise SystemExit(f"{target.name} has the digest {digest}, not {file['hashes']['sha256']}")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return target


def unpack(archive: Path, folder: Path) -> Path:
    """Its tests, beside the models that they name."""
    root = folder / DIST
    if not (root / CORE).exists():
        with tarfile.open(archive) as tar:
            members = [each for each in tar if each.name.startswith(f"{DIST}/tests/")]
            tar.extractall(folder, members, filter="data")
    return root


def folder_of_packages(root: Path) -> Path:
    """Where the packages are that the tests need beside vLLM's own."""
    return root.parent / "site"


def install(python: Path, root: Path) -> None:
    """pytest, and torchvision for llava's images, in a separate folder."""
    site = folder_of_packages(root)
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--no-warn-conflicts"]
    command += ["--target", str(site)]
    if not (site / "pytest").exists():
        subprocess.run([*command, "pytest", "pytest-asyncio"], check=True)
    if not (site / "torchvision").exists():
        subprocess.run([*command, "--no-deps", TORCHVISION], check=True)


def run(python: Path, root: Path, ours: bool, options: list[str]) -> dict[str, Any]:
    """All of them; what came of each."""
    report = root.parent / f"vllm-own-{'ours' if ours else 'stock'}.json"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "PYENGINE_BLOCK_MANAGER": "1" if ours else "0",
        "PYENGINE_REPORT": str(report),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, folder_of_packages(root), ROOT))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [str(python), "-W", "ignore", "-m", "pytest", "-q", "--tb=no", "-rN"]
    command += ["-p", "no:cacheprovider", "-p", "pyengine_plugin", "-c", os.devnull]
    command += ["--rootdir", str(root), "--confcutdir", "tests/v1"]
    command += options or [CORE, *CONNECTORS]
    print(f"vLLM's tests with {'our' if ours else 'its own'} manager", flush=True)
    subprocess.run(command, cwd=root, env=environment, check=False)
    if not report.exists():
        raise SystemExit("pytest wrote no report")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def function(name: str) -> str:
    """The file and the function of a test."""
    return name.partition("[")[0]


def main() -> None:
    """Fetch, run both, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-peers/bin/python")
    parser.add_argument("--folder", type=Path, default=ROOT / "target/vllm-own")
    parser.add_argument("tests", nargs="*", help="some of them, as pytest takes them")
    options = parser.parse_args()
    folder, python = options.folder.absolute(), options.python.absolute()
    root = unpack(fetch(folder), folder)
    install(python, root)
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import models, pathlib; "
    code += f"models.write_all(pathlib.Path({str(root)!r}))"
    subprocess.run([python, "-c", code], check=True)
    # A test imports this with -O and 60 seconds' time. The compiled files are written here.
    writes_bytecode = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    imports = "import vllm.v1.core.kv_cache_utils"
    subprocess.run([python, "-O", "-c", imports], env=writes_bytecode, check=True)
    stock = run(python, root, False, options.tests)
    ours = run(python, root, True, options.tests)
    page, pages, wrong = folder / "vllm-own.md", [], 0
    for part in (CORE, UNIT):
        tests = {name: each for name, each in ours.items() if name.startswith(part)}
        if tests:
            lines, bad = compare(part, stock, tests)
            pages += lines
            wrong += bad
    page.write_text("\n".join(pages) + "\n", encoding="utf-8")
    print(f"all of them: {page}")
    raise SystemExit(wrong)


def compare(part: str, stock: dict[str, Any], ours: dict[str, Any]) -> tuple[list[str], int]:
    """Print what is in scope, what passes, and why the rest is not. Returns a longer version, and 0
    if all is well."""
    scope = {name: each for name, each in ours.items() if each["ours"] and not each["reasons"]}
    broken, left_out, passed, control = [], [], [], []
    for name, each in sorted(scope.items()):
        if stock[name]["outcome"] != "passed":
            control.append(f"{name}: {stock[name]['outcome']} with vLLM's own, too")
        elif each["outcome"] == "passed":
            passed.append(name)
        elif (bare := function(name).rpartition("::")[2]) in LEFT_OUT:
            left_out.append(f"{name}: {LEFT_OUT[bare]}")
        else:
            broken.append(f"{name}: {each.get('error', each['outcome'])}")
    outside = {
        name: "; ".join(each["reasons"]) for name, each in sorted(ours.items()) if each["reasons"]
    }
    none = sorted(name for name, each in ours.items() if not each["ours"] and not each["reasons"])
    outcomes = {name: (stock[name]["outcome"], ours[name]["outcome"]) for name in [*outside, *none]}
    changed = [f"{n}: {a}, now {b}" for n, (a, b) in sorted(outcomes.items()) if a != b]
    failing = sum(pair == ("failed", "failed") for pair in outcomes.values())
    functions = len({function(name) for name in passed})
    made = sum(scope[name]["ours"] for name in passed)
    lines = [
        f"vLLM {VERSION}, {part}: {len(ours)} tests",
        f"in scope and passed with both: {len(passed)} tests of {functions} functions, in which "
        f"{made} managers were made, all of them ours",
        f"in scope, and left out: {len(left_out)}",
        *(f"  {line}" for line in left_out),
        f"in scope, but not even vLLM's own passes here: {len(control)}",
        *(f"  {line}" for line in control),
        f"in scope and BROKEN: {len(broken)}",
        *(f"  {line}" for line in broken),
        f"not in scope, and CHANGED by ours: {len(changed)}",
        *(f"  {line}" for line in changed),
        f"not in scope, and failing with vLLM's own, too: {failing}",
    ]
    print("\n".join(lines))
    print(f"back to vLLM's own manager: {len(outside)}; without a manager: {len(none)}")
    longer = [
        *lines,
        f"back to vLLM's own manager: {len(outside)}",
        *(f"  {name}: {reason}" for name, reason in outside.items()),
        f"without a manager: {len(none)}",
        *(f"  {name}" for name in none),
        "passed:",
        *(f"  {name}" for name in passed),
    ]
    return longer, len(broken) + len(changed) + (not passed)


if __name__ == "__main__":
    main()
