"""What a model is, in numbers: config.json, safetensors headers and GGUF metadata to ModelArch."""
