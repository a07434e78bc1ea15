# 1. vLLM
docker run --gpus all --ipc=host -p 8000:8000 \
 -v ~/.cache/huggingface:/root/.cache/huggingface \
 vllm/vllm-openai:latest \
 --model Qwen/Qwen-27B-Instruct \
 --tensor-parallel-size 1 \
 --gpu-memory-utilization 0.92 \
 --max-model-len 32768 \
 --max-num-seqs 64 \
 --enable-chunked-prefill true \
 --max-num-batched-tokens 2048 \
 --enable-prefix-caching \
 --kv-cache-dtype fp8 \
 --port 8000

# 2. SGLang
docker run --gpus all --ipc=host --shm-size 32g -p 30000:30000 \
 -v ~/.cache/huggingface:/root/.cache/huggingface \
 lmsysorg/sglang:latest \
 python3 -m sglang.launch_server \
 --model-path Qwen/Qwen-27B-Instruct \
 --tp 1 \
 --mem-fraction-static 0.88 \
 --context-length 32768 \
 --enable-flashinfer \
 --chunked-prefill-size 2048 \
 --kv-cache-dtype fp8_e5m2 \
 --schedule-policy lru \
 --port 30000

# 3. TensorRT-LLM: convert, then compile
python3 /app/tensorrt_llm/examples/qwen/convert_checkpoint.py \
 --model_dir ./Qwen-27B-Instruct \
 --output_dir ./tllm_checkpoint_qwen27b_fp8 \
 --dtype bfloat16 --fp8_gemm --fp8_kv_cache

trtllm-build \
 --checkpoint_dir ./tllm_checkpoint_qwen27b_fp8 \
 --output_dir ./engine_qwen27b_fp8 \
 --gemm_plugin fp8 --gpt_attention_plugin fp8 \
 --tokens_per_block 64 --paged_kv_cache enable \
 --max_batch_size 64 --max_input_len 8192 --max_seq_len 16384
