"""A JAX program that allocates on demand; prints the bytes that JAX itself reports."""

import json
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp

x = jnp.ones((4096, 4096))
y = (x @ x).block_until_ready()
stats = jax.devices()[0].memory_stats() or {}
print(json.dumps({"jax": jax.__version__, "stats": stats}), flush=True)
