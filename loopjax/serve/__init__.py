"""An HTTP server with OpenAI's completions and chat completions endpoints.

`protocol` validates requests, `answers` builds responses, `worker` runs the
engine in a thread, and `app` connects them.
"""
