"""Weights of Hugging Face models: Llama, Mistral, Qwen 2, Qwen 3 and GPT-2, in and out."""
