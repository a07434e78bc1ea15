#!/bin/sh
# Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight.
# It needs an API key in SGLANG_API_KEY.
exec docker run \
  --rm \
  --gpus all \
  --ipc host \
  -p 127.0.0.1:8000:8000 \
  -v ~/.cache/huggingface:/root/.cache/huggingface \
  -e HF_TOKEN \
  -e SGLANG_API_KEY \
  lmsysorg/sglang:v0.5.23 sglang serve \
  --model-path Qwen/Qwen3.6-27B-FP8 \
  --host 0.0.0.0 \
  --port 8000 \
  --context-length 32768 \
  --max-running-requests 256 \
  --kv-cache-dtype fp8_e4m3 \
  --reasoning-parser qwen3 \
  --tool-call-parser qwen3_coder \
  --speculative-algorithm EAGLE \
  --speculative-num-steps 3 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 4 \
  --enable-metrics \
  --api-key "$SGLANG_API_KEY"
