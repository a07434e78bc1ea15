"""SGLang logs: two pools, what caps the running requests, and dtypes from bytes."""

from __future__ import annotations

from hullspeed.plan.explain_log.explain import explain_log

HYBRID = """\
[2026-06-28 15:14:00] server_args=ServerArgs(model_path='Qwen/Qwen3.6-27B-FP8', tp_size=1, \
mem_fraction_static=0.83, context_length=256000, max_running_requests=None, \
kv_cache_dtype='auto', mamba_full_memory_ratio=0.9, disable_radix_cache=False)
[2026-06-28 15:14:20] Load weight begin. avail mem=78.60 GB
[2026-06-28 15:15:10] Load weight end. elapsed=60s, type=Qwen3_5ForConditionalGeneration, \
quant=fp8, avail mem=49.90 GB, mem usage=28.70 GB.
[2026-06-28 15:15:12] Mamba Cache is allocated. max_mamba_cache_size: 99, conv_state size: 0.27GB, \
ssm_state size: 14.06GB
[2026-06-28 15:15:13] KV Cache is allocated. #tokens: 300000, K size: 9.16 GB, V size: 9.16 GB
[2026-06-28 15:15:13] Memory pool end. avail mem=17.22 GB
[2026-06-28 15:16:45] max_total_num_tokens=300000, chunked_prefill_size=8192, \
max_prefill_tokens=16384, max_running_requests=19, context_len=256000, available_gpu_mem=17.22 GB
[2026-06-28 15:16:50] The server is fired up and ready to roll!
"""


def test_two_pools_are_read_back() -> None:
    """100 slots (one is padding) of 146.8 MiB are 14.34 GiB; 65,536 bytes a token in bf16."""
    explanation = explain_log(HYBRID)
    assert explanation.engine == "sglang"
    assert explanation.started
    reading = explanation.slots
    assert reading is not None
    assert reading.kv_dtypes == ("bf16",)
    assert reading.state_dtypes == ("fp32",)
    assert reading.strategies == ("extra_buffer",)  # 99 // 5 = 19
    assert reading.bound == "slots"
    at = {row.context_tokens: row.really for row in explanation.served}
    assert at[8192] == 19  # slots
    assert at[32768] == 9  # tokens


def test_a_balanced_split_serves_more() -> None:
    """99 slots and 300,000 tokens leave 19 requests of 8k; balanced for that length it is more, and
    the bytes of the split are those of the old one.
    """
    explanation = explain_log(HYBRID)
    (best,) = (r for r in explanation.remedies if "8,192" in r.change)
    slots = int(best.flag.split()[-1])
    requests = best.really[8192]
    assert (slots, requests) == (requests * 5, requests)
    assert requests > 19
    state = 153_944_064
    assert requests * (8192 * 65_536 + 5 * state) <= 300_000 * 65_536 + 100 * state
    assert (requests + 1) * (8192 * 65_536 + 5 * state) > 300_000 * 65_536 + 98 * state


def test_slot_sizes_of_a_public_log() -> None:
    """22 slots: conv 0.06 GB and ssm 3.23 GB, one slot of padding: the 27B's state in fp32."""
    text = HYBRID.replace("max_mamba_cache_size: 99", "max_mamba_cache_size: 22").replace(
        "conv_state size: 0.27GB, ssm_state size: 14.06GB",
        "conv_state size: 0.06GB, ssm_state size: 3.23GB intermediate_ssm_state_cache size: 2.25GB",
    )
    reading = explain_log(text).slots
    assert reading is not None
    assert reading.state_dtypes == ("fp32",)


def test_slots_cap_a_large_token_pool() -> None:
    """sglang#29575: 2,086,558 tokens and 33 running requests."""
    explanation = explain_log(
        HYBRID.replace("max_total_num_tokens=300000", "max_total_num_tokens=2086558")
        .replace("max_running_requests=19", "max_running_requests=33")
        .replace("max_mamba_cache_size: 99", "max_mamba_cache_size: 167")
    )
    assert explanation.slots is not None
    assert explanation.slots.bound == "slots"
    assert explanation.slots.strategies == ("extra_buffer",)
    assert {row.context_tokens: row.really for row in explanation.served}[8192] == 33


def test_refusal() -> None:
    text = HYBRID.splitlines()[0] + (
        "\nRuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
        "Current value: self.mem_fraction_static=0.3\n"
    )
    explanation = explain_log(text)
    assert not explanation.started
    (finding,) = explanation.findings
    assert "--mem-fraction-static" in finding.fix
