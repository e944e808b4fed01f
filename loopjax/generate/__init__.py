"""Text generation with causal models.

`engine` generates continuations of many prompts at once (continuous batching):
`scheduler` assigns requests to slots, `batches` converts them to arrays, and
`programs` has what is compiled. `sampling` samples tokens, `text` decodes them,
`source` loads models; `loopjax generate` is the command.
"""
