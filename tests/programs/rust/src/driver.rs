//! Allocates through cudarc's safe interface, in several threads. Before each allocation it prints its callers as the
//! crate `backtrace` sees them.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Prints the lines of this file that called this function, innermost first, then calls the given one.
#[inline(never)]
fn witnessed<T>(allocate: impl FnOnce() -> Result<T, DriverError>) -> Outcome<T> {
    let (mut lines, mut is_caller) = (Vec::new(), false);
    backtrace::trace(|frame| {
        backtrace::resolve_frame(frame, |symbol| {
            let is_own = symbol.filename().is_some_and(|file| file.ends_with("rust/src/driver.rs"));
            if is_caller && is_own {
                lines.push(symbol.lineno().unwrap_or_default().to_string());
            }
            is_caller |= is_own && symbol.name().is_some_and(|name| format!("{name:#}").contains("witnessed"));
        });
        true
    });
    println!("{}", lines.join(" "));
    Ok(allocate()?)
}

/// The weights, copied from the host.
#[inline(never)]
fn weights(stream: &Arc<CudaStream>) -> Outcome<CudaSlice<f32>> {
    let host = vec![1.0_f32; 1 << 20];
    witnessed(|| stream.clone_htod(&host))
}

/// The tensors that one step of a training keeps.
#[inline(never)]
fn activations(stream: &Arc<CudaStream>, step: usize) -> Outcome<CudaSlice<f32>> {
    witnessed(|| stream.alloc_zeros::<f32>((step + 1) << 18))
}

#[inline(never)]
fn train(context: &Arc<CudaContext>, steps: usize) -> Outcome<()> {
    let stream = context.new_stream()?;
    let weights = weights(&stream)?;
    let mut kept = Vec::new();
    for step in 0..steps {
        kept.push(activations(&stream, step)?);
        if step % 2 == 1 {
            kept.remove(0);
        }
    }
    stream.synchronize()?;
    assert_eq!(stream.clone_dtoh(&weights)?.len(), 1 << 20);
    Ok(())
}

fn main() -> Outcome<()> {
    let context = CudaContext::new(0)?;
    // SAFETY: nothing reads the memory.
    let pinned = witnessed(|| unsafe { context.alloc_pinned::<u8>(1 << 20) })?;
    train(&context, 6)?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| train(&context, 4))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the thread ends"))
    })?;
    drop(pinned);
    Ok(())
}
