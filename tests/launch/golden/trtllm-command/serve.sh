trtllm-serve Qwen/Qwen3-32B --host 127.0.0.1 --port 8000 --tp_size 2 --config serve.yaml
