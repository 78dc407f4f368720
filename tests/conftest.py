"""Eight CPU devices for simulated ranks, set before JAX starts."""

from __future__ import annotations

import os

import jax

if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
