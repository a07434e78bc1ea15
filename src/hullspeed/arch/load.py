"""load_arch: a model's files to a ``ModelArch``, reading no weight.

From config.json, checked against the safetensors headers where there are any, or from GGUF
metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hullspeed.arch import families
from hullspeed.arch.families.common import union
from hullspeed.arch.fields import Fields, parse_json, read_json
from hullspeed.arch.headers import with_headers, with_module_bytes
from hullspeed.arch.model import ModelArch
from hullspeed.arch.quant_config import UnknownQuantizationError, weight_format
from hullspeed.arch.safetensors import StoredTensor, merge, parse_header, read_files
from hullspeed.errors import UnsupportedModelError
from hullspeed.sources.files import ModelFiles

if TYPE_CHECKING:
    from hullspeed.sources.remote import RemoteModel


def load_arch(files: ModelFiles) -> ModelArch:
    """The architecture of a model on this machine.

    Raises:
        CorruptFileError: if a file is cut short or contradicts itself or another.
        UnsupportedModelError: if the architecture or a field of it is not known here.
        SourceError: if a file cannot be read.
    """
    if files.kind == "gguf":
        from hullspeed.arch.gguf_arch import arch_from_gguf  # noqa: PLC0415 - needs numpy

        return arch_from_gguf(files.weights)
    if files.config is None:
        raise UnsupportedModelError(
            "weights without a config.json", seen=str(files.root), fix="put config.json beside them"
        )
    return _arch(
        read_json(files.config),
        generation=read_json(files.generation_config) if files.generation_config else None,
        modelopt=read_json(files.quant_config) if files.quant_config else None,
        more_eos_ids=_tokenizer_eos(files),
        headers=read_files(files.weights) if files.weights else None,
    )


def arch_from_config(
    config: Mapping[str, Any],
    *,
    generation: Mapping[str, Any] | None = None,
    modelopt: Mapping[str, Any] | None = None,
    more_eos_ids: Iterable[int] = (),
) -> ModelArch:
    """The architecture that a config.json describes.

    Args:
        config: config.json.
        generation: generation_config.json; its end-of-sequence ids count too.
        modelopt: hf_quant_config.json.
        more_eos_ids: Further ids that end a sequence, from the tokenizer.

    Raises:
        UnsupportedModelError: if the architecture, its quantization or a field is not known here.
    """
    arch = families.build(Fields(config))
    stored = weight_format(config, modelopt)
    generation_ids = Fields(generation or {}, "generation_config.json").naturals("eos_token_id")
    eos_ids = union(arch.eos_token_ids, generation_ids, more_eos_ids)
    return replace(
        arch,
        quant=stored.name,
        weight_format=stored,
        eos_token_ids=tuple(token for token in eos_ids if token < arch.vocab),
    )


def load_remote(reference: str) -> ModelArch:
    """The architecture of ``ORG/NAME[@REVISION]`` on the hub, reading only headers.

    Raises:
        SourceError: if the model is unknown, closed to this user or out of reach.
        CorruptFileError: if a header contradicts itself or config.json.
        UnsupportedModelError: if the architecture or a field of it is not known here.
    """
    from hullspeed.sources.remote import read_remote  # noqa: PLC0415 - needs an HTTP client

    return arch_from_remote(read_remote(reference))


def arch_from_remote(model: RemoteModel) -> ModelArch:
    """The architecture of a model on the hub, none of whose weights are here.

    Raises:
        CorruptFileError: if a header contradicts itself or config.json.
        UnsupportedModelError: if the architecture or a field of it is not known here.
    """

    def parsed(raw: bytes | None, name: str) -> dict[str, Any] | None:
        return parse_json(raw, name) if raw else None

    shards = (parse_header(h.raw, h.file_bytes, h.name) for h in model.headers)
    return _arch(
        parse_json(model.config, "config.json"),
        generation=parsed(model.generation_config, "generation_config.json"),
        modelopt=parsed(model.quant_config, "hf_quant_config.json"),
        headers=merge(shards) if model.headers else None,
    )


def _arch(
    config: dict[str, Any],
    *,
    headers: Mapping[str, StoredTensor] | None,
    modelopt: Mapping[str, Any] | None,
    **more: Any,
) -> ModelArch:
    """From config.json and, where there are weights, their headers.

    A quantization that is not known here is no obstacle when headers state every size.
    """
    try:
        arch = arch_from_config(config, modelopt=modelopt, **more)
    except UnknownQuantizationError as error:
        if headers is None:
            raise
        plain = {k: v for k, v in config.items() if k != "quantization_config"}
        arch = replace(arch_from_config(plain, **more), quant=error.method)
        return with_module_bytes(arch, headers)
    return arch if headers is None else with_headers(arch, headers)


def _tokenizer_eos(files: ModelFiles) -> list[int]:
    """The id of tokenizer_config.json's ``eos_token``, where the file lists its added tokens."""
    path = next((p for p in files.tokenizer if p.name == "tokenizer_config.json"), None)
    if path is None:
        return []
    config = read_json(path)
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = config.get("added_tokens_decoder")
    if not isinstance(text, str) or not isinstance(added, dict):
        return []
    return [
        int(number)
        for number, entry in added.items()
        if isinstance(entry, dict) and entry.get("content") == text and number.isdecimal()
    ]
