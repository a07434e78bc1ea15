"""Tiny random checkpoints on disk, written by transformers, and the greedy output it gives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hullspeed.arch.load import load_arch
from hullspeed.clock import MonotonicClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.sampling import SamplingParams
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.sampler import Sampler
from hullspeed.sources.files import from_folder

VOCAB = 307
CONTEXT_TOKENS = 512
PAGE_TOKENS = 16
N_PAGES = 96
N_OUTPUT = 64

# Below this distance between the two best logits, float32 sums in another order may swap them.
CLEAR_MARGIN = 1e-3


def write_checkpoint(folder: Path, family: str) -> Any:
    """A random model of ``family`` in ``folder``; returns the transformers module."""
    import transformers as hf

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(hf, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=family == "qwen2",
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    module = getattr(hf, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            # Wide weights: clear winners; norms and biases that are not 1 and 0.
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.25)
    module.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return module


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, and one end token."""
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def alphabet() -> list[str]:
    """The characters of byte-level BPE."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True)
class Greedy:
    """Greedy output, and the smallest distance between the two best logits on the way."""

    tokens: list[int]
    margin: float


def greedy(module: Any, prompt: list[int], n_output: int = N_OUTPUT) -> Greedy:
    """By transformers' own ``generate``."""
    given = torch.tensor([prompt])
    out = module.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=n_output,
        min_new_tokens=n_output,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    return Greedy(out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min()))


@dataclass
class Case:
    """A model as we run it, and transformers' module of the same weights."""

    decoder: Decoder
    module: Any
    page_tokens: int = PAGE_TOKENS

    def loop(
        self,
        *,
        step_tokens: int,
        max_running: int,
        n_pages: int | None = None,
        cache: str = "segment",
    ) -> EngineLoop:
        """A fresh scheduler and cache over the decoder's pages, whatever is left in them."""
        arch = self.decoder.arch
        scheduler = build_scheduler(
            n_pages=n_pages or self.decoder.n_pages,
            page_tokens=self.page_tokens,
            max_running=max_running,
            step_tokens=step_tokens,
            max_context_tokens=self.decoder.max_context_tokens,
            cache=cache,
        )
        executor = TorchExecutor(self.decoder, Sampler(arch.vocab))
        limits = Limits(vocab=arch.vocab, max_context_tokens=self.decoder.max_context_tokens)
        return EngineLoop(scheduler, executor, MonotonicClock(), limits)


def tiny_case(folder: Path, family: str, kernels: str = "cpu") -> Case:
    """Through config.json and safetensors, as a user's model would come."""
    module = write_checkpoint(folder, family)
    files = from_folder(folder, source=str(folder))
    decoder = load_decoder(
        files.weights,
        load_arch(files),
        kernels=kernels,  # type: ignore[arg-type]
        weight_dtype="fp32",
        threads=1,
    )
    decoder.allocate_kv(N_PAGES, PAGE_TOKENS)
    return Case(decoder, module)


def run(loop: EngineLoop, prompts: list[list[int]], n_output: int = N_OUTPUT) -> list[list[int]]:
    """Complete ``prompts`` together, invariants checked after every step."""
    params = SamplingParams(temperature=0.0, max_tokens=n_output)
    start = loop.scheduler.counters.steps * 1000
    sequences = [loop.add(start + i, prompt, params) for i, prompt in enumerate(prompts)]
    while loop.has_work:
        loop.step()
        loop.scheduler.check_integrity()
    return [sequence.output for sequence in sequences]
