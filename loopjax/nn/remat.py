"""What is kept for the backward pass, and what is recomputed."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from loopjax.types import LoopOptions

Carry = TypeVar("Carry")
POLICIES: dict[str, Any] = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.dots_saveable,
  "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "outputs": jax.checkpoint_policies.save_only_these_names("attention", "mlp"),
}
# By platform, the policy that is fastest, not only smallest (see
# benchmarks/results/); others keep everything. CPUs are memory-bound.
AUTO = {"cpu": "dots_no_batch"}


def chosen(options: LoopOptions, platform: str) -> LoopOptions:
  """The options with "auto" replaced by what suits a device's platform."""
  if options.remat != "auto":
    return options
  return dataclasses.replace(options, remat=AUTO.get(platform, "none"))


def rematerialised(
  fn: Callable[..., Any], remat: str, *, prevent_cse: bool
) -> Callable[..., Any]:
  """fn, keeping for the backward pass what a policy of `run_loop` names.

  Args:
    fn: any function of arrays.
    remat: "none" returns fn itself, as does an unresolved "auto", in a model
      that was made without a program.
    prevent_cse: needed outside of a scan, where XLA could undo recomputation.
  """
  if remat in ("none", "auto"):
    return fn
  policy = POLICIES[remat]
  return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


def scan(
  step_fn: Callable[[Carry, Any], tuple[Carry, Any]],
  carry: Carry,
  items: Any,
  *,
  unroll: bool = False,
  remat: str = "none",
) -> tuple[Carry, Any]:
  """`jax.lax.scan` over items, with the policies of `run_loop`.

  Args:
    step_fn: (carry, item) -> (carry, record).
    carry: passed from item to item.
    items: arrays with a leading axis of items.
    unroll: whether to compile every step separately.
    remat: what a step keeps for the backward pass; the carry always is.

  Returns:
    (carry, records stacked along a leading axis).
  """
  step_fn = rematerialised(step_fn, remat, prevent_cse=unroll)
  return jax.lax.scan(step_fn, carry, items, unroll=unroll)
