//! Stream-ordered allocation and memory pools.

use crate::driver::Driver;
use crate::state::{call, give, take};
use simcuda::abi::{AccessDesc, PoolProps};
use simcuda::error::Error;
use simcuda::ledger::Call;
use simcuda::out::Out;
use simcuda::stream::PER_THREAD;
use std::ffi::{c_int, c_void};

fn per_thread(stream: u64) -> u64 {
    if stream == 0 { PER_THREAD } else { stream }
}

fn allocate(
    api: &'static str,
    out: Out<u64>,
    size: usize,
    pool: Option<u64>,
    stream: u64,
    work: impl FnOnce(&Driver, Out<u64>) -> c_int,
) -> c_int {
    let call =
        Call { api, addr: Some(0), size: Some(size as u64), handle: pool, stream: Some(stream), ..Call::default() };
    take(call, |d, call| {
        if out.is_null() {
            return Error::InvalidValue.code();
        }
        let mut base = 0;
        let code = if size == 0 { 0 } else { work(d, Out::from(&mut base)) };
        if code == 0 {
            call.addr = Some(base);
            out.put(base);
        }
        code
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocAsync(out: Out<u64>, size: usize, stream: u64) -> c_int {
    allocate("cudaMallocAsync", out, size, None, stream, |d, base| (d.mem_alloc_async)(base, size, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocAsync_ptsz(out: Out<u64>, size: usize, stream: u64) -> c_int {
    allocate("cudaMallocAsync_ptsz", out, size, None, per_thread(stream), |d, base| {
        (d.mem_alloc_async_ptsz)(base, size, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocFromPoolAsync(out: Out<u64>, size: usize, pool: u64, stream: u64) -> c_int {
    allocate("cudaMallocFromPoolAsync", out, size, Some(pool), stream, |d, base| {
        (d.mem_alloc_from_pool_async)(base, size, pool, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocFromPoolAsync_ptsz(out: Out<u64>, size: usize, pool: u64, stream: u64) -> c_int {
    allocate("cudaMallocFromPoolAsync_ptsz", out, size, Some(pool), per_thread(stream), |d, base| {
        (d.mem_alloc_from_pool_async_ptsz)(base, size, pool, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeAsync(base: u64, stream: u64) -> c_int {
    let call = Call { api: "cudaFreeAsync", addr: Some(base), stream: Some(stream), ..Call::default() };
    give(call, |d| (d.mem_free_async)(base, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeAsync_ptsz(base: u64, stream: u64) -> c_int {
    let call =
        Call { api: "cudaFreeAsync_ptsz", addr: Some(base), stream: Some(per_thread(stream)), ..Call::default() };
    give(call, |d| (d.mem_free_async_ptsz)(base, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetDefaultMemPool(pool: Out<u64>, device: c_int) -> c_int {
    call(|d| (d.device_get_default_mem_pool)(pool, device))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetMemPool(pool: Out<u64>, device: c_int) -> c_int {
    call(|d| (d.device_get_mem_pool)(pool, device))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceSetMemPool(device: c_int, pool: u64) -> c_int {
    call(|d| (d.device_set_mem_pool)(device, pool))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemPoolCreate(pool: Out<u64>, props: *const PoolProps) -> c_int {
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    call(|d| unsafe { (d.mem_pool_create)(pool, props) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemPoolDestroy(pool: u64) -> c_int {
    call(|d| (d.mem_pool_destroy)(pool))
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemPoolTrimTo(pool: u64, keep: usize) -> c_int {
    call(|d| (d.mem_pool_trim_to)(pool, keep))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemPoolSetAccess(pool: u64, access: *const AccessDesc, count: usize) -> c_int {
    // SAFETY: by CUDA's contract `access` points to `count` descriptors.
    call(|d| unsafe { (d.mem_pool_set_access)(pool, access, count) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemPoolSetAttribute(pool: u64, attribute: c_int, value: *const c_void) -> c_int {
    // SAFETY: by CUDA's contract `value` points to a value of the attribute's type.
    call(|d| unsafe { (d.mem_pool_set_attribute)(pool, attribute, value) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemPoolGetAttribute(pool: u64, attribute: c_int, value: *mut c_void) -> c_int {
    call(|d| (d.mem_pool_get_attribute)(pool, attribute, value))
}
