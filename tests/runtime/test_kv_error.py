"""What KV cache types cost, on models small enough to compare, and that the measure can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hullspeed.errors import UsageError
from hullspeed.kernels.batch import Batch
from hullspeed.models.decoder import Decoder
from hullspeed.runtime.config import KvDtype
from hullspeed.runtime.kv_error import measure_kv_error

from .hybrids import hybrid_case, random_prompt

NARROW: list[KvDtype] = ["fp16", "bf16", "int8", "fp8"]
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(scope="module", params=["qwen3_5", "gemma3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    changes: dict[str, Any] = HYBRID if request.param == "qwen3_5" else {}
    folder: Path = tmp_path_factory.mktemp(request.param)
    return hybrid_case(folder, request.param, **changes).decoder


def test_fp32_is_itself_and_narrower_types_are_further_off(decoder: Decoder) -> None:
    tokens = random_prompt(120, 1)
    report = measure_kv_error(decoder, tokens, ["fp32", *NARROW], greedy_tokens=8)
    plain, fp16, bf16, int8, fp8 = report.errors
    assert (plain.mean_kl_nats, plain.max_logit_change, plain.greedy_equal_tokens) == (0, 0, 8)
    assert 0 < fp16.max_logit_change < bf16.max_logit_change < fp8.max_logit_change
    assert fp16.mean_kl_nats < int8.mean_kl_nats < fp8.mean_kl_nats < 0.05
    assert fp16.kv_bytes_per_token * 2 == report.fp32_bytes_per_token
    # One float32 scale for 32 codes of a byte.
    assert int8.kv_bytes_per_token * 32 == fp16.kv_bytes_per_token // 2 * 36
    assert report.text_tokens == 120
    assert report.decoded_tokens == 30


def test_a_wrong_scale_is_seen(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_prompt(120, 2)
    (sound,) = measure_kv_error(decoder, tokens, ["int8"], greedy_tokens=8).errors
    forward = Decoder.forward

    def corrupting(self: Decoder, batch: Batch) -> torch.Tensor:
        for mixer in self._attention():
            if mixer.kv.value_scales is not None:
                mixer.kv.value_scales[0, 0, 5] *= 8
        return forward(self, batch)

    monkeypatch.setattr(Decoder, "forward", corrupting)
    (broken,) = measure_kv_error(decoder, tokens, ["int8"], greedy_tokens=8).errors
    assert broken.mean_kl_nats > 10 * sound.mean_kl_nats
    assert broken.max_logit_change > sound.max_logit_change


def test_a_text_of_a_few_tokens_is_refused(decoder: Decoder) -> None:
    with pytest.raises(UsageError, match="at least 8 tokens"):
        measure_kv_error(decoder, [1, 2, 3], NARROW)
