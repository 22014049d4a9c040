"""Calls every recorded function of both layers through ctypes and checks results, ledger and memory in use. No PyTorch.

Needs SIMCUDA_LEDGER with %p, SIM_LD_PATH=1, and the major version of the runtime as its argument."""
import ctypes as C
import json
import mmap
import os
import sys

MIB = 1 << 20
major = int(sys.argv[1])
cu = C.CDLL("libcuda.so.1")
rt = C.CDLL(f"libcudart.so.{major}")
path = os.environ["SIMCUDA_LEDGER"].replace("%p", str(os.getpid()))
position = 0


def fresh():
    """Returns the ledger lines since the last call, in order of service."""
    global position
    with open(path) as file:
        file.seek(position)
        lines = [json.loads(line) for line in file]
        position = file.tell()
    return sorted(lines, key=lambda line: line["seq"])


def size_t(value=0):
    return C.c_size_t(value)


def used():
    free, total = size_t(), size_t()
    assert rt.cudaMemGetInfo(C.byref(free), C.byref(total)) == 0
    return total.value - free.value


def expect(*apis, result=0):
    """Checks that the new ledger lines are of these functions and have this result. Returns them by function name."""
    lines = fresh()
    assert sorted(line["api"] for line in lines) == sorted(apis), (lines, apis)
    assert all(line["result"] == result for line in lines), lines
    for line in lines:
        runtime_call = any(api.startswith("cuda") for api in apis)
        assert line.get("nested", False) == (line["layer"] == "driver" and runtime_call), line
        assert (line["layer"] == "runtime") == line["api"].startswith("cuda")
    return {line["api"]: line for line in lines}


version = C.c_int()
assert rt.cudaRuntimeGetVersion(C.byref(version)) == 0 and version.value // 1000 == major
assert cu.cuInit(0) == 0
count = C.c_int()
assert cu.cuDeviceGetCount(C.byref(count)) == 0 and count.value == 1
assert rt.cudaFree(None) == 0
expect("cudaFree", "cuMemFree_v2")
assert used() == 0
p, q = C.c_void_p(), C.c_void_p()
pitch, size = size_t(), size_t()
stream = C.c_void_p()
assert rt.cudaStreamCreate(C.byref(stream)) == 0

# ---- linear memory
for api, nested, call, want in (
    ("cudaMalloc", "cuMemAlloc_v2", lambda: rt.cudaMalloc(C.byref(p), size_t(3 * MIB)), 3 * MIB),
    ("cudaMallocPitch", "cuMemAllocPitch_v2",
     lambda: rt.cudaMallocPitch(C.byref(p), C.byref(pitch), size_t(1000), size_t(10)), 10240),
    ("cudaMallocManaged", "cuMemAllocManaged", lambda: rt.cudaMallocManaged(C.byref(p), size_t(5000), 1), 5000),
):
    assert call() == 0
    lines = expect(api, nested)
    assert all(line["addr"] == p.value and line["size"] == want and line["device"] == 0 for line in lines.values())
    C.memset(p.value, 7, want)
    assert rt.cudaFree(p) == 0
    assert all(line["size"] == want for line in expect("cudaFree", "cuMemFree_v2").values())
    assert used() == 0
    assert rt.cudaFree(p) == 1, "freed already"
    expect("cudaFree", "cuMemFree_v2", result=1)
assert pitch.value == 1024
assert rt.cudaMalloc(C.byref(p), size_t(1 << 50)) == 2 and rt.cudaGetLastError() == 2 and rt.cudaGetLastError() == 0
assert all(line["addr"] == 0 for line in expect("cudaMalloc", "cuMemAlloc_v2", result=2).values())
assert rt.cudaMalloc(C.byref(p), size_t(0)) == 0 and p.value is None
expect("cudaMalloc")


class Extent(C.Structure):
    _fields_ = [("width", C.c_size_t), ("height", C.c_size_t), ("depth", C.c_size_t)]


class Pitched(C.Structure):
    _fields_ = [("ptr", C.c_void_p), ("pitch", C.c_size_t), ("xsize", C.c_size_t), ("ysize", C.c_size_t)]


pitched = Pitched()
assert rt.cudaMalloc3D(C.byref(pitched), Extent(600, 5, 4)) == 0
assert (pitched.pitch, pitched.xsize, pitched.ysize) == (1024, 600, 5)
assert expect("cudaMalloc3D", "cuMemAllocPitch_v2")["cudaMalloc3D"]["size"] == 1024 * 20
assert rt.cudaFree(C.c_void_p(pitched.ptr)) == 0
expect("cudaFree", "cuMemFree_v2")

# ---- stream-ordered memory
pool = C.c_void_p()
assert rt.cudaDeviceGetDefaultMemPool(C.byref(pool), 0) == 0
for suffix, default in (("", 0), ("_ptsz", 2)):
    for given in (stream, None):
        handle = given.value if given else default
        assert getattr(rt, f"cudaMallocAsync{suffix}")(C.byref(p), size_t(1000), given) == 0
        assert getattr(rt, f"cudaMallocFromPoolAsync{suffix}")(C.byref(q), size_t(2000), pool, given) == 0
        lines = expect(f"cudaMallocAsync{suffix}", f"cuMemAllocAsync{suffix}",
                       f"cudaMallocFromPoolAsync{suffix}", f"cuMemAllocFromPoolAsync{suffix}")
        assert all(line["stream"] == handle for line in lines.values()), (handle, lines)
        assert lines[f"cuMemAllocAsync{suffix}"]["handle"] == pool.value
        assert used() == 32 * MIB
        assert getattr(rt, f"cudaFreeAsync{suffix}")(p, given) == 0
        lines = expect(f"cudaFreeAsync{suffix}", f"cuMemFreeAsync{suffix}")
        assert all(line["stream"] == handle and line["size"] == 1000 for line in lines.values()), lines
        assert rt.cudaFree(q) == 0, "cudaFree takes pooled memory too"
        expect("cudaFree", "cuMemFree_v2")
        assert used() == 32 * MIB, "kept until somebody waits"
        assert rt.cudaStreamSynchronize(given) == 0
        assert used() == 0

# ---- host memory
assert rt.cudaHostAlloc(C.byref(p), size_t(100), 1) == 0
assert expect("cudaHostAlloc", "cuMemHostAlloc")["cudaHostAlloc"]["flags"] == 1
assert rt.cudaMallocHost(C.byref(q), size_t(100)) == 0
expect("cudaMallocHost", "cuMemHostAlloc")
for pointer in (p, q):
    assert rt.cudaFree(pointer) == 1, "not by cudaFree"
    expect("cudaFree", "cuMemFree_v2", result=1)
    assert rt.cudaFreeHost(pointer) == 0
    expect("cudaFreeHost", "cuMemFreeHost")
assert cu.cuMemAllocHost_v2(C.byref(p), size_t(64)) == 0 and cu.cuMemFreeHost(p) == 0
expect("cuMemAllocHost_v2", "cuMemFreeHost")
own = mmap.mmap(-1, 8192)
base = C.addressof(C.c_char.from_buffer(own))
assert rt.cudaHostRegister(C.c_void_p(base), size_t(8192), 0) == 0
expect("cudaHostRegister", "cuMemHostRegister_v2")
assert rt.cudaHostRegister(C.c_void_p(base), size_t(8192), 0) == 712
expect("cudaHostRegister", "cuMemHostRegister_v2", result=712)
assert rt.cudaHostUnregister(C.c_void_p(base)) == 0
expect("cudaHostUnregister", "cuMemHostUnregister")

# ---- arrays


class Channels(C.Structure):
    _fields_ = [("bits", C.c_int * 4), ("kind", C.c_int)]


floats = Channels((C.c_int * 4)(32, 32, 0, 0), 2)
array = C.c_void_p()
for api, nested, call, want in (
    ("cudaMallocArray", "cuArrayCreate_v2",
     lambda: rt.cudaMallocArray(C.byref(array), C.byref(floats), size_t(64), size_t(16), 0), 8 * 64 * 16),
    ("cudaMallocArray", "cuArray3DCreate_v2",
     lambda: rt.cudaMallocArray(C.byref(array), C.byref(floats), size_t(64), size_t(16), 2), 8 * 64 * 16),
    ("cudaMalloc3DArray", "cuArray3DCreate_v2",
     lambda: rt.cudaMalloc3DArray(C.byref(array), C.byref(floats), Extent(8, 4, 2), 0), 8 * 64),
):
    assert call() == 0
    lines = expect(api, nested)
    assert all(line["handle"] == array.value and line["size"] == want for line in lines.values()), lines
    assert used() > 0 and rt.cudaFreeArray(array) == 0 and used() == 0
    expect("cudaFreeArray", "cuArrayDestroy")
assert rt.cudaMallocMipmappedArray(C.byref(array), C.byref(floats), Extent(4, 4, 0), 3, 0) == 0
assert expect("cudaMallocMipmappedArray", "cuMipmappedArrayCreate")["cudaMallocMipmappedArray"]["size"] == 8 * 21
assert rt.cudaFreeMipmappedArray(array) == 0
expect("cudaFreeMipmappedArray", "cuMipmappedArrayDestroy")

# ---- virtual memory management: one physical memory mapped at two addresses


class Properties(C.Structure):
    _fields_ = [("kind", C.c_int), ("types", C.c_int), ("location", C.c_int), ("device", C.c_int),
                ("win32", C.c_void_p), ("flags", C.c_uint8 * 8)]


class Access(C.Structure):
    _fields_ = [("location", C.c_int), ("device", C.c_int), ("flags", C.c_int)]


u64 = C.c_uint64
handle, address = u64(), u64()
assert cu.cuMemAddressReserve(C.byref(address), size_t(8 * MIB), size_t(0), u64(0), u64(0)) == 0
assert cu.cuMemCreate(C.byref(handle), size_t(2 * MIB), C.byref(Properties(1, 1, 1, 0)), u64(0)) == 0
lines = expect("cuMemAddressReserve", "cuMemCreate")
assert lines["cuMemCreate"]["handle"] == handle.value and used() == 2 * MIB
for offset in (0, 4 * MIB):
    at = u64(address.value + offset)
    assert cu.cuMemMap(at, size_t(2 * MIB), size_t(0), handle, u64(0)) == 0
    assert expect("cuMemMap")["cuMemMap"]["handle"] == handle.value
    assert cu.cuMemSetAccess(at, size_t(2 * MIB), C.byref(Access(1, 0, 3)), size_t(1)) == 0
C.memset(address.value, 42, 100)
assert C.string_at(address.value + 4 * MIB, 3) == b"***"
assert cu.cuMemAddressFree(address, size_t(8 * MIB)) == 1, "something is mapped"
expect("cuMemAddressFree", result=1)
descriptor = C.c_int()
imported = u64()
assert cu.cuMemExportToShareableHandle(C.byref(descriptor), handle, 1, u64(0)) == 0
assert cu.cuMemImportFromShareableHandle(C.byref(imported), C.c_void_p(descriptor.value), 1) == 0
assert cu.cuMemMap(u64(address.value + 6 * MIB), size_t(2 * MIB), size_t(0), imported, u64(0)) == 0
assert cu.cuMemSetAccess(u64(address.value + 6 * MIB), size_t(2 * MIB), C.byref(Access(1, 0, 3)), size_t(1)) == 0
assert C.string_at(address.value + 6 * MIB, 3) == b"***", "the import is the same memory"
assert cu.cuMemRelease(imported) == 0 and cu.cuMemRelease(handle) == 0 and cu.cuMemRelease(handle) == 1
assert used() == 2 * MIB, "still mapped"
assert cu.cuMemUnmap(address, size_t(2 * MIB)) == 0 and cu.cuMemUnmap(address, size_t(2 * MIB)) == 1
assert cu.cuMemUnmap(u64(address.value + 4 * MIB), size_t(4 * MIB)) == 0
assert used() == 0 and cu.cuMemAddressFree(address, size_t(8 * MIB)) == 0
codes = [(line["api"], line["result"]) for line in fresh()]
assert codes == [("cuMemImportFromShareableHandle", 0), ("cuMemMap", 0), ("cuMemRelease", 0), ("cuMemRelease", 0),
                 ("cuMemRelease", 1), ("cuMemUnmap", 0), ("cuMemUnmap", 1), ("cuMemUnmap", 0), ("cuMemAddressFree", 0)], codes

# ---- IPC


class Handle(C.Structure):
    _fields_ = [("bytes", C.c_uint8 * 64)]


assert rt.cudaMalloc(C.byref(p), size_t(4096)) == 0
C.memset(p.value, 5, 4096)
ipc = Handle()
assert rt.cudaIpcGetMemHandle(C.byref(ipc), p) == 0
assert rt.cudaIpcOpenMemHandle(C.byref(q), ipc, 1) == 1, "not in the process that made it"
codes = [(line["api"], line["result"]) for line in fresh()][2:]
assert codes == [("cudaIpcGetMemHandle", 0), ("cuIpcOpenMemHandle_v2", 1), ("cudaIpcOpenMemHandle", 1)], codes
if os.fork() == 0:
    status = 1
    try:
        other = C.CDLL(f"libcudart.so.{major}")
        assert other.cudaIpcOpenMemHandle(C.byref(q), ipc, 1) == 0 and C.string_at(q.value, 2) == b"\5\5"
        assert other.cudaIpcCloseMemHandle(q) == 0
        path = os.environ["SIMCUDA_LEDGER"].replace("%p", str(os.getpid()))
        position = 0
        assert len(fresh()) == 4
        status = 0
    finally:
        os._exit(status)
assert os.wait()[1] == 0
assert rt.cudaFree(p) == 0

# ---- names: base names, versions, per-thread default streams
found, status = C.c_void_p(), C.c_int()


def look_up(name, version=12080, flags=0):
    code = cu.cuGetProcAddress_v2(name, C.byref(found), version, u64(flags), C.byref(status))
    return found.value if code == 0 else (code, status.value)


def address_of(name):
    return C.cast(getattr(cu, name), C.c_void_p).value


assert look_up(b"cuMemAlloc") == address_of("cuMemAlloc_v2") == look_up(b"cuMemAlloc_v2")
assert look_up(b"cuMemAllocAsync") == address_of("cuMemAllocAsync")
assert look_up(b"cuMemAllocAsync", flags=2) == address_of("cuMemAllocAsync_ptsz")
assert look_up(b"cuMemFree", flags=2) == address_of("cuMemFree_v2"), "no variant: the plain one"
assert look_up(b"cuGetProcAddress") == address_of("cuGetProcAddress_v2")
assert look_up(b"cuGetProcAddress", 11030) == address_of("cuGetProcAddress")
assert look_up(b"cuStreamGetCaptureInfo", 12000) == address_of("cuStreamGetCaptureInfo_v2")
assert look_up(b"cuStreamGetCaptureInfo") == address_of("cuStreamGetCaptureInfo_v3")
assert look_up(b"cuStreamGetCaptureInfo", 10000) == (500, 2), "there, but not for that version"
assert look_up(b"cuNoSuchThing") == (500, 1)
assert rt.cudaGetDriverEntryPointByVersion(b"cuMemAlloc", C.byref(found), 12000, u64(0), C.byref(status)) == 0
assert (found.value, status.value) == (address_of("cuMemAlloc_v2"), 0)
