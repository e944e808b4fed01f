"""Rematerialisation: which residuals the backward pass recomputes."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from loopjax.types import LoopOptions

Carry = TypeVar("Carry")
_POLICIES = jax.checkpoint_policies
# Names of an attention kernel's residuals, see `attend_to`.
_FLASH = _POLICIES.save_only_these_names("flash")
# From the one that keeps the most to the one that recomputes the most.
POLICIES: dict[str, Any] = {
  "none": None,
  "dots": _POLICIES.save_from_both_policies(_POLICIES.dots_saveable, _FLASH),
  "dots_no_batch": _POLICIES.save_from_both_policies(
    _POLICIES.dots_with_no_batch_dims_saveable, _FLASH
  ),
  "outputs": _POLICIES.save_only_these_names("attention", "mlp"),
  "full": _POLICIES.nothing_saveable,
}
# "auto": the fastest policy by platform (see benchmarks/results/), if memory
# suffices. CPUs are memory-bound: recomputing also saves time there. On
# accelerators, "none" stores and loads float32 intermediates that "dots"
# recomputes within the operations that use them.
AUTO = {"cpu": "dots_no_batch"}
_ON_ACCELERATORS = "dots"


def resolve(options: LoopOptions, platform: str) -> LoopOptions:
  """The options with the platform's policy for remat="auto"."""
  if options.remat != "auto":
    return options
  policy = AUTO.get(platform, _ON_ACCELERATORS)
  return dataclasses.replace(options, remat=policy)


def rematerialised(
  fn: Callable[..., Any], remat: str, *, prevent_cse: bool
) -> Callable[..., Any]:
  """`jax.checkpoint` of a function with a policy of `POLICIES`.

  Args:
    fn: any function of arrays.
    remat: a key of POLICIES. "none" returns fn itself, as does "auto", which
      is unresolved in models that are created without a `Program`.
    prevent_cse: must be True outside of a scan, where XLA's common
      subexpression elimination could undo the recomputation.
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
  """`jax.lax.scan` with rematerialisation of every step.

  Args:
    step_fn: (carry, item) -> (carry, record).
    carry: the initial carry.
    items: pytree of arrays with a leading axis to scan over.
    unroll: whether to compile every step separately.
    remat: the residuals that a step stores, a key of POLICIES; the carry is
      always stored.

  Returns:
    (the last carry, the records stacked along a leading axis).
  """
  step_fn = rematerialised(step_fn, remat, prevent_cse=unroll)
  return jax.lax.scan(step_fn, carry, items, unroll=unroll)
