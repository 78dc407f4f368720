"""Optimizers and learning rate schedules, as ``torch.optim``."""

from . import lr_scheduler as lr_scheduler
from ._adagrad import Adagrad as Adagrad
from ._adam import Adam as Adam
from ._adam import AdamW as AdamW
from ._optimizer import Optimizer as Optimizer
from ._rmsprop import RMSprop as RMSprop
from ._sgd import SGD as SGD
