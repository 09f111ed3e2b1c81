"""The sections in their order, and the share of the time that is planned for each."""

from benches.gpu_check.harness import Section


def _check(name: str, module: str, share: float, part_seconds: float) -> Section:
    module = f"benches.gpu_check.{module}"
    return Section(name=name, module=module, share=share, part_seconds=part_seconds, is_check=True)


def _benchmark(name: str, module: str, share: float, shape: str) -> Section:
    return Section(
        name=name,
        module=f"benches.gpu_check.{module}",
        share=share,
        part_seconds=90,
        options={"shape": shape},
    )


CHECKS = (
    Section(name="machine", module="benches.gpu_check.machine", share=0.05, part_seconds=60),
    _check("first use", "first_use", 0.18, 240),  # a backend may compile its kernels there
    _check("backends", "backends", 0.22, 200),
    _check("choice", "choice", 0.03, 200),
    _check("graphs", "graphs", 0.08, 90),
    _check("engine", "engine", 0.1, 90),
)


def benchmarks(small: str, large: str | None) -> tuple[Section, ...]:
    """What is timed, on a shape that is quick and, if there is room for it, on a large one."""
    found = [_benchmark(f"decode {small}", "decode", 0.07, small)]
    if large is not None:
        found.append(_benchmark(f"decode {large}", "decode", 0.12, large))
    return (
        *found,
        _benchmark("transformers", "peer", 0.06, small),
        _benchmark("host", "host", 0.05, small),
        _benchmark("sharing", "sharing", 0.04, small),
    )
