# The program's interpreter runs this for `memtrace --pools read` and `--pools off`. It works in every CPython from 3.8 on,
# prints nothing and raises nothing.
def install(folder, is_off):
    import atexit
    import json
    import os
    import sys

    own_pid = os.getpid()

    def imported(name):
        return sys.modules.get(name)

    def jax_pools(pools):
        # Only backends that exist: making one here would take memory.
        bridge = imported("jax._src.xla_bridge")
        for backend in dict(getattr(bridge, "_backends", None) or {}).values():
            if backend.platform == "cpu":
                continue
            for device in backend.local_devices():
                stats = device.memory_stats() or {}
                if "bytes_in_use" in stats:
                    pools.append(
                        {
                            "library": "JAX",
                            "device": int(getattr(device, "local_hardware_id", None) or 0),
                            "used_bytes": stats["bytes_in_use"],
                            "used_peak_bytes": stats.get("peak_bytes_in_use"),
                            "pool_bytes": stats.get("pool_bytes"),
                            "limit_bytes": stats.get("bytes_limit"),
                        }
                    )

    def cupy_pools(pools):
        cupy = imported("cupy")
        if cupy is None:
            return
        # The program may have replaced the pool, or removed it.
        pool = getattr(cupy.cuda.get_allocator(), "__self__", None)
        figures = {"library": "CuPy", "device": int(cupy.cuda.runtime.getDevice()), "allocator": type(pool).__name__}
        if isinstance(pool, cupy.cuda.MemoryPool):
            # Asking for another device would make its context, so only the current one is asked for.
            figures["used_bytes"] = int(pool.used_bytes())
            figures["pool_bytes"] = int(pool.total_bytes())
            figures["limit_bytes"] = int(pool.get_limit()) or None
        pools.append(figures)

    def at_exit():
        # In a forked child, another thread may hold the libraries' locks for ever.
        if os.getpid() != own_pid:
            return
        pools, errors = [], []
        for read in (jax_pools, cupy_pools):
            try:
                read(pools)
            except Exception as error:
                errors.append("%s: %s: %s" % (read.__name__, type(error).__name__, error))
        if not pools and not errors:
            return
        try:
            text = json.dumps({"version": 1, "pools": pools, "errors": errors})
            path = os.path.join(folder, ("pools-%d.json" % own_pid).encode())
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except Exception:
            pass

    try:
        # The last registered function runs first: before JAX drops its backends.
        atexit.register(at_exit)
        cupy = imported("cupy") if is_off else None
        if cupy is not None:
            try:
                allocator = cupy.cuda.MemoryAsyncPool().malloc
            except Exception:
                # The device has no stream-ordered allocator.
                allocator = None
            cupy.cuda.set_allocator(allocator)
    except Exception:
        pass


