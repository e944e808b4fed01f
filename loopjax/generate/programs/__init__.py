"""What the engine compiles: `program` reads prompts (`prefill`) and writes
tokens (`decoding`) with a `cached_model`, for a batch of `slots`.
"""
