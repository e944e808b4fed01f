"""Imports and exports models in the Hugging Face Hub's layout (safetensors).

No code of a repository is run and no pickle is loaded: a table per architecture
(`llama`, `huginn`) maps its tensors to a model family of this package.
"""
