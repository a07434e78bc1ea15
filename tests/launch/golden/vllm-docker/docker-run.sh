#!/bin/sh
# Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight.
# It needs an API key in VLLM_API_KEY.
exec docker run \
  --rm \
  --gpus all \
  --ipc host \
  -p 127.0.0.1:8000:8000 \
  -v ~/.cache/huggingface:/root/.cache/huggingface \
  -e HF_TOKEN \
  -e VLLM_API_KEY \
  vllm/vllm-openai:v0.33.0 Qwen/Qwen3.6-27B-FP8 \
  --host 0.0.0.0 \
  --port 8000 \
  --max-model-len 32768 \
  --max-num-seqs 256 \
  --kv-cache-dtype fp8 \
  --reasoning-parser qwen3 \
  --tool-call-parser qwen3_coder \
  --enable-auto-tool-choice \
  --no-enable-prefix-caching \
  --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
