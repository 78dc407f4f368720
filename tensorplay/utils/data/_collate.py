"""From a list of samples to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._dtypes import float64
from ..._ops.creation import as_tensor, tensor
from ..._ops.join import stack
from ..._tensor import Tensor


def default_collate(batch: Sequence[Any]) -> Any:
    """Stacks samples along a new first dim, inside whatever mappings and sequences they are.

    Tensors and arrays are stacked, numbers become a tensor (floats: float64), strings and bytes
    stay a list; samples that are tuples give a list, as in torch.

    Raises:
        RuntimeError: sequences of different lengths.
        TypeError: samples of another kind.
    """
    first = batch[0]
    if isinstance(first, Tensor):
        return stack(list(batch), 0)
    if isinstance(first, (np.ndarray, np.generic)) and first.dtype.kind not in "SUO":
        return as_tensor(np.stack(list(batch)))
    if isinstance(first, float):
        return tensor(list(batch), dtype=float64)
    if isinstance(first, int):
        return tensor(list(batch))
    if isinstance(first, (str, bytes)):
        return batch
    if isinstance(first, Mapping):
        return _rebuilt(first, {key: default_collate([d[key] for d in batch]) for key in first})
    if isinstance(first, Sequence):
        if any(len(sample) != len(first) for sample in batch):
            raise RuntimeError("each element in list of batch should be of equal size")
        return _rebuilt(first, [default_collate(samples) for samples in zip(*batch, strict=True)])
    raise TypeError(
        "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; "
        f"found {type(first)}"
    )


def default_convert(data: Any) -> Any:
    """Arrays to tensors, inside whatever mappings and sequences they are."""
    if isinstance(data, (np.ndarray, np.generic)) and data.dtype.kind not in "SUO":
        return as_tensor(data)
    if isinstance(data, Mapping):
        return _rebuilt(data, {key: default_convert(value) for key, value in data.items()})
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return _rebuilt(data, [default_convert(value) for value in data])
    return data


def _rebuilt(like: Any, value: Any) -> Any:
    """``value`` as the type of ``like``; plain tuples become lists, as in torch."""
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*value)
    if type(like) in (dict, list, tuple):
        return value
    try:
        return type(like)(value)
    except TypeError:
        return value
