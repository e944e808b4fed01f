"""What is kept for the backward pass, and what is computed again."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Carry = TypeVar("Carry")
POLICIES: dict[str, Any] = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.dots_saveable,
  "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "outputs": jax.checkpoint_policies.save_only_these_names("attention", "mlp"),
}


def rematerialised(
  fn: Callable[..., Any], remat: str, *, prevent_cse: bool
) -> Callable[..., Any]:
  """fn that keeps for the backward pass what a policy of `run_loop` says.

  Args:
    fn: any function of arrays.
    remat: "none" for fn itself.
    prevent_cse: needed outside of a scan, where XLA could undo it.
  """
  if remat == "none":
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
    carry: what goes from item to item.
    items: arrays with a leading axis of items.
    unroll: compiles every step by itself.
    remat: what a step keeps for the backward pass; the carry always is.

  Returns:
    (carry, records stacked along a leading axis).
  """
  step_fn = rematerialised(step_fn, remat, prevent_cse=unroll)
  return jax.lax.scan(step_fn, carry, items, unroll=unroll)
