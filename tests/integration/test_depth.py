"""An engine whose caller stands deep: in a notebook, in a test, under an evaluation suite."""

from pathlib import Path

from pyengine.llm import LLM
from pyengine.sampling_params import SamplingParams
from tests.support.serving import save_small_model
from tests.unit.utils.test_frame_memory import faults_at

NUM_TOKENS = 20


def test_a_step_maps_no_memory_for_its_frames_at_any_depth(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    folder = save_small_model(tmp_path)
    with LLM(folder, device="cpu", dtype="float32", num_blocks=64) as llm:

        def generate() -> None:
            llm.generate([[5, 6, 7]], params, use_tqdm=False)

        generate()
        assert max(faults_at(depth, generate) for depth in range(0, 130, 5)) < 5 * NUM_TOKENS
