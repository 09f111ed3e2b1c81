"""Each operation of the benchmark of structured outputs, once; no times are checked."""

from benches.engine.structured import SCHEMA, SIZES, measure, table
from pyengine.sampling_params import StructuredOutputs
from tests.support.engines import make_bench
from tests.support.tokenizers import characters


def test_free_and_bound_steps_are_timed_and_told() -> None:
    bench = make_bench(4096, tokenizer=characters())
    results = measure(bench.engine, (2,), 2)
    assert results["2 rows"]["free"]["median"] > 0
    assert results["2 rows"]["bound"]["median"] > 0
    assert results["compile"]["bound"]["median"] > 0
    assert bench.engine.unfinished == []
    bench.assert_all_free()
    lines = list(table(results))
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["2 rows", "compile"]
    assert SIZES == (1, 32)
    StructuredOutputs(json=SCHEMA)
