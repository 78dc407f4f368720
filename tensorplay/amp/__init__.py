"""Training in low precision, as ``torch.amp``."""

from .grad_scaler import GradScaler as GradScaler
