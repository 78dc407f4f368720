"""Helpers for training, as ``torch.nn.utils``."""

from ._clip_grad import clip_grad_norm_ as clip_grad_norm_
from ._clip_grad import clip_grad_value_ as clip_grad_value_
from ._clip_grad import clip_grads_with_norm_ as clip_grads_with_norm_
from ._clip_grad import get_total_norm as get_total_norm
from ._convert_parameters import parameters_to_vector as parameters_to_vector
from ._convert_parameters import vector_to_parameters as vector_to_parameters
