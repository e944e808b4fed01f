"""The server's Prometheus metrics."""

from collections.abc import Sequence
from typing import Any

import prometheus_client

from loopjax.serve.answers import Answer
from loopjax.serve.worker import Worker

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # Seconds.


class ServerMetrics:
  """The metrics that /metrics reports in Prometheus' format."""

  def __init__(self, workers: Sequence[Worker]):
    self.registry = prometheus_client.CollectorRegistry()
    shared: Any = {"registry": self.registry}
    self.responses = prometheus_client.Counter(
      "loopjax_responses", "Responses by status.", ["status"], **shared
    )
    self.tokens = prometheus_client.Counter(
      "loopjax_tokens",
      "Prompt tokens, cached prompt tokens and sampled tokens.",
      ["kind"],
      **shared,
    )
    self.loops = prometheus_client.Counter(
      "loopjax_loops",
      "Sum over sampled tokens of the loop after which they exited.",
      **shared,
    )
    self.first = prometheus_client.Histogram(
      "loopjax_first_token_seconds", "Time until the first token of a request.",
      buckets=_BUCKETS, **shared,
    )  # fmt: skip
    self.seconds = prometheus_client.Histogram(
      "loopjax_request_seconds", "Time until the last token of a request.",
      buckets=_BUCKETS, **shared,
    )  # fmt: skip
    live = prometheus_client.Gauge(
      "loopjax_live_requests", "Requests that are running or waiting.", **shared
    )
    live.set_function(lambda: sum(worker.num_live for worker in workers))

  def count(self, answer: Answer) -> None:
    """Adds the tokens and loops of an answer that ended or was cancelled."""
    usage, costs = answer.usage(), answer.costs()
    self.tokens.labels("prompt").inc(usage["prompt_tokens"])
    self.tokens.labels("cached").inc(costs.copied)
    self.tokens.labels("completion").inc(usage["completion_tokens"])
    self.loops.inc(costs.loops)
