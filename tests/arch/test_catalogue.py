"""The catalogue: sums against sizes that others published, and honest misses."""

from __future__ import annotations

import pytest

from hullspeed.arch import catalogue
from hullspeed.arch.quant import stored_parts, weight_breakdown, weight_bytes
from hullspeed.errors import UnsupportedModelError

# Parameters as the hub reports them from the safetensors headers.
_PARAMETERS = {
    "Qwen/Qwen3.5-27B": 27_781_427_952,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-2-27b-it": 27_227_128_320,
    "google/gemma-3-27b-it": 27_432_406_640,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}

# Bytes of all tensors: metadata.total_size of the index, or the files less their headers.
_BYTES = {
    "Qwen/Qwen3.5-27B": 55_562_855_904,
    "Qwen/Qwen3.6-27B-FP8": 30_866_866_928 - 203_664,
    "Qwen/Qwen3.8-27B-FP8": 30_866_866_928 - 203_664,
    "Inferact/Qwen3.8-27B-NVFP4": 26_381_249_312 - 260_920,
    "openai/gpt-oss-20b": 13_761_264_768,
    "openai/gpt-oss-120b": 65_248_815_744,
    "deepseek-ai/DeepSeek-V3": 688_574_839_360,
}


@pytest.mark.parametrize("name", _PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert catalogue.load(name).param_count() == _PARAMETERS[name]


@pytest.mark.parametrize("name", _BYTES)
def test_bytes_are_the_published_ones(name: str) -> None:
    assert weight_bytes(catalogue.load(name)) == _BYTES[name]


def test_deepseek_counts_elements_as_the_hub_does() -> None:
    """The hub's 684,531,386,000 'parameters' count the FP8 block scales too."""
    arch = catalogue.load("deepseek-ai/DeepSeek-V3")
    elements = 0
    for _, part in stored_parts(arch):
        size = 1
        for dim in part.shape:
            size *= dim
        elements += size
    assert elements == 684_531_386_000


@pytest.mark.parametrize("name", catalogue.names())
def test_every_entry_loads_and_adds_up(name: str) -> None:
    arch = catalogue.load(name)
    assert catalogue.source(name)
    assert arch.eos_token_ids
    if arch.param_count() < 28e9:
        total = sum(part.nbytes for _, part in stored_parts(arch))
        assert total == weight_bytes(arch) == sum(weight_breakdown(arch).values())
    assert weight_bytes(arch, extras=False) <= weight_bytes(arch)


def test_the_27b_in_parts() -> None:
    arch = catalogue.load("Qwen/Qwen3.6-27B")
    assert arch.param_count(extras=False) == 26_895_998_464
    sizes = {e.name: sum(t.elements for t in e.tensors) for e in arch.extras}
    assert sizes == {"mtp": 424_699_392, "vision": 460_730_096}
    assert arch.kv_bytes_per_token("bf16") == 65_536
    assert arch.state_bytes("fp32", "bf16") == 153_944_064
    # The model ends its turn with <|im_end|>, which only generation_config.json names.
    assert arch.eos_token_ids == (248_044, 248_046)


def test_names_are_exact_but_for_capitals() -> None:
    assert catalogue.lookup("qwen/qwen3.6-27b-fp8") is not None
    assert catalogue.lookup("Qwen/Qwen-27B-Instruct") is None
    assert catalogue.source("nobody/nothing") is None
    assert catalogue.suggestions("Qwen/Qwen3.6-27B-FP")[0] == "Qwen/Qwen3.6-27B-FP8"
    assert catalogue.suggestions("qwen3.6-27b")[0] == "Qwen/Qwen3.6-27B"
    with pytest.raises(UnsupportedModelError, match=r"nearest: Qwen/Qwen3\.6-27B-FP8"):
        catalogue.load("Qwen/Qwen3.6-27B-FP")


def test_a_caller_may_change_what_it_gets() -> None:
    config = catalogue.lookup("Qwen/Qwen3.6-27B-FP8")
    assert config is not None
    config["text_config"] = None
    assert catalogue.load("Qwen/Qwen3.6-27B-FP8").param_count() == 27_781_427_952
