"""Generation with any causal family: an engine, and what it says.

`engine` writes many texts at once from prompts of token ids; `sampling` draws
tokens; `text` makes texts of them; `python -m loopjax.generate` is a terminal's
end of it.
"""
