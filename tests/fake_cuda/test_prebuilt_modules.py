"""Modules that the first run on a GPU takes along: flashinfer finds them, and needs no compiler."""

import os
from pathlib import Path

from benches.gpu.first_run.modules import ARCHITECTURE, PREBUILT
from tests.support.processes import run_python

CODE = """
import sys
from pathlib import Path

import torch

torch.cuda.get_device_capability = lambda *_: (9, 0)
from flashinfer.jit import env

from benches.gpu.first_run import packing
from benches.gpu.first_run.modules import PREBUILT, spec

kit, site = map(Path, sys.argv[1:])
(site / "flashinfer").mkdir(parents=True)
env.FLASHINFER_AOT_DIR = site / "flashinfer" / "data" / "aot"
for name in PREBUILT:
    module = spec(name)
    assert not module.is_aot, name
    library = kit / "prebuilt" / module.name / f"{module.name}.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"library")
    packing.install(kit, site)
    assert spec(name).is_aot, name
    print(module.name)
"""
NAME = "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32"


def test_prebuilt_modules_are_those_that_flashinfer_looks_for(tmp_path: Path) -> None:
    variables = {
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    kit, site = tmp_path / "kit", tmp_path / "site"
    names = run_python(CODE, kit, site, env=os.environ | variables).stdout.split()
    assert len(set(names)) == len(PREBUILT)
    assert names[:2] == [
        f"{NAME}_head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False",
        "cascade",
    ]
