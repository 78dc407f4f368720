"""Backward hooks of modules: what sees the gradients at a module's boundary."""

from __future__ import annotations

from typing import Any

import jax

from .._graph import Node
from .._state import state
from .._tensor import Tensor


class _Boundary(Node):
    """Passes gradients on unchanged unless ``on_gradients`` replaces them."""

    def __init__(self, edges: Any, on_gradients: Any) -> None:
        super().__init__(edges, len(edges))
        self.on_gradients = on_gradients

    def name(self) -> str:
        return "BackwardHookFunctionBackward"

    def backward(self, grads: list[Any]) -> list[Any]:
        return list(self.on_gradients(grads))


class BackwardHooks:
    """The backward hooks of one call: grad_output is kept until grad_input is there too."""

    def __init__(self, module: Any, hooks: list[Any], pre_hooks: list[Any]) -> None:
        self.module, self.hooks, self.pre_hooks = module, hooks, pre_hooks
        self.grad_outputs: tuple[Any, ...] = ()
        self.has_inputs = False

    def watch_inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with a boundary behind the tensors among them that require grad."""
        count = len(args)
        positions = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
        if not state.grad_enabled or not positions:
            return args

        def on_gradients(grads: list[Any]) -> list[Any]:
            full: list[Any] = [None] * count
            for i, g in zip(positions, grads, strict=True):
                full[i] = g
            full = list(self._run(tuple(full)))
            return [full[i] for i in positions]

        self.has_inputs = True
        watched = _behind([args[i] for i in positions], on_gradients)
        out = list(args)
        for i, tensor in zip(positions, watched, strict=True):
            out[i] = tensor
        return tuple(out)

    def watch_outputs(self, result: Any) -> Any:
        """The result, with a boundary in front of its tensors that require grad."""
        leaves, tree = jax.tree.flatten(result, is_leaf=lambda x: isinstance(x, Tensor))
        positions = [i for i, a in enumerate(leaves) if isinstance(a, Tensor) and a.requires_grad]
        if not state.grad_enabled or not positions:
            return result

        def on_gradients(grads: list[Any]) -> list[Any]:
            for hook in self.pre_hooks:
                replaced = hook(self.module, tuple(grads))
                if replaced is not None:
                    grads = list(replaced) if isinstance(replaced, tuple) else [replaced]
            self.grad_outputs = tuple(grads)
            if not self.has_inputs:
                self._run(())
            return grads

        for i, tensor in zip(positions, _behind([leaves[i] for i in positions], on_gradients)):
            leaves[i] = tensor
        return jax.tree.unflatten(tree, leaves)

    def _run(self, grad_inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for hook in self.hooks:
            replaced = hook(self.module, grad_inputs, self.grad_outputs)
            if replaced is not None:
                grad_inputs = replaced if isinstance(replaced, tuple) else (replaced,)
        return grad_inputs


def _behind(tensors: list[Tensor], on_gradients: Any) -> list[Tensor]:
    node = _Boundary([t._edge() for t in tensors], on_gradients)
    out = []
    for index, tensor in enumerate(tensors):
        alias = tensor._alias()
        alias._detached = False
        alias._requires_grad, alias._grad_fn, alias._output_nr = True, node, index
        out.append(alias)
    return out
