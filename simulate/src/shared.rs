//! The memory that each process of a run uses on each device, in a file that all of them share.
//!
//! The file has one record a process. It is locked while a process reads and changes it. A process that ended, however
//! it ended, uses no memory: its record is ignored, and the next process takes its place. The file is opened for each
//! operation, because a lock belongs to an open file, which a forked child would share with its parent.

use crate::config::MAX_DEVICES;
use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The name of the file in the folder.
const FILE_NAME: &str = "usage";

/// A process, distinguished from later ones with the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// When it started, in clock ticks since the machine did. 0 where /proc does not say.
    pub(crate) started: u64,
}

impl Process {
    pub(crate) fn of(pid: u32) -> Self {
        Process { pid, started: started(pid).unwrap_or(0) }
    }

    pub(crate) fn is_alive(self) -> bool {
        started(self.pid) == Some(self.started)
    }
}

/// When a process started, in clock ticks. `None` if it has ended, also if its parent has not waited for it yet.
pub(crate) fn started(pid: u32) -> Option<u64> {
    // proc_pid_stat(5). The name of the program, in parentheses, can contain anything.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let (state, threads, started) = (fields.first()?, fields.get(17)?, fields.get(19)?);
    // The main thread can end before the others do.
    let has_ended = ["Z", "X"].contains(state) && *threads == "1";
    if has_ended { None } else { started.parse().ok() }
}

/// The memory that one process uses.
#[derive(Clone, Debug)]
struct Record {
    process: Process,
    /// Bytes, by the physical ordinal of the device.
    used: [u64; MAX_DEVICES],
}

impl Record {
    /// The size of a record in the file, in bytes: process id, start, and the use of each device, 8 bytes each.
    const BYTES: usize = 8 * (2 + MAX_DEVICES);

    fn encode(&self) -> Vec<u8> {
        let head = [u64::from(self.process.pid), self.process.started];
        head.iter().chain(&self.used).flat_map(|word| word.to_le_bytes()).collect()
    }

    fn decode(bytes: &[u8]) -> Self {
        let words =
            |from: usize| bytes.chunks_exact(8).skip(from).map(|b| b.iter().rfold(0, |n, b| n << 8 | u64::from(*b)));
        let mut head = words(0);
        let mut next = || head.next().unwrap_or(0);
        let process = Process { pid: next() as u32, started: next() };
        let mut used = [0; MAX_DEVICES];
        used.iter_mut().zip(words(2)).for_each(|(to, from)| *to = from);
        Record { process, used }
    }
}

/// The shared file, as one process uses it.
#[derive(Clone, Debug)]
pub struct SharedUsage {
    path: PathBuf,
    process: Process,
    /// The id of the process that determined `process`. It differs in a forked child.
    determined_by: u32,
}

impl SharedUsage {
    /// The use that processes share through a file in a folder. The file is created when it is first needed.
    pub fn new(folder: &Path) -> Self {
        Self::in_file(folder.join(FILE_NAME))
    }

    /// The use of another process, as this one changes it.
    pub fn of_process(folder: &Path, pid: u32) -> Self {
        let path = folder.join(FILE_NAME);
        SharedUsage { path, process: Process::of(pid), determined_by: std::process::id() }
    }

    fn in_file(path: PathBuf) -> Self {
        let pid = std::process::id();
        SharedUsage { path, process: Process::of(pid), determined_by: pid }
    }

    /// Removes all memory from the process. Returns the bytes that it used on each device.
    ///
    /// # Errors
    ///
    /// Those of the file.
    pub fn take_away(&mut self) -> io::Result<[u64; MAX_DEVICES]> {
        self.change(|records, own| std::mem::replace(&mut records[own].used, [0; MAX_DEVICES]))
    }

    /// Uses bytes of a device for this process, of which all processes together use `capacity` bytes at most.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] if less is left. The outer error is one of the file.
    pub fn take(&mut self, device: u32, bytes: u64, capacity: u64) -> io::Result<Result<()>> {
        let device = device as usize;
        self.change(|records, own| {
            let fits = |records: &[Record]| {
                let used: u64 = records.iter().map(|record| record.used[device]).sum();
                bytes <= capacity.saturating_sub(used)
            };
            if !fits(records) {
                forget_ended(records);
            }
            if !fits(records) {
                return Err(Error::OutOfMemory);
            }
            records[own].used[device] += bytes;
            Ok(())
        })
    }

    /// Returns bytes that this process took. A forked child cannot return what its parent took.
    ///
    /// # Errors
    ///
    /// Those of the file.
    pub fn give(&mut self, device: u32, bytes: u64) -> io::Result<()> {
        self.change(|records, own| {
            let used = &mut records[own].used[device as usize];
            *used = used.saturating_sub(bytes);
        })
    }

    /// The processes that use a device, and the bytes that each uses.
    ///
    /// # Errors
    ///
    /// Those of the file.
    pub fn of_device(&self, device: u32) -> io::Result<Vec<(u32, u64)>> {
        let (file, mut records) = self.lock()?;
        file.unlock()?;
        forget_ended(&mut records);
        let used = records.iter().map(|record| (record.process.pid, record.used[device as usize]));
        Ok(used.filter(|(_, bytes)| *bytes > 0).collect())
    }

    /// Opens and locks the file, and reads its records.
    fn lock(&self) -> io::Result<(File, Vec<Record>)> {
        let mut options = File::options();
        let mut file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
        file.lock()?;
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        Ok((file, content.chunks_exact(Record::BYTES).map(Record::decode).collect()))
    }

    /// Changes the record of this process. `change` gets all records, and the index of that of this process.
    fn change<T>(&mut self, change: impl FnOnce(&mut [Record], usize) -> T) -> io::Result<T> {
        if self.determined_by != std::process::id() {
            *self = SharedUsage::in_file(std::mem::take(&mut self.path));
        }
        let (file, mut records) = self.lock()?;
        let own = match records.iter().position(|record| record.process == self.process) {
            Some(own) => own,
            None => self.join(&mut records),
        };
        let result = change(&mut records, own);
        file.write_all_at(&records[own].encode(), (own * Record::BYTES) as u64)?;
        file.unlock()?;
        Ok(result)
    }

    /// Adds a record for this process, in the place of one of a process that has ended if there is one. Returns its
    /// index.
    fn join(&self, records: &mut Vec<Record>) -> usize {
        let own = Record { process: self.process, used: [0; MAX_DEVICES] };
        match records.iter().position(|record| !record.process.is_alive()) {
            Some(index) => {
                records[index] = own;
                index
            }
            None => {
                records.push(own);
                records.len() - 1
            }
        }
    }
}

/// Sets the use of processes that have ended to nothing.
fn forget_ended(records: &mut [Record]) {
    for record in records.iter_mut().filter(|record| !record.process.is_alive()) {
        record.used = [0; MAX_DEVICES];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// A process that sleeps, and its use of the devices.
    struct Other {
        child: Child,
        usage: SharedUsage,
    }

    impl Other {
        fn new(this: &SharedUsage) -> Self {
            let child = Command::new("sleep").arg("60").spawn().unwrap();
            let usage = SharedUsage { process: Process::of(child.id()), ..this.clone() };
            Other { child, usage }
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }

    /// The use of this process, through a file that does not exist yet.
    fn usage(name: &str) -> SharedUsage {
        let path = std::env::temp_dir().join(format!("simcuda-{name}-{}", std::process::id()));
        fs::remove_file(&path).ok();
        SharedUsage::in_file(path)
    }

    #[test]
    fn processes_share_the_capacity_of_each_device() {
        let mut this = usage("capacity");
        let mut other = Other::new(&this);
        assert_eq!(this.take(1, 60, 100).unwrap(), Ok(()));
        assert_eq!(other.usage.take(1, 41, 100).unwrap(), Err(Error::OutOfMemory));
        assert_eq!(other.usage.take(1, 40, 100).unwrap(), Ok(()));
        assert_eq!(other.usage.take(0, 100, 100).unwrap(), Ok(()), "another device");
        assert_eq!(this.of_device(1).unwrap(), [(std::process::id(), 60), (other.child.id(), 40)]);
        this.give(1, 60).unwrap();
        assert_eq!(other.usage.of_device(1).unwrap(), [(other.child.id(), 40)]);
        fs::remove_file(&this.path).unwrap();
    }

    #[test]
    fn a_killed_process_gives_its_memory_back() {
        let mut this = usage("killed");
        let mut other = Other::new(&this);
        assert_eq!(other.usage.take(0, 100, 100).unwrap(), Ok(()));
        assert_eq!(this.take(0, 1, 100).unwrap(), Err(Error::OutOfMemory));
        other.child.kill().unwrap();
        // Its parent has not waited for it yet.
        while other.usage.process.is_alive() {
            std::thread::yield_now();
        }
        assert_eq!(this.of_device(0).unwrap(), []);
        assert_eq!(this.take(0, 100, 100).unwrap(), Ok(()));
        let third = Other::new(&this);
        assert_eq!(third.usage.clone().take(1, 7, 100).unwrap(), Ok(()));
        assert_eq!(fs::metadata(&this.path).unwrap().len(), 2 * Record::BYTES as u64, "the record is used again");
        fs::remove_file(&this.path).unwrap();
    }

    #[test]
    fn an_earlier_process_with_the_same_id_uses_nothing() {
        let mut this = usage("earlier");
        let earlier = Process { started: this.process.started - 1, ..this.process };
        let mut earlier = SharedUsage { process: earlier, ..this.clone() };
        assert_eq!(earlier.take(0, 100, 100).unwrap(), Ok(()));
        assert_eq!(this.take(0, 100, 100).unwrap(), Ok(()));
        fs::remove_file(&this.path).unwrap();
    }
}
