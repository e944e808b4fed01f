"""Streams from a running server, one at a time and all at once.

  python -m loopjax.serve runs/lm --slots=16 --max_waiting=64
  python benchmarks/bench_serve.py --streams=64

  python benchmarks/bench_serve.py --rates=2,4,8 --streams=64
  python benchmarks/bench_serve.py --trial=1000 --pid=PID

Prints one JSON object: tokens per second, and seconds until the first token and
until the end of a stream (median and 95th percentile). Warm-up streams compile
everything before timing starts. With --rates, requests arrive at these mean
rates per second, independently of each other and of the answers; "between" is
the time between two parts of a stream that have text. Requests refused because
the queue is full are counted.

With --trial, this many requests arrive, eight at a time: every sixth is invalid
and every sixth is cancelled; the others must have the same text as alone, or
count as "mixed_up". "memory_mib" is the memory of process PID.
"""

import argparse
import asyncio
import collections
import json
import time

import httpx
import numpy as np

MISTAKES = (
  b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "max_tokens": -1}',
  b'{"prompt": "x", "temperature": "hot"}',
  b'{"prompt": "x", "exit_threshold": 7}',
  b'{"prompt": "x", "model": "other"}', b'{"prompt": "\xff"}',
)  # fmt: skip


async def ask(client: httpx.AsyncClient, seed: int, options) -> dict:
  """Times one stream."""
  started = time.monotonic()
  first, last, between, usage, text = 0.0, 0.0, [], {}, ""
  asked = {
    "prompt": options.prompt, "max_tokens": options.max_tokens, "seed": seed,
    "temperature": options.temperature, "stream": True,
    "exit_threshold": options.exit_threshold,
    "stream_options": {"include_usage": True},
  }  # fmt: skip
  async with client.stream("POST", "/v1/completions", json=asked) as response:
    if response.status_code == 429:
      return {"refused": 1}
    response.raise_for_status()
    async for line in response.aiter_lines():
      if not line or line == "data: [DONE]":
        continue
      part = json.loads(line.removeprefix("data: "))
      now = time.monotonic()
      first = first or now - started
      if last and part["choices"]:
        between.append(now - last)
      last, usage = now, part.get("usage", usage)
      text += "".join(choice["text"] for choice in part["choices"])
  seconds = time.monotonic() - started
  return {
    "first": first, "seconds": seconds, "text": text, "between": between,
    **usage,
  }  # fmt: skip


async def arriving(client: httpx.AsyncClient, rate: float, options) -> dict:
  """Streams that arrive at a rate, independently of other streams."""
  generator = np.random.default_rng(0)
  started, tasks = time.monotonic(), []
  for seed, wait in enumerate(generator.exponential(1 / rate, options.streams)):
    await asyncio.sleep(wait)
    tasks.append(asyncio.create_task(ask(client, seed, options)))
  found = [one for one in await asyncio.gather(*tasks) if "first" in one]
  seconds = time.monotonic() - started
  gaps = [gap for one in found for gap in one["between"]]
  return {
    "rate": rate,
    "refused": options.streams - len(found),
    **{
      f"{name}_p{p}": round(float(np.percentile(values, p)), 4)
      for name, values in (
        ("first", [one["first"] for one in found]),
        ("between", gaps),
      )
      for p in (50, 99)
    },
    "tokens_per_second": round(
      sum(one["completion_tokens"] for one in found) / seconds, 1
    ),
  }


def memory_mib(pid: int) -> float:
  """Memory of a process, except pages shared with files."""
  with open(f"/proc/{pid}/status", encoding="utf-8") as file:
    lines = dict(line.split(":", 1) for line in file)
  return int(lines["RssAnon"].split()[0]) / 1024


async def trial(client: httpx.AsyncClient, options) -> dict:
  """Requests, some of them invalid and some cancelled."""
  kinds = 16  # Valid requests: prompts, seeds and lengths.

  def asked(number: int) -> dict:
    kind = number % kinds
    return {
      "prompt": f"{options.prompt} {kind % 4 * 'and so '}", "seed": kind,
      "max_tokens": 8 + 3 * kind,
    }  # fmt: skip

  async def text_of(number: int) -> str:
    response = await client.post("/v1/completions", json=asked(number))
    response.raise_for_status()
    return response.json()["choices"][0]["text"]

  alone = [await text_of(kind) for kind in range(kinds)]
  counts = collections.Counter()
  at_once = asyncio.Semaphore(8)

  async def one(number: int) -> None:
    async with at_once:
      if number % 6 == 1:
        wrong = MISTAKES[number // 6 % len(MISTAKES)]
        response = await client.post(
          "/v1/completions", content=wrong,
          headers={"Content-Type": "application/json"},
        )  # fmt: skip
        counts[f"status_{response.status_code}"] += 1
      elif number % 6 == 3:
        body = {**asked(number), "max_tokens": 100, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as it:
          async for _ in it.aiter_lines():
            break  # Cancels after the first line.
        counts["broken_off"] += 1
      else:
        text = await text_of(number)
        right = text == alone[number % kinds]
        counts["right" if right else "mixed_up"] += 1

  memory, started, step = {}, time.monotonic(), max(1, options.trial // 5)
  lost = []
  for start in range(0, options.trial, step):
    numbers = range(start, min(start + step, options.trial))
    ended = await asyncio.gather(*map(one, numbers), return_exceptions=True)
    lost += [repr(error) for error in ended if error]
    if options.pid:
      memory[start + len(numbers)] = round(memory_mib(options.pid), 1)
  return {
    "requests": options.trial,
    "seconds": round(time.monotonic() - started, 1),
    **counts,
    "lost": len(lost),
    "errors": lost[:3],
    "memory_mib": memory,
  }


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
    if options.trial:
      return await trial(client, options)

    async def together(number: int) -> list[dict]:
      asked = [ask(client, seed, options) for seed in range(number)]
      return list(await asyncio.gather(*asked))

    await together(options.streams)
    for seed in range(2):  # Single prompts use other programs.
      await ask(client, seed, options)
    if options.rates:
      rates = map(float, options.rates.split(","))
      return {"rates": [await arriving(client, x, options) for x in rates]}
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
  parser.add_argument("--exit_threshold", type=float, default=1.0)
  parser.add_argument("--rates", default="", help="requests a second")
  parser.add_argument("--trial", type=int, default=0, help="requests")
  parser.add_argument("--pid", type=int, default=0, help="of the server")
  print(json.dumps(asyncio.run(run(parser.parse_args())), indent=2))


if __name__ == "__main__":
  main()
