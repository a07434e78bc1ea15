"""Quantizing a checkpoint: what is written, who reads it, and what interrupts leave."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.arch.load import arch_from_config, load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.arch.quant import stored_parts, weight_bytes
from hullspeed.arch.safetensors import read_file
from hullspeed.arch.tensors import Role
from hullspeed.cli.main import run
from hullspeed.errors import CorruptFileError, UnsupportedModelError, UsageError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.models.load import load_decoder, open_weights
from hullspeed.models.quantize import quantize_checkpoint
from hullspeed.models.quantize_codes import fp8_codes, integer_codes
from hullspeed.models.quantize_result import Quantized
from hullspeed.models.quantize_targets import Target, target
from hullspeed.models.quantized import QuantizedTensor, numbers
from hullspeed.models.quantized.packing import pack, unpack
from hullspeed.sources.files import INDEX_NAME, ModelFiles, from_folder
from support.families import write_family

from .quantized_files import CONFIG, LINEARS, plain_tensors, write

TARGETS: dict[str, Target] = {
    "fp8": target("fp8"),
    "fp8 row": target("fp8", format="compressed-tensors"),
    "int8": target("int8"),
    "int8 w8a8": target("int8", activations=8),
    "int4": target("int4"),
    "int4 g32": target("int4", group=32),
}
# Largest relative error of random normal weights; the format's own, with room.
BOUNDS = {"fp8": 0.03, "int8": 0.012, "int4": 0.13}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bf16 in two shards, with files that must and must not be copied."""
    folder = tmp_path_factory.mktemp("source")
    tensors = {name: tensor.bfloat16() for name, tensor in plain_tensors().items()}
    config = CONFIG | {"dtype": "bfloat16", "auto_map": {"AutoModel": "modeling_x.XModel"}}
    write(folder, config, {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for shard, part in shards.items():
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").write_text("Apache-2.0")
    (folder / "modeling_x.py").write_text("raise SystemExit")
    return folder


def opened(folder: Path) -> tuple[ModelFiles, ModelArch]:
    files = from_folder(folder, source=str(folder))
    return files, load_arch(files)


def quantized(source: Path, out: Path, name: str, **options: Any) -> Quantized:
    files, arch = opened(source)
    return quantize_checkpoint(files, arch, out, TARGETS[name], **options)


def tensor_bytes(folder: Path) -> int:
    files = folder.glob("*.safetensors")
    return sum(tensor.nbytes for path in files for tensor in read_file(path).values())


def independent(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """All tensors as compressed-tensors' own converters dequantize them, in float32."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    # Scales in float32, else their code multiplies in bf16.
    tensors = {
        key: tensor.float() if "weight_scale" in key else tensor for key, tensor in tensors.items()
    }
    from compressed_tensors.entrypoints.convert.converters import (
        CompressedTensorsDequantizer,
        FP8BlockDequantizer,
    )

    if name == "fp8":
        section = json.loads((folder / "config.json").read_text())["quantization_config"]
        converter = FP8BlockDequantizer(
            ignore=section["modules_to_not_convert"],
            targets=["re:.*proj$"],
            weight_block_size=tuple(section["weight_block_size"]),
            dtype=torch.float32,
        )
        result: dict[str, torch.Tensor] = converter.process(tensors)
        return result
    unquantized = ["re:.*embed_tokens$", "re:.*norm$"]
    other = CompressedTensorsDequantizer(str(folder), ignore=unquantized, dtype=torch.float32)
    return dict(other.process(tensors))


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_is_read_alike_here_and_by_its_own_library(
    name: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told: list[tuple[int, int]] = []
    result = quantized(source, out, name, threads=2, progress=lambda n, t: told.append((n, t)))
    files, arch = opened(out)
    weights = open_weights(files.weights, arch)
    weights.check(arch)
    theirs = independent(out, name)
    before, plain = opened(source)
    original = open_weights(before.weights, plain)
    errors = {change.name: change.relative_error for change in result.changes}
    assert len(errors) == 2 * len(LINEARS) - len(result.kept)
    for spec in arch.tensors():
        got, was = weights.tensor(spec.name), original.tensor(spec.name)
        torch.testing.assert_close(got, theirs[spec.name].float(), rtol=0, atol=0)
        off = float((got - was).norm() / was.norm())
        assert off == pytest.approx(errors.get(spec.name, 0.0), rel=1e-4, abs=1e-9)
        assert off < BOUNDS[name.partition(" ")[0]]
    # Sizes: the file's, the planner's with headers and from the config alone, and the report's.
    alone = arch_from_config(json.loads((out / "config.json").read_text()))
    assert weight_bytes(arch) == weight_bytes(alone) == tensor_bytes(out) == result.bytes_after
    assert not arch.extras
    assert result.bytes_before == tensor_bytes(source)
    assert told[-1] == (result.bytes_before, result.bytes_before)
    assert {p.name for _, p in stored_parts(alone)} == {
        tensor for path in files.weights for tensor in read_file(path)
    }
    decoder = load_decoder(files.weights, arch, kernels="ref", weight_dtype="fp32")
    assert decoder.arch.quant != "none"


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_files_of_the_new_checkpoint(name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantized(source, out, name)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "LICENSE", "tokenizer.json", INDEX_NAME,
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert "auto_map" not in config
    index = json.loads((out / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == tensor_bytes(out)
    for tensor, shard in index["weight_map"].items():
        assert tensor in read_file(out / shard)
    with safetensors.safe_open(out / "model-00001-of-00002.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("name", ["fp8 row", "int8", "int8 w8a8", "int4 g32"])
def test_the_section_is_of_compressed_tensors_schema(name: str) -> None:
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    section = TARGETS[name].section(["lm_head"])
    parsed = QuantizationConfig.model_validate(section)
    scheme = parsed.config_groups["group_0"]
    assert infer_module_format(torch.nn.Linear, scheme) == section["format"]
    assert scheme.weights.num_bits == TARGETS[name].bits
    assert (scheme.input_activations is None) == TARGETS[name].packed


def test_an_interrupted_run_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    quantized(source, whole, "int4 g32")
    out = tmp_path / "out"
    half = tensor_bytes(source) * 0.7

    def interrupt(done: int, _: int) -> None:
        if done > half:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(source, out, "int4 g32", progress=interrupt)
    assert not out.exists()
    unfinished = tmp_path / "out.unfinished"
    kept = [path.name for path in unfinished.glob("*.safetensors*")]
    assert kept == ["model-00001-of-00002.safetensors"]
    with pytest.raises(UsageError, match="other options"):
        quantized(source, out, "int8")
    result = quantized(source, out, "int4 g32")
    assert result.resumed_shards == 1
    assert len(result.changes) == 2 * len(LINEARS)
    assert not unfinished.exists()
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    with pytest.raises(UsageError, match="exists"):
        quantized(source, out, "int4 g32")


def test_a_kept_shard_that_was_damaged_is_made_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    calls: list[int] = []

    def interrupt(done: int, total: int) -> None:
        calls.append(done)
        if done > 0.9 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(source, out, "int8", progress=interrupt)
    shard = tmp_path / "out.unfinished" / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    assert quantized(source, out, "int8").resumed_shards == 0
    files, arch = opened(out)
    open_weights(files.weights, arch).check(arch)


def test_two_runs_do_not_share_a_folder(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def second(_done: int, _total: int) -> None:
        with pytest.raises(UsageError, match="another run"):
            quantized(source, out, "int4")

    quantized(source, out, "int4", progress=second)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = plain_tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = float("inf")
    write(tmp_path / "source", CONFIG, tensors)
    with pytest.raises(CorruptFileError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        quantized(tmp_path / "source", tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be_quantized(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantized(source, out, "int4")
    with pytest.raises(UnsupportedModelError, match=r"quantized already.*compressed_int"):
        quantized(out, tmp_path / "again", "int8")
    _, arch = opened(source)
    with pytest.raises(UnsupportedModelError, match="gguf"):
        quantize_checkpoint(
            ModelFiles(source="x", root=source, kind="gguf"), arch, tmp_path / "y", TARGETS["int8"]
        )


def test_what_the_format_does_not_fit_stays_with_its_siblings(tmp_path: Path) -> None:
    """q, k and v become one weight in vLLM: if one cannot be split in blocks, none is."""
    source, out = tmp_path / "source", tmp_path / "out"
    write(source, CONFIG, plain_tensors())  # k and v have 64 rows
    result = quantized(source, out, "fp8")
    stays = {f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkv"}
    assert set(result.kept) == stays
    assert "64 outputs" in next(iter(result.kept.values()))
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert set(section["modules_to_not_convert"]) == {*stays, "lm_head"}
    _, arch = opened(out)
    assert weight_bytes(arch) == tensor_bytes(out)


def test_options_that_cannot_be() -> None:
    for options in (
        {"kind": "int4", "format": "fp8"},
        {"kind": "int8", "group": 32},
        {"kind": "int4", "group": 64},
        {"kind": "int4", "activations": 8},
    ):
        with pytest.raises(UsageError):
            target(**options)


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["quantize", str(source), str(out), "--to", "int4", "--group", "32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_after"] == tensor_bytes(out) < report["bytes_before"]
    assert report["layers"].keys() == {"0", "1"}
    assert len(report["weights"]) == 2 * len(LINEARS)
    assert run(["quantize", str(source), str(tmp_path / "b"), "--to", "fp8", "-q"]) == 0
    text = capsys.readouterr().out
    assert "relative error" in text
    assert "stay as they are" in text
    assert run(["quantize", str(source), str(out), "--to", "int4"]) == 2
    assert "exists" in capsys.readouterr().err


# -- numbers ---------------------------------------------------------------------------------------

matrices = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(matrices, st.sampled_from([4, 8]), st.sampled_from(["bf16", "fp16", "fp32"]))
def test_integers_round_to_the_nearest_of_their_scale(
    shape: tuple[int, int, int], bits: int, dtype: str
) -> None:
    rows, groups, seed = shape
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, groups * 32)) * 10.0 ** rng.integers(-4, 3)).astype(
        np.float32
    )
    weight[rng.random(weight.shape) < 0.1] = 0.0
    codes, scales = integer_codes(weight, bits, 32, dtype)
    high = 2 ** (bits - 1)
    assert codes.max() < 2 * high
    wide = np.repeat(scales, 32, axis=1).astype(np.float64)
    nearest = np.clip(np.rint(weight / wide), -high, high - 1)
    level = codes.astype(np.float64) - high
    # A product with the inverse may choose the other of two levels that are equally near.
    assert np.all((level == nearest) | (np.abs(np.abs(weight / wide - level) - 0.5) < 1e-4))
    # Never worse than the scale that just holds the largest weight, as it would be stored.
    exact = torch.from_numpy(np.abs(weight).reshape(rows, groups, 32).max(2) / (high - 1))
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    plain = np.repeat(exact.to(kind).float().numpy(), 32, axis=1)
    plain[plain == 0] = scales.min()
    before = ((np.clip(np.rint(weight / plain), -high, high - 1) * plain - weight) ** 2).sum()
    assert ((level * wide - weight) ** 2).sum() <= before * 1.02 + 1e-30


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1)),
    st.sampled_from([(1, 9), (2, 4), (4, 3)]),
)
def test_fp8_is_within_half_a_step(shape: tuple[int, int, int], block: tuple[int, int]) -> None:
    rows, columns, seed = shape
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
    tall, wide = block
    codes, scales = fp8_codes(weight, tall, wide, "bf16")
    value = QuantizedTensor(codes, numbers.e4m3(), scales, None, tall, wide).dequantize()
    assert scales.shape == (math.ceil(rows / tall), math.ceil(columns / wide))
    full = np.kron(scales, np.ones(block, np.float32))[:rows, :columns]
    # Three bits of mantissa: half a step is 1/16 of the value, or of the smallest normal number;
    # the scale's own rounding to bf16 may clip the largest by 2^-8.
    step = np.maximum(np.abs(weight) / 16, full * 2.0**-10)
    assert np.all(np.abs(value - weight) <= step * 1.01 + np.abs(weight) * 2.0**-8)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 70), st.sampled_from([4, 8]), st.integers(0, 2**32 - 1))
def test_packed_codes_come_back(rows: int, columns: int, bits: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    words = pack(codes, bits)
    assert words.shape == (rows, math.ceil(columns * bits / 32))
    np.testing.assert_array_equal(unpack(words.view(np.uint32), bits, columns), codes)
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    signed = torch.from_numpy(codes.astype(np.int16) - 2 ** (bits - 1)).to(torch.int8)
    np.testing.assert_array_equal(words, pack_to_int32(signed, bits).numpy())


# -- others read it --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:You passed:UserWarning")
@pytest.mark.parametrize("name", ["int4 g32", "int8", "fp8 row"])
def test_transformers_runs_it(name: str, tmp_path: Path) -> None:
    import transformers as hf

    source, out = tmp_path / "source", tmp_path / "out"
    write(source, CONFIG, plain_tensors())
    quantized(source, out, name)
    module: Any = hf.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=hf.CompressedTensorsConfig(dequantize=True)
    )
    tokens = [5, 17, 3, 88, 41]
    with torch.inference_mode():
        theirs = module.eval()(torch.tensor([tokens])).logits[0, -1]
    files, arch = opened(out)
    decoder = load_decoder(files.weights, arch, kernels="ref", weight_dtype="fp32")
    decoder.allocate_kv(1)
    ours = decoder.forward(Batch.of([SpanInput(tokens, 0, [0], sample=True)]))[0]
    # transformers dequantizes in fp16.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_moe", "mixtral", "gemma3"])
def test_hybrids_and_experts(family: str, tmp_path: Path) -> None:
    """What the new config says, what the file holds and what is read agree in every family."""
    source = tmp_path / "source"
    write_family(source, family)
    files, arch = opened(source)
    before = open_weights(files.weights, arch)
    for name in ("int4 g32", "int8 w8a8", "fp8"):
        out = tmp_path / name
        result = quantize_checkpoint(files, arch, out, TARGETS[name])
        new_files, new_arch = opened(out)
        alone = arch_from_config(json.loads((out / "config.json").read_text()))
        assert weight_bytes(new_arch) == tensor_bytes(out)
        # A config that is silent of an MTP layer may mean one that these files leave out.
        assert weight_bytes(new_arch, extras=False) == weight_bytes(alone, extras=False)
        weights = open_weights(new_files.weights, new_arch)
        weights.check(new_arch)
        changed = {change.name for change in result.changes}
        roles = {spec.name: spec.role for spec in arch.tensors()}
        assert {roles[n] for n in changed} <= {Role.LINEAR, Role.EXPERT}
        for spec in new_arch.tensors():
            got, was = weights.tensor(spec.name), before.tensor(spec.name)
            if spec.name not in changed:
                assert torch.equal(got, was), spec.name
            else:
                assert (got - was).norm() < BOUNDS[name.partition(" ")[0]] * was.norm(), spec.name


def test_fused_experts_are_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "source", "gpt_oss")
    with pytest.raises(UnsupportedModelError, match="fused"):
        quantized(tmp_path / "source", tmp_path / "out", "int4")
