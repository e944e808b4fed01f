"""Learning-rate schedules and the optimizer chain."""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from loopjax import checks, sharding
from loopjax.errors import Moot, UserError
from loopjax.nn import lora
from loopjax.optim import parameters
from loopjax.types import Array

_OWN = "or package.module:function"


@dataclasses.dataclass(frozen=True)
class Config:
  """AdamW, Adam-atan2, or Muon together with AdamW.

  AdamW's defaults are UTM's (section 4.1 and the authors' code). Muon's rate is
  from "Language Models Need Sleep" (arXiv 2605.26099) for automata and Depo,
  with `learning_rate` 5e-5; `b2` is 0.95 in the recipe cited there.

  Attributes:
    name: "adamw" for all parameters; "adam_atan2", AdamW without an epsilon,
      see `scale_by_adam_atan2`; "muon" for the hidden matrices and AdamW for
      the others, see `loopjax.optim.parameters`; or "package.module:function",
      a function of this config that returns the optimizer without rate and
      decay, such as `optax.scale_by_lion(config.b1, config.b2)`.
    learning_rate: AdamW's peak.
    final_learning_rate: AdamW's rate at the last step.
    muon_learning_rate: Muon's peak; its schedule is proportional to AdamW's.
    muon_momentum: Muon's momentum.
    schedule: after the warm-up, "cosine" or "linear" to the final rate,
      "constant", or "wsd" (warm-up, stable, decay, arXiv 2404.06395): constant,
      then linear to the final rate; or "package.module:function", which gets
      this config and the steps of the run, and returns step -> rate.
    warmup_steps: linear from 0; part of the run's steps.
    warm_again: steps at which the rate restarts from 0 and rises over
      `warmup_steps`, for example `model.growth_steps`.
    cooldown_fraction: final fraction of the run's steps in which "wsd" decays.
    b1, b2, eps: Adam's.
    weight_decay: decoupled; multiplied by each parameter's learning rate.
    decay: which parameters decay: "all", including biases and embeddings (UTM);
      "matrices", only kernels of linear maps and taps of convolutions; or
      "tables", matrices and embeddings (GPT-2 in common code).
    clip_norm: gradients are scaled down to this global norm; 0 for none.
    rates: "pattern=factor" each, as ("embedding=0.1", "/bias$=2"): the factor
      of the learning rate, and with it of the decay, of all parameters whose
      path the regular expression matches; the first match applies.
    ema_decay: maximum decay of the parameter average used for evaluation; the
      decay at step t is at most (1 + t) / (10 + t). 0 for no average.
    frozen: regular expression of parameters that are not trained; "" for none.
      Parameters unused by the loss need not match.
    lora_rank: rank of LoRA's pairs (`nn.lora`): only they are trained, averaged
      and have optimizer state, by AdamW; 0 trains all parameters.
    lora_alpha: a pair's product is multiplied by lora_alpha / lora_rank.
    lora_targets: regular expression of the kernels and embeddings with a pair.
    lora_whole: regular expression of parameters that are trained themselves
      beside the pairs, such as a new gate; "" for none.
  """

  name: str = "adamw"
  learning_rate: float = checks.setting(3e-4, above=0)
  final_learning_rate: float = checks.setting(1e-5, least=0)
  muon_learning_rate: float = checks.setting(2e-3, above=0)
  muon_momentum: float = checks.setting(0.95, within="[0, 1)")
  schedule: str = "cosine"
  warmup_steps: int = checks.setting(1000, least=0)
  warm_again: tuple[int, ...] = ()
  cooldown_fraction: float = checks.setting(0.2, within="(0, 1]")
  b1: float = checks.setting(0.9, within="[0, 1)")
  b2: float = checks.setting(0.999, within="[0, 1)")
  eps: float = checks.setting(1e-8, above=0)
  weight_decay: float = checks.setting(0.01, least=0)
  decay: str = "all"
  clip_norm: float = checks.setting(1.0, least=0)
  rates: tuple[str, ...] = ()
  ema_decay: float = checks.setting(0.999, within="[0, 1)")
  frozen: str = ""
  lora_rank: int = checks.setting(0, least=0)
  lora_alpha: float = checks.setting(16.0, above=0)
  lora_targets: str = "(attention|mlp)/[a-z]+/kernel"
  lora_whole: str = ""

  def __post_init__(self) -> None:
    checks.plain_values("optim", self)
    listed: dict[str, Iterable[str]] = {
      "name": ("adamw", "adam_atan2", "muon", _OWN),
      "schedule": ("cosine", "linear", "constant", "wsd", _OWN),
      "decay": parameters.DECAYS,
    }
    for field in ("name", "schedule"):
      if ":" in (value := getattr(self, field)):
        if value.startswith("__main__:"):
          raise UserError(
            f"optim.{field}={value!r}: put the function into a module, which"
            " other processes can import"
          )
        del listed[field]
    checks.one_of("optim", self, **listed)
    for field in ("frozen", "lora_targets", "lora_whole"):
      try:
        re.compile(getattr(self, field))
      except re.error as error:
        raise UserError(
          f"optim.{field}={getattr(self, field)!r}: {error}"
        ) from error
    parameters.parsed_rates(self.rates)  # Checks them.
    positive = all(type(step) is int and step > 0 for step in self.warm_again)
    if not positive or [*self.warm_again] != sorted(set(self.warm_again)):
      raise UserError(
        f"optim.warm_again={self.warm_again!r} must be increasing positive"
        " integers"
      )
    if not self.warmup_steps:
      checks.without_effect("optim", self, "warmup_steps", "warm_again")
    self._check_effects()

  def _check_effects(self) -> None:
    """Raises UserError for a setting that another one makes ineffective."""
    for field, value, idle in (
      ("lora_rank", 0, ("lora_alpha", "lora_targets", "lora_whole")),
      ("name", "adamw", ("muon_learning_rate", "muon_momentum")),
      ("name", "adam_atan2", ("muon_learning_rate", "muon_momentum", "eps")),
      ("schedule", "constant", ("final_learning_rate", "cooldown_fraction")),
      ("schedule", "cosine", ("cooldown_fraction",)),
      ("schedule", "linear", ("cooldown_fraction",)),
      ("name", ":", ("muon_learning_rate", "muon_momentum")),
    ):
      own = value == ":" and ":" in getattr(self, field)
      if own or getattr(self, field) == value:
        checks.without_effect("optim", self, field, *idle)
    if not self.weight_decay:
      checks.without_effect("optim", self, "weight_decay", "decay")
    if self.lora_rank and self.name != "adamw":
      raise UserError(
        f"optim.name={self.name!r}: optim.lora_rank={self.lora_rank} needs"
        " 'adamw', which trains the pairs",
        (Moot("optim.name", "adamw", ("optim.lora_rank",)),),
      )

  @property
  def adaptation(self) -> lora.Adaptation | None:
    """What is trained beside frozen parameters; None if all are trained."""
    if not self.lora_rank:
      return None
    return lora.Adaptation(
      self.lora_rank,
      self.lora_alpha,
      self.lora_targets,
      self.lora_whole,
      self.frozen,
    )


def without_own(config: Config) -> Config:
  """For a program without training, which needs no module of the user's."""
  if ":" not in config.name + config.schedule:
    return config
  patterns = ("frozen", "lora_rank", "lora_alpha", "lora_targets", "lora_whole")
  kept = {name: getattr(config, name) for name in (*patterns, "ema_decay")}
  return Config(schedule="constant", warmup_steps=0, **kept)


def make_schedule(config: Config, num_steps: int) -> optax.Schedule:
  """Step (from 0) -> AdamW's learning rate; Muon's is proportional to it."""
  once = _warmed_once(config, num_steps)
  if not config.warm_again:
    return once
  if config.warm_again[-1] >= num_steps:
    raise UserError(
      f"optim.warm_again={config.warm_again!r} must be before"
      f" run.num_steps={num_steps}"
    )

  def schedule(step: Any) -> Any:
    factor: Any = 1.0
    for start in config.warm_again:
      risen = jnp.clip((step - start) / config.warmup_steps, 0.0, 1.0)
      factor *= jnp.where(step < start, 1.0, risen)
    return factor * once(step)

  return schedule


def _warmed_once(config: Config, num_steps: int) -> optax.Schedule:
  """`make_schedule` without `warm_again`."""
  if ":" in config.schedule:
    return _own_schedule(config, num_steps)
  peak, final = config.learning_rate, config.final_learning_rate
  warmup = config.warmup_steps
  latest = num_steps - (config.schedule in ("cosine", "linear"))
  if warmup > latest and config.schedule != "wsd":
    raise UserError(
      f"optim.warmup_steps={warmup} must be"
      f" {'less than' if latest < num_steps else 'at most'}"
      f" run.num_steps={num_steps}",
      (Moot("optim.warmup_steps", num_steps // 10, ("run.num_steps",)),),
    )
  if config.schedule == "cosine":
    return optax.warmup_cosine_decay_schedule(
      init_value=0.0,
      peak_value=peak,
      warmup_steps=warmup,
      decay_steps=num_steps,
      end_value=final,
    )
  rise = optax.linear_schedule(0.0 if warmup else peak, peak, max(warmup, 1))
  if config.schedule == "constant":
    return rise
  cooldown = max(round(config.cooldown_fraction * num_steps), 1)
  if config.schedule == "linear":
    cooldown = num_steps - warmup
  if warmup + cooldown > num_steps:
    raise UserError(
      f"optim.warmup_steps={warmup} and the {cooldown} steps of"
      f" optim.cooldown_fraction={config.cooldown_fraction} must fit into"
      f" run.num_steps={num_steps}"
    )
  fall = optax.linear_schedule(peak, final, cooldown)
  return optax.join_schedules([rise, fall], [num_steps - cooldown])


def _own_schedule(config: Config, num_steps: int) -> optax.Schedule:
  """What the function `config.schedule` returns; UserError if it is none."""
  own = ("optim.schedule", config.schedule)
  schedule = checks.made_by_own(*own, config, num_steps)
  if not callable(schedule):
    raise UserError(
      f"optim.schedule={config.schedule!r} returns {schedule!r:.80}, not a"
      " function of the step"
    )
  with checks.of_own(*own):
    rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
  if getattr(rate, "shape", None) != ():
    raise UserError(
      f"optim.schedule={config.schedule!r} gives {rate!r:.80}, not a rate"
    )
  made: optax.Schedule = schedule
  return made


def _own_optimizer(config: Config) -> optax.GradientTransformation:
  """What the function `config.name` returns; UserError where it fails."""
  own = ("optim.name", config.name)
  made = checks.made_by_own(*own, config)
  if not isinstance(made, optax.GradientTransformation):
    raise UserError(
      f"optim.name={config.name!r} returns {made!r:.80}, not an"
      " optax.GradientTransformation"
    )

  def init(params: Any) -> Any:
    with checks.of_own(*own):
      return made.init(params)

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    with checks.of_own(*own):
      updates, state = made.update(grads, state, params)
      if _shapes(updates) != _shapes(grads):
        raise ValueError("the updates' shapes are not those of the gradients")
      return updates, state

  return optax.GradientTransformation(init, update)


def _shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
  leaves, structure = jax.tree.flatten(tree)
  return structure, [jnp.shape(leaf) for leaf in leaves]


def frozen_mask(params: Any, pattern: str) -> Any:
  """bool for every parameter: whether its path matches the pattern."""
  mask = jax.tree_util.tree_map_with_path(
    lambda path, _: bool(re.search(pattern, parameters.name_of(path))), params
  )
  leaves = jax.tree.leaves(mask)
  if not any(leaves):
    raise UserError(f"optim.frozen={pattern!r} matches no parameter")
  if all(leaves):
    raise UserError(f"optim.frozen={pattern!r} freezes all parameters")
  return mask


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
  """Turns gradients into Muon's updates, for parameters [..., inputs, outputs].

  The update is sqrt(max(1, outputs / inputs)) times optax's approximation of
  U V^T, for the singular value decomposition U S V^T of Nesterov's momentum, of
  each matrix (K. Jordan et al., "Muon: An optimizer for hidden layers in neural
  networks", 2024, and its reference code). `optax.contrib.muon` itself would
  combine this with NAdamW, and corrects the biases of momentum and gradient
  differently, which changes the look-ahead in the first steps. With mesh.fsdp,
  each device does this for some of a stack's matrices, none of which is split.

  Args:
    momentum: decay of the sum of gradients, in [0, 1).
  """
  orthogonal = optax.contrib.scale_by_muon(
    beta=0.0,
    # 1e-7 relative to a mean; `optax.trace` is a sum.
    eps=1e-7 / (1 - momentum),
    nesterov=False,
    weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1),
  )

  def orthogonalised(x: Array) -> Array:
    return orthogonal.update(x, orthogonal.init(x))[0]

  def direction(x: Array) -> Array:
    inputs, outputs = x.shape[-2:]
    scale = math.sqrt(max(1.0, outputs / inputs))
    return scale * sharding.by_matrix(orthogonalised, x)

  return optax.chain(
    optax.trace(momentum, nesterov=True),
    optax.stateless(lambda updates, _: jax.tree.map(direction, updates)),
  )


def scale_by_adam_atan2(b1: float, b2: float) -> optax.GradientTransformation:
  """Adam's direction m / sqrt(v) as atan2(m, sqrt(v)), within pi / 2.

  Without an epsilon, so the update does not depend on the scale of the gradient
  (Adam-atan2: K. Everett et al., arXiv 2407.05872, section 4.3). m and v are
  Adam's means, corrected for their start.

  Args:
    b1, b2: decays of the means.
  """
  adam = optax.scale_by_adam(b1, b2)

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    _, state = adam.update(updates, state, params)
    first = optax.tree.bias_correction(state.mu, b1, state.count)
    second = optax.tree.bias_correction(state.nu, b2, state.count)
    return jax.tree.map(_arctan_of_ratio, first, second), state

  return optax.GradientTransformation(adam.init, update)


def _arctan_of_ratio(first: Array, second: Array) -> Array:
  return jnp.arctan2(first, jnp.sqrt(second))


def make_optimizer(
  config: Config, num_steps: int
) -> optax.GradientTransformation:
  """Clips by global norm, then the optimizer of each parameter."""
  schedule = make_schedule(config, num_steps)

  def mask(params: Any) -> Any:
    return parameters.decay_mask(params, config.decay)

  tx: optax.GradientTransformation = optax.adamw(
    schedule,
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=mask,
  )
  if config.name == "adam_atan2" or ":" in config.name:
    tx = optax.chain(
      _own_optimizer(config)
      if ":" in config.name
      else scale_by_adam_atan2(config.b1, config.b2),
      optax.add_decayed_weights(config.weight_decay, mask),
      optax.scale_by_learning_rate(schedule),
    )
  if config.name == "muon":
    ratio = config.muon_learning_rate / config.learning_rate
    matrices = optax.chain(
      scale_by_muon(config.muon_momentum),
      optax.add_decayed_weights(config.weight_decay, mask),
      optax.scale_by_learning_rate(lambda step: ratio * schedule(step)),
    )
    tx = optax.partition({"adamw": tx, "muon": matrices}, parameters.optimizers)
  clip = (
    optax.clip_by_global_norm(config.clip_norm)
    if config.clip_norm
    else optax.identity()
  )
  tx = optax.chain(clip, tx, parameters.scale_by_rate(config.rates))
  return with_frozen(config, tx)


def with_frozen(
  config: Config, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
  """The optimizer, which does not see or change frozen parameters."""
  if not config.frozen or config.adaptation:
    return tx  # `lora.split` sets frozen parameters apart.
  # Both are needed: without the first, frozen gradients would count in the
  # norm; without the last, frozen parameters would decay.
  freeze = optax.masked(
    optax.set_to_zero(), lambda params: frozen_mask(params, config.frozen)
  )
  return optax.chain(freeze, tx, freeze)
