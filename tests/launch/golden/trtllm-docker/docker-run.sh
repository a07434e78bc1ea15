#!/bin/sh
# Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight.
# trtllm checks no API key: keep it behind a proxy that does.
exec docker run \
  --rm \
  --gpus 2 \
  --ipc host \
  -p 127.0.0.1:8000:8000 \
  -v ~/.cache/huggingface:/root/.cache/huggingface \
  -e HF_TOKEN \
  -v ./serve.yaml:/workspace/serve.yaml:ro \
  -w /workspace \
  nvcr.io/nvidia/tensorrt-llm/release:1.2.1 trtllm-serve Qwen/Qwen3-32B \
  --host 0.0.0.0 \
  --port 8000 \
  --tp_size 2 \
  --config serve.yaml
