"""Streams from a running server, one after another and all at once.

  python -m loopjax.serve runs/lm --slots=16 --max_waiting=64
  python benchmarks/bench_serve.py --streams=64

Prints one JSON object: tokens a second, and seconds until the first token and
until the end of a stream (median and 95th percentile). Streams are warmed up,
so that nothing is compiled while it is timed.
"""

import argparse
import asyncio
import json
import time

import httpx
import numpy as np


async def ask(client: httpx.AsyncClient, seed: int, options) -> dict:
  """Times one stream."""
  started = time.monotonic()
  first, usage, text = 0.0, {}, ""
  asked = {
    "prompt": options.prompt, "max_tokens": options.max_tokens, "seed": seed,
    "temperature": options.temperature, "exit": options.exit, "stream": True,
    "stream_options": {"include_usage": True},
  }  # fmt: skip
  async with client.stream("POST", "/v1/completions", json=asked) as response:
    response.raise_for_status()
    async for line in response.aiter_lines():
      if not line or line == "data: [DONE]":
        continue
      part = json.loads(line.removeprefix("data: "))
      first = first or time.monotonic() - started
      usage = part.get("usage", usage)
      text += "".join(choice["text"] for choice in part["choices"])
  seconds = time.monotonic() - started
  return {"first": first, "seconds": seconds, "text": text, **usage}


def summary(found: list[dict], seconds: float) -> dict:
  """Rates and waiting times of some streams."""
  tokens = sum(one["completion_tokens"] for one in found)
  loops = sum(
    one["loops_per_token"] * one["completion_tokens"] for one in found
  )
  return {
    "streams": len(found),
    "tokens": tokens,
    "seconds": round(seconds, 2),
    "tokens_per_second": round(tokens / seconds, 1),
    "loops_per_token": round(loops / tokens, 3),
    **{
      f"{name}_p{p}": round(
        float(np.percentile([one[name] for one in found], p)), 3
      )
      for name in ("first", "seconds")
      for p in (50, 95)
    },
  }


async def run(options) -> dict:
  """Warms up, then times both ways with the same seeds."""
  limits = httpx.Limits(max_connections=None)
  async with httpx.AsyncClient(
    base_url=options.url, timeout=None, limits=limits
  ) as client:

    async def together(number: int) -> list[dict]:
      asked = [ask(client, seed, options) for seed in range(number)]
      return list(await asyncio.gather(*asked))

    await together(options.streams)
    started = time.monotonic()
    at_once = await together(options.streams)
    middle = time.monotonic()
    alone = [await ask(client, seed, options) for seed in range(options.alone)]
    ended = time.monotonic()
  same = sum(
    one["text"] == other["text"]
    for one, other in zip(at_once, alone, strict=False)
  )
  return {
    "at_once": summary(at_once, middle - started),
    "one_after_another": summary(alone, ended - middle),
    "same_texts": f"{same} of {len(alone)}",
  }


def main() -> None:
  """Prints the report."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--url", default="http://127.0.0.1:8000")
  parser.add_argument("--streams", type=int, default=64)
  parser.add_argument("--alone", type=int, default=8)
  parser.add_argument("--prompt", default="It was")
  parser.add_argument("--max_tokens", type=int, default=100)
  parser.add_argument("--temperature", type=float, default=0.8)
  parser.add_argument("--exit", type=float, default=1.0)
  print(json.dumps(asyncio.run(run(parser.parse_args())), indent=2))


if __name__ == "__main__":
  main()
