"""A load takes what it keeps and the weight at hand, whatever the file's format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .quantized_files import CONFIG, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Inputs of a multiple of 512, to which FBGEMM fills up rows.
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "vocab_size": 16384, "tie_word_embeddings": True}  # fmt: skip

LOAD = """
import sys
from hullspeed.arch.load import load_arch
from hullspeed.kernels.load import load_kernels
from hullspeed.memory.ours import held_weights
from hullspeed.models.load import load_decoder
from hullspeed.models.quantize_targets import target
from hullspeed.sources.files import from_folder
import torch

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def load(folder):
    files = from_folder(folder, source="x")
    shares = []
    decoder = load_decoder(
        files.weights, load_arch(files), weight_dtype="fp16", progress=shares.append
    )
    assert shares[-1] == 1.0 and shares == sorted(shares) and len(shares) >= 5
    return decoder

from pathlib import Path
arch = load(Path(sys.argv[1])).arch  # libraries and kernels are there from here on
import gc, ctypes
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from now
decoder = load(Path(sys.argv[2]))
print(status("VmHWM") - before, held_weights(decoder.arch).decoder)
"""


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_peak_memory_of_a_load(kind: str, tmp_path: Path) -> None:
    from hullspeed.arch.load import arch_from_config, load_arch
    from hullspeed.models.quantize import quantize_checkpoint
    from hullspeed.models.quantize_targets import target
    from hullspeed.sources.files import from_folder

    small, large = tmp_path / "small", tmp_path / "large"
    for folder, layers in ((small, 1), (large, SIZES["num_hidden_layers"])):
        config = CONFIG | SIZES | {"num_hidden_layers": layers}
        generator = torch.Generator().manual_seed(1)
        specs = list(arch_from_config(config).tensors())
        write(
            folder,
            config,
            {s.name: torch.randn(s.shape, generator=generator).half() for s in specs},
        )
    largest = 4 * max(spec.elements for spec in specs)
    if kind != "plain":
        for folder in (small, large):
            files = from_folder(folder, source="x")
            out = tmp_path / f"{folder.name}-q"
            quantize_checkpoint(files, load_arch(files), out, target("int4"))
        small, large = tmp_path / "small-q", tmp_path / "large-q"
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    peak, held = json.loads("[" + result.stdout.replace(" ", ",") + "]")
    assert largest * 4 < held  # else the bound would say nothing
    assert peak < held + 1.5 * largest, (peak / 2**20, held / 2**20, largest / 2**20)
