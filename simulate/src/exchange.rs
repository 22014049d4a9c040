//! Messages between the ranks of one launch, as files in a folder that they share.
//!
//! Every rank counts the operations of a communicator, so the ranks agree on the name of each message. A message is renamed
//! into place, so a rank reads all of it or nothing. A rank that waits in vain goes on without the others, because a dry run
//! of some ranks is worth more than one that hangs.

use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for a message: PyTorch's own limit for NCCL (`default_pg_nccl_timeout`).
const PATIENCE: Duration = Duration::from_secs(600);
/// The time between two looks for a message.
const PAUSE: Duration = Duration::from_micros(200);

/// The connection of one rank to the others of its communicator.
#[derive(Debug)]
pub struct Exchange {
    folder: PathBuf,
    /// The beginning of the names of all its messages.
    name: String,
    rank: u32,
    size: u32,
    patience: Duration,
    /// The number of collective operations so far.
    rounds: AtomicU64,
    /// The number of messages so far to each rank.
    sent: Mutex<HashMap<u32, u64>>,
    /// The number of messages so far from each rank.
    received: Mutex<HashMap<u32, u64>>,
    /// The messages of this rank that other ranks may still read.
    own: Mutex<Vec<PathBuf>>,
    /// Whether a message did not come. This rank then waits for no other.
    is_alone: AtomicBool,
}

impl Exchange {
    /// The connection of `rank` to the `size` ranks whose communicator has this id. The folder exists.
    pub fn new(folder: PathBuf, id: &[u8], rank: u32, size: u32) -> Self {
        let name = id.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Exchange {
            folder,
            name,
            rank,
            size,
            patience: PATIENCE,
            rounds: AtomicU64::new(0),
            sent: Mutex::default(),
            received: Mutex::default(),
            own: Mutex::default(),
            is_alone: AtomicBool::new(false),
        }
    }

    /// The parts of all ranks, in their order. `None` if one did not come.
    pub fn all_gather(&self, part: &[u8]) -> Option<Vec<Vec<u8>>> {
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        self.publish(format!("{round}.{}", self.rank), part).ok()?;
        let parts = (0..self.size).map(|rank| self.wait_for(&format!("{round}.{rank}"))).collect();
        // Each rank is in this round, so each has read the messages of earlier ones.
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let last = own.len().saturating_sub(1);
        own.drain(..last).for_each(|path| drop(fs::remove_file(path)));
        parts
    }

    /// The data of the rank `root`: `data` on that rank. `None` if it did not come.
    pub fn broadcast(&self, root: u32, data: &[u8]) -> Option<Vec<u8>> {
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        if root != self.rank {
            return self.wait_for(&format!("{round}.{root}"));
        }
        self.publish(format!("{round}.{root}"), data).ok()?;
        Some(data.to_vec())
    }

    /// Sends data to a rank, which need not wait for it yet.
    ///
    /// # Errors
    ///
    /// If the message cannot be written.
    pub fn send(&self, to: u32, data: &[u8]) -> io::Result<()> {
        let name = format!("{}-{to}.{}", self.rank, next(&self.sent, to));
        self.write(&name, data).map(drop)
    }

    /// The data that a rank sends to this one. `None` if it did not come.
    pub fn receive(&self, from: u32) -> Option<Vec<u8>> {
        let name = format!("{from}-{}.{}", self.rank, next(&self.received, from));
        let data = self.wait_for(&name)?;
        fs::remove_file(self.path(&name)).ok();
        Some(data)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("nccl-{}-{name}", self.name))
    }

    fn publish(&self, name: String, data: &[u8]) -> io::Result<()> {
        let path = self.write(&name, data)?;
        self.own.lock().unwrap_or_else(PoisonError::into_inner).push(path);
        Ok(())
    }

    fn write(&self, name: &str, data: &[u8]) -> io::Result<PathBuf> {
        let (path, partial) = (self.path(name), self.path(&format!("{name}.partial")));
        fs::write(&partial, data)?;
        fs::rename(&partial, &path)?;
        Ok(path)
    }

    fn wait_for(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.path(name);
        let start = Instant::now();
        loop {
            match fs::read(&path) {
                Ok(data) => return Some(data),
                Err(error) if error.kind() == ErrorKind::NotFound && !self.is_alone.load(Ordering::Relaxed) => {}
                Err(_) => return None,
            }
            if start.elapsed() > self.patience {
                self.is_alone.store(true, Ordering::Relaxed);
            }
            thread::sleep(PAUSE);
        }
    }
}

/// The number of the next message to or from a rank.
fn next(numbers: &Mutex<HashMap<u32, u64>>, rank: u32) -> u64 {
    let mut numbers = numbers.lock().unwrap_or_else(PoisonError::into_inner);
    let number = numbers.entry(rank).or_default();
    *number += 1;
    *number
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs each rank of a communicator in a thread, and returns the results in the order of the ranks.
    fn ranks<T: Send>(name: &str, size: u32, rank: impl Fn(Exchange) -> T + Sync) -> Vec<T> {
        let folder = std::env::temp_dir().join(format!("simcuda-exchange-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let results = thread::scope(|scope| {
            let start = |number| {
                scope.spawn({
                    let (exchange, rank) = (Exchange::new(folder.clone(), b"id", number, size), &rank);
                    move || rank(exchange)
                })
            };
            let threads: Vec<_> = (0..size).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        fs::remove_dir_all(folder).unwrap();
        results
    }

    #[test]
    fn every_rank_gets_the_parts_of_all() {
        let results = ranks("gather", 3, |exchange| {
            let rounds = (0..20).map(|round| exchange.all_gather(&[round, exchange.rank as u8]).unwrap());
            let rounds: Vec<_> = rounds.collect();
            (rounds, exchange.own.lock().unwrap().len())
        });
        let expected: Vec<Vec<Vec<u8>>> = (0..20).map(|round| (0..3).map(|rank| vec![round, rank]).collect()).collect();
        assert_eq!(results, vec![(expected, 1); 3], "with one message left of each rank");
    }

    #[test]
    fn a_broadcast_has_the_data_of_its_root() {
        let results = ranks("broadcast", 2, |exchange| {
            [0, 1, 1].map(|root| exchange.broadcast(root, &[root as u8, exchange.rank as u8]).unwrap())
        });
        assert_eq!(results, vec![[vec![0, 0], vec![1, 1], vec![1, 1]]; 2]);
    }

    #[test]
    fn messages_between_two_ranks_keep_their_order() {
        let results = ranks("send", 2, |exchange| {
            let ranks = [0, 1];
            for (to, number) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
                exchange.send(to, &[exchange.rank as u8, number]).unwrap();
            }
            ranks.map(|from| [(); 2].map(|()| exchange.receive(from).unwrap()))
        });
        assert_eq!(results, [[[[0, 0], [0, 1]], [[1, 0], [1, 1]]]; 2]);
    }

    #[test]
    fn a_rank_goes_on_without_one_that_never_comes() {
        let results = ranks("alone", 2, |exchange| {
            let exchange = Exchange { patience: Duration::from_millis(20), ..exchange };
            if exchange.rank == 0 { exchange.all_gather(&[1]) } else { None }
        });
        assert_eq!(results, [None, None]);
    }
}
