"""Readers of weight files: GGUF and safetensors; load-time quantisation."""
