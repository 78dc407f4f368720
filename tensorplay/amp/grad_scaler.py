"""GradScaler: scales losses, so that float16 gradients do not vanish. Source: torch.amp.GradScaler.

``scale(loss).backward()`` makes all gradients larger by the scale; ``step(optimizer)`` divides
them by it again and steps unless one is not finite; ``update()`` then adapts the scale. Sharded
gradients count with those of all ranks, so that all ranks step or none does.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import float16
from .._tensor import Tensor, wrap
from ..autograd import no_grad
from ..nn.utils._held import beside, by_devices, held, replace


class OptState(enum.Enum):
    """How far an optimizer is since the last ``update``."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


class GradScaler:
    """See the module's docstring.

    Args:
        device: accepted as in PyTorch; gradients are scaled where they are.
        init_scale: the first scale.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps in a row with
            finite gradients.
        backoff_factor: the scale is multiplied by it after a step with others.
        enabled: otherwise losses and gradients are left as they are.

    Raises:
        AssertionError: ``growth_factor`` is not above 1, or ``backoff_factor`` not below.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        if not growth_factor > 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if not backoff_factor < 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        self._scale = float(init_scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._growth_tracker = growth_interval, 0
        self._stages: dict[int, OptState] = {}
        self._found: dict[int, list[Any]] = {}

    def scale(self, outputs: Any) -> Any:
        """A tensor, or tensors in (nested) lists and tuples, times the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self._scale
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @no_grad()
    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, in place.

        Raises:
            RuntimeError: called twice, or after ``step``, since the last ``update``.
            ValueError: float16 gradients, whose small values would vanish again.
        """
        if not self._enabled:
            return
        stage = self._stages.get(id(optimizer), OptState.READY)
        if stage is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if stage is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        if any(g.dtype is float16 for g in grads):
            raise ValueError("Attempting to unscale FP16 gradients.")
        self._found[id(optimizer)] = self._unscaled(grads)
        self._stages[id(optimizer)] = OptState.UNSCALED

    def _unscaled(self, grads: list[Tensor]) -> list[Any]:
        """Unscales; returns scalars that are not 0 where something was not finite."""
        found = []
        by_layout: dict[Any, list[Tensor]] = {}
        for g in grads:
            by_layout.setdefault(None if g._layout is None else g._layout.group_key, []).append(g)
        with jax.enable_x64(True):
            inverse = jnp.asarray(1.0 / self._scale, jnp.float32)
            for alike in by_layout.values():
                for together in by_devices(alike):
                    arrays = [held(g) for g in together]
                    bad, arrays = _divided(arrays, beside(inverse, arrays[0]))
                    replace(together, arrays)
                    layout = together[0]._layout
                    found.append(bad if layout is None else layout.max_over_ranks(bad))
        return self._over_ranks(found)

    def _over_ranks(self, found: list[Any]) -> list[Any]:
        """What all ranks have found."""
        return found

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)``, unless a gradient is not finite; unscales first.

        Raises:
            RuntimeError: called twice since the last ``update``, or with a closure.
            AssertionError: no parameter of the optimizer has a gradient.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        stage = self._stages.get(id(optimizer), OptState.READY)
        if stage is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if stage is OptState.READY:
            self.unscale_(optimizer)
        found = self._found[id(optimizer)]
        if not found:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        self._stages[id(optimizer)] = OptState.STEPPED
        if any(float(wrap(bad).item()) for bad in found):
            return None
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what was found since the last call, or sets it.

        Raises:
            AssertionError: nothing was unscaled since.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        else:
            found = [bad for each in self._found.values() for bad in each]
            if not found:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._adapt(any(float(wrap(bad).item()) for bad in found))
        self._stages, self._found = {}, {}

    def _adapt(self, overflowed: bool) -> None:
        if overflowed:
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            self._scale *= self._growth_factor
            self._growth_tracker = 0

    def get_scale(self) -> float:
        """The scale; 1.0 if disabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._growth_interval = new_interval

    def state_dict(self) -> dict[str, Any]:
        """The scale and how it adapts; empty if disabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a ``state_dict()``.

        Raises:
            RuntimeError: it is that of a disabled scaler.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled "
                "instance of GradScaler."
            )
        self._scale = float(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]


@jax.jit
def _divided(arrays: list[Any], inverse: Any) -> tuple[Any, list[Any]]:
    """1 if an element is not finite, else 0; and the arrays times ``inverse``."""
    finite = [jnp.all(jnp.isfinite(a)) for a in arrays]
    bad = 1 - jnp.all(jnp.stack(finite)).astype(jnp.float32)
    return bad, [(a * inverse.astype(a.real.dtype)).astype(a.dtype) for a in arrays]
