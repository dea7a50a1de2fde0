"""Hugging Face folders. In: `config.json` and safetensors. Out: a config and a model; and the way back."""
