//! Messages between the ranks of one launch, as files in a folder that they share.
//!
//! Every rank counts the operations of a communicator, so the ranks agree on the name of each message. A message is
//! renamed into place, so a rank reads all of it or nothing. Every rank also writes which process it is: a rank that
//! waits for one whose process has ended stops at once, and the program gets NCCL's error. A rank that waits in vain
//! for a process that runs goes on without the others, because a dry run of some ranks is worth more than one that
//! hangs.

use crate::shared::Process;
use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for a message: PyTorch's own limit for NCCL (`default_pg_nccl_timeout`).
const PATIENCE: Duration = Duration::from_secs(600);
/// The time between two looks for a message.
const PAUSE: Duration = Duration::from_micros(200);
/// The time between two looks whether the rank that is waited for has ended.
const CHECK: Duration = Duration::from_millis(100);

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
    /// The rank whose process ended before it sent a message that this rank waits for.
    lost: OnceLock<u32>,
}

impl Exchange {
    /// The connection of `rank` to the `size` ranks whose communicator has this id. The folder exists.
    pub fn new(folder: PathBuf, id: &[u8], rank: u32, size: u32) -> Self {
        let name = id.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let exchange = Exchange {
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
            lost: OnceLock::new(),
        };
        // Without it, the others wait as long for this rank as for one that runs.
        exchange.write(&presence(rank), this_process().as_bytes()).ok();
        exchange
    }

    /// The rank whose process ended before it sent a message that this rank waited for.
    pub fn lost(&self) -> Option<u32> {
        self.lost.get().copied()
    }

    /// The parts of all ranks, in their order. `None` if one did not come.
    pub fn all_gather(&self, part: &[u8]) -> Option<Vec<Vec<u8>>> {
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        self.publish(format!("{round}.{}", self.rank), part).ok()?;
        let parts = (0..self.size).map(|rank| self.wait_for(rank, &format!("{round}.{rank}"))).collect();
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
            return self.wait_for(root, &format!("{round}.{root}"));
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
        let data = self.wait_for(from, &name)?;
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
        fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial)?.write_all(data)?;
        fs::rename(&partial, &path)?;
        Ok(path)
    }

    /// The message with this name, which `rank` sends.
    fn wait_for(&self, rank: u32, name: &str) -> Option<Vec<u8>> {
        let path = self.path(name);
        let start = Instant::now();
        let mut checked = start;
        loop {
            match fs::read(&path) {
                Ok(data) => return Some(data),
                Err(error) if error.kind() == ErrorKind::NotFound && !self.is_alone.load(Ordering::Relaxed) => {}
                Err(_) => return None,
            }
            if start.elapsed() > self.patience {
                self.is_alone.store(true, Ordering::Relaxed);
            } else if checked.elapsed() > CHECK {
                checked = Instant::now();
                if self.has_ended(rank) {
                    // It can have sent the message before it ended, which the next attempt to read it finds.
                    self.is_alone.store(true, Ordering::Relaxed);
                    if !path.exists() {
                        self.lost.set(rank).ok();
                    }
                }
            }
            thread::sleep(PAUSE);
        }
    }

    /// Whether the process of a rank is known and has ended.
    fn has_ended(&self, rank: u32) -> bool {
        let Ok(text) = fs::read_to_string(self.path(&presence(rank))) else { return false };
        let words: Vec<&str> = text.split(' ').collect();
        let [pid, started, other] = words[..] else { return false };
        let (Ok(pid), Ok(started)) = (pid.parse(), started.parse()) else { return false };
        other == namespace() && !Process { pid, started }.is_alive()
    }
}

/// The name of the message in which a rank writes its process.
fn presence(rank: u32) -> String {
    format!("process.{rank}")
}

/// This process: its id, when it started, and the namespace of its id.
fn this_process() -> String {
    let process = Process::of(std::process::id());
    format!("{} {} {}", process.pid, process.started, namespace())
}

/// The namespace of process ids. A process of another one cannot be looked up. Empty where /proc does not say.
fn namespace() -> String {
    fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned()).unwrap_or_default()
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
    fn a_rank_stops_to_wait_for_one_whose_process_has_ended() {
        let results = ranks("ended", 2, |exchange| {
            if exchange.rank == 1 {
                return (None, None);
            }
            let mut child = std::process::Command::new("true").spawn().unwrap();
            let ended = Process::of(child.id());
            child.wait().unwrap();
            let text = format!("{} {} {}", ended.pid, ended.started, namespace());
            // Rank 1 writes its own process when it starts, which may be after rank 0.
            while !exchange.path(&presence(1)).exists() {
                thread::sleep(PAUSE);
            }
            exchange.write(&presence(1), text.as_bytes()).unwrap();
            // A message that came before the end is read.
            exchange.write("1-0.1", b"last").unwrap();
            let last = exchange.receive(1);
            assert_eq!((exchange.receive(1), exchange.all_gather(&[1])), (None, None));
            (last, exchange.lost())
        });
        assert_eq!(results[0], (Some(b"last".to_vec()), Some(1)));
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
