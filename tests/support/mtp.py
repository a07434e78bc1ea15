"""A multi-token-prediction layer beside a tiny checkpoint, made of transformers' own modules."""

from __future__ import annotations

import importlib
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.families import FAMILIES, fill, write_family


class ReferenceMtp(torch.nn.Module):
    """transformers has no such layer: this is its own decoder layer and norms, in the order of
    vLLM's ``Qwen3NextMultiTokenPredictor``.
    """

    def __init__(self, decoder: Any, family: str) -> None:
        super().__init__()
        config = deepcopy(decoder.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        prefix = FAMILIES[family][0]
        norm = getattr(module, f"{prefix}RMSNorm")
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([getattr(module, f"{prefix}DecoderLayer")(config, 0)])
        self.norm: Any = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden: Any = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_embedding: Any = norm(config.hidden_size, eps=config.rms_norm_eps)
        self._decoder = [decoder]  # no submodule: its weights are its own

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[Any, Any]:
        """Logits and hidden states from the next tokens ``[T]`` and hidden states ``[T, H]`` of
        one whole sequence.
        """
        decoder = self._decoder[0]
        embedded = self.pre_fc_norm_embedding(decoder.model.embed_tokens(tokens))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], dim=-1))[None]
        positions = torch.arange(len(tokens))[None]
        rotary = decoder.model.rotary_emb(x, positions)
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        x = self.layers[0](
            x, position_embeddings=rotary, attention_mask=mask, position_ids=positions
        )
        out = self.norm(x[0] if isinstance(x, tuple) else x)[0]
        return decoder.lm_head(out), out


def write_with_mtp(
    folder: Path, family: str, *, per_expert: bool = False, **changes: Any
) -> tuple[Any, ReferenceMtp]:
    """A tiny checkpoint with the layer; returns transformers' module and the layer."""
    module = write_family(folder, family, **changes)
    mtp = ReferenceMtp(module, family).float().eval()
    torch.manual_seed(11)
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            fill(name, parameter)
            if per_expert and ".experts." in name:
                tensors |= _one_by_one(f"mtp.{name}", parameter)
            else:
                tensors[f"mtp.{name}"] = parameter.detach().clone()
    save_file(tensors, str(folder / "mtp.safetensors"))
    _index(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"mtp_num_hidden_layers": 1}
    if family == "qwen3_next":  # as its publisher's
        del config["mtp_num_hidden_layers"]
    path.write_text(json.dumps(config))
    return module, mtp


def _one_by_one(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    root, _, last = name.rpartition(".")
    found = {}
    for i, weight in enumerate(parameter.detach()):
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for part, rows in zip(names, weight.chunk(len(names)), strict=True):
            found[f"{root}.{i}.{part}.weight"] = rows.clone()
    return found


def _index(folder: Path) -> None:
    """Two shards and the index that names their tensors."""
    from safetensors import safe_open

    where: dict[str, str] = {}
    for name in ("model.safetensors", "mtp.safetensors"):
        with safe_open(str(folder / name), "pt") as file:
            where |= dict.fromkeys(file.keys(), name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
