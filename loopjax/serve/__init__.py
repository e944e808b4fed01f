"""An HTTP endpoint over the engine, as OpenAI's clients speak to theirs.

`protocol` says what may be asked and how answers look, `worker` is the one
thread that the engine runs in, `app` connects both.
"""
