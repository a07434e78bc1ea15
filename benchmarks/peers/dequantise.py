"""A GGUF file as an fp32 Hugging Face checkpoint, so that a peer runs the very same weights.

    python benchmarks/peers/dequantise.py MODEL.gguf OUT_DIR

Transformers reads the GGUF but refuses to save what it read ("quantized with gguf and is not
serializable"), so the weights go into a fresh model without the quantization entry first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def dequantise(gguf: Path, out: Path) -> None:
    """Write ``out``/{config.json, model.safetensors, tokenizer files} with fp32 weights."""
    folder, name = str(gguf.parent), gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    plain.load_state_dict(loaded.state_dict())
    out.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    """Read the two paths and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    dequantise(args.gguf, args.out)


if __name__ == "__main__":
    main()
