"""Prefix reuse for Hugging Face Transformers."""
