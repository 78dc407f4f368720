"""Calls that run alike on torch and on tensorplay: the recorder and the tests share them.

Inputs are drawn from a seed and exact in bfloat16, so that every dtype computes on the same values.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """``call(F, *tensors)``; inputs are shapes (normal values) or arrays.

    ``dtypes``: what besides float64 is compared. ``second``: compare second derivatives too.
    ``tolerance``: of the comparison in float64; torch itself holds some constants in float32.
    """

    name: str
    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    dtypes: tuple[str, ...] = ()
    second: bool = True
    tolerance: float = 1e-9

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return [
            exact(rng.normal(size=spec)) if isinstance(spec, tuple) else np.asarray(spec)
            for spec in self.inputs
        ]


def exact(values: np.ndarray) -> np.ndarray:
    """float64 values that bfloat16 can hold."""
    return np.round(values * 32) / 32


def weights(shape: tuple[int, ...], salt: int = 0) -> np.ndarray:
    """What an output is multiplied by before its sum is differentiated; exact in bfloat16."""
    return exact(np.cos(np.arange(int(np.prod(shape))) * 1.7 + salt)).reshape(shape)


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    """Values inside (0, 1)."""
    return np.random.default_rng(seed).integers(1, 64, shape) / 64


POINTS = np.array(
    [-40.0, -6.5, -3.0, -1.0, -0.5, -0.0625, 0.0, 0.125, 0.5, 1.0, 2.5, 3.0, 6.0, 25.0]
)
LABELS = np.array([0, 3, -100, 2, 4])
IMAGE_LABELS = np.array([[[0, 2], [1, -100]], [[2, 2], [0, 1]]])
MASK = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
ALL = ("float32", "bfloat16")
F32 = ("float32",)


def _activations() -> list[Case]:
    calls: dict[str, Callable[..., Any]] = {
        "relu": lambda F, x: F.relu(x),
        "gelu": lambda F, x: F.gelu(x),
        "gelu_tanh": lambda F, x: F.gelu(x, approximate="tanh"),
        "silu": lambda F, x: F.silu(x),
        "mish": lambda F, x: F.mish(x),
        "sigmoid": lambda F, x: F.sigmoid(x),
        "tanh": lambda F, x: F.tanh(x),
        "logsigmoid": lambda F, x: F.logsigmoid(x),
        "leaky_relu": lambda F, x: F.leaky_relu(x, 0.25),
        "elu": lambda F, x: F.elu(x, 1.5),
        "selu": lambda F, x: F.selu(x),
        "celu": lambda F, x: F.celu(x, 2.0),
        "softplus": lambda F, x: F.softplus(x, beta=2.0, threshold=10.0),
        "hardtanh": lambda F, x: F.hardtanh(x, -0.5, 2.5),
        "relu6": lambda F, x: F.relu6(x),
        "softsign": lambda F, x: F.softsign(x),
        "tanhshrink": lambda F, x: F.tanhshrink(x),
        "threshold": lambda F, x: F.threshold(x, 0.25, -2.0),
    }
    half = ("gelu", "gelu_tanh", "silu")
    kinks = [0, 3, -3]
    smooth = POINTS[~np.isin(POINTS, kinks)]
    cases = [
        Case(name, call, (smooth if "elu" in name else POINTS,), ALL if name in half else ())
        for name, call in calls.items()
    ]
    for name in ("hardsigmoid", "hardswish"):
        call = lambda F, x, name=name: getattr(F, name)(x)  # noqa: E731
        cases.append(Case(name, call, (smooth,), (), False, 1e-7))
    cases.append(Case("glu", lambda F, x: F.glu(x, 1), ((2, 6, 3),)))
    cases.append(Case("prelu", lambda F, x, w: F.prelu(x, w), ((2, 3, 4), (3,))))
    cases.append(Case("prelu_one", lambda F, x, w: F.prelu(x, w), ((5,), (1,))))
    return cases


def _softmaxes() -> list[Case]:
    return [
        Case("softmax", lambda F, x: F.softmax(x, -1), ((3, 7),), ALL),
        Case("softmax_0", lambda F, x: F.softmax(x, 0), ((3, 1, 4),)),
        Case("softmax_0d", lambda F, x: F.softmax(x, 0), (np.array(2.0),)),
        Case("log_softmax", lambda F, x: F.log_softmax(x, 1), ((2, 5, 3),), ALL),
        Case("log_softmax_large", lambda F, x: F.log_softmax(x * 512, 1), ((2, 5),), F32, False),
        Case("softmin", lambda F, x: F.softmin(x, 1), ((2, 5),)),
    ]


def _norms() -> list[Case]:
    def layer(F: Any, x: Any, w: Any = None, b: Any = None) -> Any:
        return F.layer_norm(x, x.shape[-1:] if w is None else w.shape, w, b, 1e-3)

    def batch(F: Any, x: Any, w: Any = None, b: Any = None) -> Any:
        return F.batch_norm(x, None, None, w, b, training=True, eps=1e-3)

    return [
        Case("layer_norm", layer, ((3, 2, 7), (7,), (7,)), ALL),
        Case("layer_norm_two_dims", layer, ((3, 2, 4), (2, 4), (2, 4))),
        Case("layer_norm_no_bias", layer, ((5, 6), (6,)), F32),
        Case("layer_norm_plain", layer, ((5, 3),)),
        Case("rms_norm", lambda F, x, w: F.rms_norm(x, w.shape, w, 1e-3), ((2, 3, 5), (5,)), ALL),
        Case("rms_norm_plain", lambda F, x: F.rms_norm(x, (3, 2)), ((4, 3, 2),)),
        Case("batch_norm", batch, ((6, 3), (3,), (3,)), ALL),
        Case("batch_norm_images", batch, ((2, 3, 2, 2), (3,), (3,))),
        Case("batch_norm_plain", batch, ((3, 2, 4),)),
        Case(
            "batch_norm_eval",
            lambda F, x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach() ** 2, w, b),
            ((3, 2, 2), (2,), (2,), (2,), (2,)),
            second=False,
        ),
        Case(
            "group_norm", lambda F, x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 3), (4,), (4,)), F32
        ),
        Case("group_norm_plain", lambda F, x: F.group_norm(x, 3), ((2, 6),)),
    ]


def _linears() -> list[Case]:
    return [
        Case("linear", lambda F, x, w, b: F.linear(x, w, b), ((2, 3, 4), (5, 4), (5,)), ALL),
        Case("linear_narrow", lambda F, x, w: F.linear(x, w), ((3, 6), (2, 6))),
        Case("linear_one", lambda F, x, w, b: F.linear(x, w, b), ((4,), (3, 4), (3,))),
        Case("linear_vector", lambda F, x, w: F.linear(x, w), ((3, 4), (4,))),
        Case("linear_empty", lambda F, x, w, b: F.linear(x, w, b), ((0, 4), (3, 4), (3,))),
        Case(
            "embedding",
            lambda F, i, w: F.embedding(i, w),
            (np.array([[1, 3], [3, 0]]), (4, 3)),
            ALL,
        ),
        Case(
            "embedding_padding",
            lambda F, i, w: F.embedding(i, w, padding_idx=-1),
            (np.array([3, 1, 3, 1, 0]), (4, 3)),
        ),
        Case(
            "embedding_by_frequency",
            lambda F, i, w: F.embedding(i, w, scale_grad_by_freq=True),
            (np.array([2, 1, 2, 2, 0]), (4, 3)),
            second=False,
        ),
    ]


def _attentions() -> list[Case]:
    def attend(**options: Any) -> Callable[..., Any]:
        return lambda F, *a: F.scaled_dot_product_attention(*a, **options)

    def biased(F: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.5)

    qkv = ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6))
    return [
        Case("attention", attend(), qkv, ALL),
        Case("attention_causal", attend(is_causal=True), ((1, 2, 4, 3),) * 3, ALL),
        Case("attention_causal_long", attend(is_causal=True), qkv),
        Case("attention_mask", attend(), (*qkv, MASK)),
        Case("attention_bias", biased, (*qkv, (2, 1, 3, 5)), F32),
        Case("attention_two_dims", attend(), ((3, 4), (5, 4), (5, 2))),
        Case(
            "attention_groups",
            attend(enable_gqa=True, is_causal=True),
            ((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)),
        ),
    ]


def _classification() -> list[Case]:
    def loss(name: str = "cross_entropy", **options: Any) -> Callable[..., Any]:
        def call(F: Any, x: Any, t: Any, w: Any = None) -> Any:
            weight = None if w is None else w.detach().abs() + 0.5
            return getattr(F, name)(x, t, weight, **options)

        return call

    def soft(**options: Any) -> Callable[..., Any]:
        return lambda F, x, t, *w: F.cross_entropy(x, F.softmax(t, 1), *w, **options)

    cases = [
        Case(f"cross_entropy_{reduction}", loss(reduction=reduction), ((5, 6), LABELS), F32)
        for reduction in ("none", "sum", "mean")
    ]
    return [
        *cases,
        Case("cross_entropy_half", loss(), ((5, 6), LABELS), ALL),
        Case("cross_entropy_weight", loss(), ((5, 6), LABELS, (6,)), F32),
        Case(
            "cross_entropy_ignore",
            loss(ignore_index=3, reduction="none"),
            ((5, 6), abs(LABELS) % 6),
        ),
        Case("cross_entropy_smooth", loss(label_smoothing=0.3), ((5, 6), LABELS), F32),
        Case("cross_entropy_smooth_weight", loss(label_smoothing=0.3), ((5, 6), LABELS, (6,))),
        Case(
            "cross_entropy_smooth_none",
            loss(label_smoothing=0.3, reduction="none"),
            ((5, 6), LABELS, (6,)),
        ),
        Case("cross_entropy_images", loss(), ((2, 3, 2, 2), IMAGE_LABELS, (3,))),
        Case("cross_entropy_images_none", loss(reduction="none"), ((2, 3, 2, 2), IMAGE_LABELS)),
        Case("cross_entropy_one", loss(), ((4,), np.array(2))),
        Case("cross_entropy_soft", soft(), ((3, 4), (3, 4)), F32),
        Case("cross_entropy_soft_none", soft(reduction="none"), ((2, 4, 3), (2, 4, 3))),
        Case("cross_entropy_soft_smooth", soft(label_smoothing=0.2), ((3, 4), (3, 4), unit(4))),
        Case("nll_loss", loss("nll_loss"), ((5, 6), LABELS, (6,)), F32),
        Case("nll_loss_none", loss("nll_loss", reduction="none"), ((2, 3, 2, 2), IMAGE_LABELS)),
    ]


def _pair_losses() -> list[Case]:
    p, q = unit(3, 4), unit(3, 4, seed=1)
    calls: dict[str, Callable[..., Any]] = {
        "mse_loss": lambda F, x, y: F.mse_loss(x, y),
        "mse_loss_none": lambda F, x, y: F.mse_loss(x, y, reduction="none"),
        "l1_loss": lambda F, x, y: F.l1_loss(x, y, reduction="sum"),
        "smooth_l1_loss": lambda F, x, y: F.smooth_l1_loss(x, y, beta=0.5),
        "smooth_l1_loss_0": lambda F, x, y: F.smooth_l1_loss(x, y, beta=0.0),
        "huber_loss": lambda F, x, y: F.huber_loss(x, y, delta=0.75),
    }
    cases = [
        Case(name, call, ((3, 4), (3, 4)), ALL if name == "mse_loss" else ())
        for name, call in calls.items()
    ]
    return [
        *cases,
        Case(
            "mse_loss_weight",
            lambda F, x, y, w: F.mse_loss(x, y, weight=w.detach()),
            ((3, 4), (3, 4), p),
        ),
        Case(
            "huber_loss_weight",
            lambda F, x, y, w: F.huber_loss(x, y, weight=w.detach()),
            ((3, 4), (3, 4), p),
        ),
        Case("kl_div", lambda F, x, y: F.kl_div(x, y, reduction="batchmean"), ((3, 4), q), F32),
        Case(
            "kl_div_log",
            lambda F, x, y: F.kl_div(x, y, reduction="sum", log_target=True),
            ((3, 4), (3, 4)),
        ),
        Case("bce", lambda F, x, y: F.binary_cross_entropy(x, y), (p, q), F32),
        Case(
            "bce_weight",
            lambda F, x, y, w: F.binary_cross_entropy(x, y, w.detach(), reduction="none"),
            (p, q, unit(4)),
        ),
        Case(
            "bce_ends",
            lambda F, x, y: F.binary_cross_entropy(x, y.detach(), reduction="none"),
            (np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0, 1.0])),
            second=False,
            tolerance=1e-7,
        ),
        Case(
            "bce_logits",
            lambda F, x, y: F.binary_cross_entropy_with_logits(x, y),
            ((3, 4), q),
            F32,
        ),
        Case(
            "bce_logits_weights",
            lambda F, x, y, w, p: F.binary_cross_entropy_with_logits(
                x, y, w.detach(), pos_weight=p.detach(), reduction="none"
            ),
            ((3, 4), q, unit(4), unit(4, seed=2)),
        ),
    ]


def _shapes() -> list[Case]:
    return [
        Case("pad", lambda F, x: F.pad(x, (1, -2, 0, 3), value=2.0), ((2, 3, 4),)),
        Case("pad_reflect", lambda F, x: F.pad(x, (2, 1), mode="reflect"), ((1, 2, 4),)),
        Case("pad_replicate", lambda F, x: F.pad(x, (2, 5), mode="replicate"), ((1, 2, 3),)),
        Case("pad_circular", lambda F, x: F.pad(x, (2, 3), mode="circular"), ((1, 2, 3),)),
        Case("normalize", lambda F, x: F.normalize(x, dim=-1), ((3, 4),)),
        Case("cosine_similarity", lambda F, x, y: F.cosine_similarity(x, y), ((3, 4), (3, 4))),
    ]


# Others of the same family have the same second derivative.
FIRST_ONLY = (
    "relu6", "celu", "threshold", "prelu_one", "softmax_0", "softmax_0d", "softmin",
    "layer_norm_two_dims", "layer_norm_plain", "batch_norm_images", "batch_norm_plain",
    "rms_norm_plain", "group_norm_plain", "linear_one", "linear_vector", "linear_empty",
    "embedding_padding", "attention_causal_long", "attention_two_dims", "cross_entropy_sum",
    "cross_entropy_none", "cross_entropy_images_none", "cross_entropy_smooth_none",
    "cross_entropy_soft_none", "cross_entropy_soft_smooth", "cross_entropy_one", "nll_loss_none",
    "mse_loss_none", "smooth_l1_loss_0", "huber_loss_weight", "bce_weight", "pad", "pad_reflect",
    "pad_replicate", "pad_circular",
)  # fmt: skip
CASES = [
    dataclasses.replace(case, second=case.second and case.name not in FIRST_ONLY)
    for case in (
        *_activations(), *_softmaxes(), *_norms(), *_linears(), *_attentions(),
        *_classification(), *_pair_losses(), *_shapes(),
    )
]  # fmt: skip

MODULES: dict[str, Callable[[Any], Any]] = {
    text: eval(f"lambda nn: nn.{text}")
    for text in (
        "Linear(3, 4)", "Linear(3, 4, bias=False)", "Identity(5)", "Embedding(4, 2)",
        "Embedding(4, 2, padding_idx=-1, max_norm=1.0, norm_type=1.0, scale_grad_by_freq=True)",
        "LayerNorm(3)", "LayerNorm((2, 3), 1e-3, False)", "LayerNorm(3, bias=False)", "RMSNorm(3)",
        "RMSNorm((2, 3), 1e-3, elementwise_affine=False)", "BatchNorm1d(3)",
        "BatchNorm2d(3, momentum=None, affine=False)", "BatchNorm1d(3, track_running_stats=False)",
        "GroupNorm(2, 4)", "GroupNorm(2, 4, affine=False)", "Dropout()", "Dropout(0.1, True)",
        "ReLU()", "ReLU(True)", "GELU()", "GELU('tanh')", "SiLU(True)", "Tanh()", "Sigmoid()",
        "Softmax(-1)", "Softmax()", "LogSoftmax(1)", "Softmin(0)", "LeakyReLU(0.2, True)", "ELU()",
        "ELU(0.5, True)", "CELU(2.0)", "SELU()", "Softplus()", "Hardtanh(-2, 2, inplace=True)",
        "ReLU6()", "Mish()", "Hardswish(True)", "Hardsigmoid()", "LogSigmoid()", "Softsign()",
        "Tanhshrink()", "GLU()", "PReLU(3)", "Threshold(1, 2, True)", "MSELoss()",
        "CrossEntropyLoss()", "L1Loss()", "NLLLoss()", "BCELoss()", "BCEWithLogitsLoss()",
        "SmoothL1Loss()", "HuberLoss()", "KLDivLoss()", "Flatten()", "Flatten(0, 1)",
        "Unflatten(1, (2, 3))",
    )
}  # fmt: skip

ERRORS: dict[str, Callable[..., Any]] = {
    text: eval(f"lambda nn, F, t: {text}")
    for text in (
        "F.gelu(t([1, 2]))", "F.silu(t([1, 2]))", "F.gelu(t([1.0]), approximate='x')",
        "F.softmax(t([[1, 2]]), -1)", "F.log_softmax(t([[1, 2]]), -1)", "F.softmax(t([[1.0]]), 3)",
        "F.glu(t([[1.0, 2.0, 3.0]]))", "F.glu(t(1.0))", "F.leaky_relu(t([1]))", "F.elu(t([1]))",
        "F.prelu(t([[1.0, 2.0]]), t([1.0, 2.0, 3.0]))",
        "F.linear(t([[1.0, 2.0]]), t([[1.0]]))", "F.linear(t([1.0, 2.0]), t([[1.0, 2.0, 3.0]]))",
        "F.linear(t([[1, 2]]), t([[1.0, 2.0]]))",
        "F.linear(t([[1.0]]), t([[1.0]]), t([1.0, 2.0]))",
        "F.layer_norm(t([[1.0, 2.0]]), (3,))", "F.layer_norm(t([[1.0, 2.0]]), ())",
        "F.layer_norm(t([[1.0, 2.0]]), (2,), t([1.0]))", "F.layer_norm(t([[1, 2]]), (2,))",
        "F.layer_norm(t([[1.0, 2.0]]), (2,), t([1.0, 1.0]), t([1.0]))",
        "F.layer_norm(t([[1.0, 2.0]]), (2,), t([1.0, 1.0]).double())",
        "F.rms_norm(t([[1.0, 2.0]]), (3,))", "F.rms_norm(t([[1, 2]]), (2,))",
        "F.batch_norm(t([[1.0], [2.0]]), None, None)",
        "F.batch_norm(t([[1.0], [2.0]]), None, None, training=True, eps=0.0)",
        "F.batch_norm(t([[1.0], [2.0]]), t([0.0, 0.0]), t([1.0, 1.0]))",
        "nn.BatchNorm1d(2)(t([[1.0, 2.0]]))", "nn.BatchNorm1d(2)(t(1.0))",
        "nn.BatchNorm2d(2)(t([[1.0, 2.0]]))", "nn.BatchNorm1d(3)(t([[1.0, 2.0], [3.0, 4.0]]))",
        "nn.GroupNorm(4, 6)", "F.group_norm(t([[1.0, 2.0, 3.0]]), 2)",
        "F.group_norm(t([1.0]), 1)", "F.group_norm(t([[1.0, 2.0]]), 2)",
        "F.group_norm(t([[1.0, 2.0]]), 1, t([1.0]))",
        "F.dropout(t([1.0]), 1.5)", "F.dropout(t([1]), 0.5)", "nn.Dropout(-0.5)",
        "F.embedding(t([7]), t([[1.0], [2.0]]))", "F.embedding(t([-1]), t([[1.0], [2.0]]))",
        "F.embedding(t([1.0]), t([[1.0], [2.0]]))", "F.embedding(t([1]), t([1.0, 2.0]))",
        "F.embedding(t([1]), t([[1.0], [2.0]]), padding_idx=5)",
        "nn.Embedding(4, 2, padding_idx=9)",
        "F.one_hot(t([0, 2]), 2)", "F.one_hot(t([0, -2]), 2)", "F.one_hot(t([0.0]))",
        "F.cross_entropy(t([[1.0, 2.0]]), t([10]))", "F.cross_entropy(t([[1.0, 2.0]]), t([-1]))",
        "F.cross_entropy(t([1.0, 2.0]), t(10))",
        "F.cross_entropy(t([[[1.0, 2.0]]]), t([[0, 3]]))",
        "F.cross_entropy(t([[1.0, 2.0]]), t([10]), label_smoothing=0.1)",
        "F.cross_entropy(t([[1.0, 2.0]]), t([1]).int())",
        "F.cross_entropy(t([[1.0, 2.0]]), t([1.0]))",
        "F.cross_entropy(t([[1.0, 2.0]]), t([1, 1]))", "F.cross_entropy(t([[1, 2]]), t([1]))",
        "F.cross_entropy(t([[1.0, 2.0]]), t([1]), t([1.0]))",
        "F.cross_entropy(t([[1.0, 2.0]]), t([1]), reduction='x')",
        "F.cross_entropy(t([[1.0, 2.0]]), t([1]), label_smoothing=1.5)",
        "F.cross_entropy(t([[1.0, 2.0]]), t([[0.5, 0.5]]), ignore_index=1)",
        "F.cross_entropy(t([[[1.0, 2.0]]]), t([[0]]))",
        "F.nll_loss(t([[1.0, 2.0]]), t([10]))",
        "F.nll_loss(t([[1.0, 2.0]]), t([0, 1]))", "F.nll_loss(t(1.0), t(0))",
        "F.nll_loss(t([[1.0, 2.0]]), t([0.0]))",
        "F.mse_loss(t([1.0]), t([1.0]), reduction='x')", "F.mse_loss(t([1]), t([1]))",
        "F.mse_loss(t([1.0]), t([1.0]), weight=t([1.0, 2.0]))",
        "F.smooth_l1_loss(t([1.0]), t([1.0]), beta=-1.0)",
        "F.huber_loss(t([1.0]), t([1.0]), delta=0.0)", "nn.HuberLoss(delta='x')",
        "F.binary_cross_entropy(t([2.0]), t([1.0]))", "F.binary_cross_entropy(t([0.5]), t([7.0]))",
        "F.binary_cross_entropy(t([0.5]), t([0.5, 0.5]))",
        "F.binary_cross_entropy(t([0.5]), t([0.5]).double())",
        "F.binary_cross_entropy_with_logits(t([0.5]), t([0.5, 0.5]))",
        "F.scaled_dot_product_attention(t([1.0]), t([1.0]), t([1.0]))",
        "F.scaled_dot_product_attention(t([[1.0]]), t([[1.0]]).double(), t([[1.0]]))",
        "F.scaled_dot_product_attention(t([[1.0]]), t([[1.0]]), t([[1.0]]), t([[1]]))",
        "F.scaled_dot_product_attention(t([[1.0]]), t([[1.0]]), t([[1.0]]), dropout_p=2.0)",
        "F.pad(t([1.0]), (1,))", "F.pad(t([1.0]), (1, 1, 1, 1))",
        "F.pad(t([1.0]), (1, 1), mode='x')", "nn.init.eye_(t([1.0]))",
        "nn.init.kaiming_uniform_(t([1.0]))", "nn.init.kaiming_uniform_(t([[1.0]]), mode='x')",
        "nn.init.calculate_gain('x')", "nn.init.calculate_gain('leaky_relu', True)",
        "nn.init.orthogonal_(t([1.0]))", "nn.Flatten()(t(1.0))", "nn.Hardtanh(1.0, 1.0)",
    )
}  # fmt: skip
