"""A CuPy program; prints the bytes that CuPy itself reports."""

import json

import cupy

x = cupy.ones((2048, 2048), dtype=cupy.float32)
y = x @ x
z = cupy.zeros(50 << 20, dtype=cupy.uint8)
cupy.cuda.Device().synchronize()
pool = cupy.get_default_memory_pool()
print(json.dumps({"cupy": cupy.__version__, "pool": pool.total_bytes(), "used": pool.used_bytes()}), flush=True)
