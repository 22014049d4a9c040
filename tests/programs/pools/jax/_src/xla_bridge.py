"""Stands in for JAX's module of backends: the names that memtrace uses, with fixed figures."""

from types import SimpleNamespace

STATS = {"bytes_in_use": 2 << 20, "peak_bytes_in_use": 7 << 20, "pool_bytes": 9 << 20, "bytes_limit": 11 << 20}
DEVICE = SimpleNamespace(local_hardware_id=0, memory_stats=lambda: STATS)
_backends = {
    "cpu": SimpleNamespace(platform="cpu", local_devices=lambda: [None]),
    "cuda": SimpleNamespace(platform="gpu", local_devices=lambda: [DEVICE]),
}
