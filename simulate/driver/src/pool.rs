//! Stream-ordered allocation and memory pools.

use crate::device::ordinal_of;
use crate::memory::release;
use crate::state::{Purpose, code, current_device, machine, recorded};
use simcuda::abi::{AccessDesc, PoolProps};
use simcuda::error::{Error, Result};
use simcuda::ledger::Call;
use simcuda::machine::Machine;
use simcuda::out::Out;
use simcuda::stream::PER_THREAD;
use std::ffi::{c_int, c_uint, c_void};

/// The stream that a `_ptsz` function means by a handle. Null stands for the thread's own default stream.
pub(crate) fn per_thread(stream: u64) -> u64 {
    if stream == 0 { PER_THREAD } else { stream }
}

/// Allocates from a pool, or from the current pool of the stream's device.
fn allocate(api: &'static str, out: Out<u64>, size: usize, pool: Option<u64>, stream: u64) -> c_int {
    let current = current_device();
    let call = Call {
        api,
        addr: Some(0),
        size: Some(size as u64),
        device: Some(current),
        stream: Some(stream),
        handle: pool,
        ..Call::default()
    };
    recorded(Purpose::Take, call, |m, call| {
        if out.is_null() {
            return Err(Error::InvalidValue);
        }
        let ordinal = m.streams.get(stream, current)?.device;
        let pool = match pool {
            Some(pool) => pool,
            None => m.current_pool(ordinal)?,
        };
        call.device = Some(m.pool(pool)?.device);
        call.handle = Some(pool);
        m.activate(ordinal)?;
        let base = m.allocate_pooled(pool, size as u64)?;
        call.addr = Some(base);
        out.put(base);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync(out: Out<u64>, size: usize, stream: u64) -> c_int {
    allocate("cuMemAllocAsync", out, size, None, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync_ptsz(out: Out<u64>, size: usize, stream: u64) -> c_int {
    allocate("cuMemAllocAsync_ptsz", out, size, None, per_thread(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocFromPoolAsync(out: Out<u64>, size: usize, pool: u64, stream: u64) -> c_int {
    allocate("cuMemAllocFromPoolAsync", out, size, Some(pool), stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocFromPoolAsync_ptsz(out: Out<u64>, size: usize, pool: u64, stream: u64) -> c_int {
    allocate("cuMemAllocFromPoolAsync_ptsz", out, size, Some(pool), per_thread(stream))
}

fn free(api: &'static str, base: u64, stream: u64) -> c_int {
    let current = current_device();
    release(api, base, Some(stream), |m| {
        m.streams.get(stream, current)?;
        m.free_pooled(base)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(base: u64, stream: u64) -> c_int {
    free("cuMemFreeAsync", base, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync_ptsz(base: u64, stream: u64) -> c_int {
    free("cuMemFreeAsync_ptsz", base, per_thread(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: c_int) -> c_int {
    code(ordinal_of(device).map(|d| pool.put(Machine::default_pool(d))))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetMemPool(pool: Out<u64>, device: c_int) -> c_int {
    let found = ordinal_of(device).and_then(|d| machine().current_pool(d));
    code(found.map(|handle| pool.put(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceSetMemPool(device: c_int, pool: u64) -> c_int {
    code(ordinal_of(device).and_then(|d| machine().set_current_pool(d, pool)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolCreate(pool: Out<u64>, props: *const PoolProps) -> c_int {
    if props.is_null() {
        return Error::InvalidValue.code();
    }
    // SAFETY: by CUDA's contract `props` points to a structure of that type.
    let device = unsafe { (*props).location.id };
    let made = ordinal_of(device).and_then(|d| machine().create_pool(d));
    code(made.map(|handle| pool.put(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolDestroy(pool: u64) -> c_int {
    code(machine().destroy_pool(pool))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: u64, keep: usize) -> c_int {
    code(machine().trim_pool(pool, keep as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolSetAccess(_pool: u64, _access: *const AccessDesc, _count: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolGetAccess(flags: Out<c_uint>, _pool: u64, _location: *const c_void) -> c_int {
    flags.put(3);
    0
}

/// `CUmemPool_attribute`. The attributes 1 to 3 are the reuse policies, 32-bit flags.
mod attribute {
    pub(super) const RELEASE_THRESHOLD: i32 = 4;
    pub(super) const RESERVED: i32 = 5;
    pub(super) const RESERVED_HIGH: i32 = 6;
    pub(super) const USED: i32 = 7;
    pub(super) const USED_HIGH: i32 = 8;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: u64, which: c_int, value: *const c_void) -> c_int {
    let mut m = machine();
    code(m.pool(pool).and_then(|pool| {
        match which {
            1..=3 => {}
            // SAFETY: by CUDA's contract `value` points to a value of the attribute's type, which is 64 bits here.
            attribute::RELEASE_THRESHOLD => pool.threshold = unsafe { value.cast::<u64>().read_unaligned() },
            attribute::RESERVED_HIGH => pool.reset_reserved_high(),
            attribute::USED_HIGH => pool.reset_used_high(),
            _ => return Err(Error::InvalidValue),
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolGetAttribute(pool: u64, which: c_int, value: Out<c_void>) -> c_int {
    let mut m = machine();
    let number: Result<u64> = m.pool(pool).and_then(|pool| {
        let usage = pool.usage();
        match which {
            1..=3 => Ok(1),
            attribute::RELEASE_THRESHOLD => Ok(pool.threshold),
            attribute::RESERVED => Ok(usage.reserved),
            attribute::RESERVED_HIGH => Ok(usage.reserved_high),
            attribute::USED => Ok(usage.used),
            attribute::USED_HIGH => Ok(usage.used_high),
            _ => Err(Error::InvalidValue),
        }
    });
    code(number.map(|number| match which {
        1..=3 => value.cast::<c_int>().put(number as c_int),
        _ => value.cast::<u64>().put(number),
    }))
}
