//! Stops threads of other processes at a chosen instruction with `ptrace(2)`.
//!
//! So the tests reach places of the shipped library, in an unchanged program, that random timing would hardly ever
//! reach.
//!
//! A signal sent to a stopped thread takes effect before its next instruction. All calls about one tracee must come
//! from the thread that seized it: `ptrace` requires this.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A thread of another process that this test stops, steps and continues.
#[derive(Debug)]
pub struct Tracee {
    tid: i32,
    memory: File,
}

/// The event at which a tracee stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It is about to receive this signal.
    Signal(i32),
    /// It was interrupted, or is newly created.
    Held,
    /// It is about to enter a system call, or has returned from one.
    SystemCall,
    /// It forked this process.
    Forked(i32),
    /// It created this thread.
    Cloned(i32),
    /// It is ending; all of its own code has run.
    Ending,
    /// It is gone, with this wait status.
    Ended(i32),
}

/// Which new threads and children of a tracee ptrace attaches to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Follow {
    /// Only the thread itself.
    Nothing,
    /// Also the threads that it creates, stopped before their first instruction.
    Threads,
    /// Also the children that it forks, stopped before their first instruction.
    Children,
}

impl Tracee {
    /// Attaches to a running thread and stops it.
    #[track_caller]
    pub fn seize(tid: i32, follow: Follow) -> Tracee {
        let follow = match follow {
            Follow::Nothing => 0,
            Follow::Threads => libc::PTRACE_O_TRACECLONE,
            Follow::Children => libc::PTRACE_O_TRACEFORK,
        };
        let options = follow | libc::PTRACE_O_TRACEEXIT | libc::PTRACE_O_TRACESYSGOOD;
        request(libc::PTRACE_SEIZE, tid, 0, options as usize);
        let tracee = Tracee::of(tid);
        tracee.interrupt();
        tracee
    }

    /// A new thread or child reported by [`Change::Cloned`] or [`Change::Forked`]. Waits until it is stopped.
    #[track_caller]
    pub fn new_child(tid: i32) -> Tracee {
        let tracee = Tracee::of(tid);
        assert_eq!(tracee.wait(), Change::Held);
        tracee
    }

    fn of(tid: i32) -> Tracee {
        let memory = File::options().read(true).write(true).open(format!("/proc/{tid}/mem")).expect("its memory");
        Tracee { tid, memory }
    }

    /// The thread's id.
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// Stops a running tracee.
    #[track_caller]
    pub fn interrupt(&self) {
        request(libc::PTRACE_INTERRUPT, self.tid, 0, 0);
        assert_eq!(self.wait(), Change::Held);
    }

    /// Waits until the tracee stops or is gone.
    #[track_caller]
    pub fn wait(&self) -> Change {
        let mut status = 0;
        // SAFETY: `status` is a live, writable `c_int` for the duration of the call.
        let waited = unsafe { libc::waitpid(self.tid, &mut status, libc::__WALL) };
        assert_eq!(waited, self.tid, "{}", io::Error::last_os_error());
        if !libc::WIFSTOPPED(status) {
            return Change::Ended(status);
        }
        match (status >> 16, libc::WSTOPSIG(status)) {
            (libc::PTRACE_EVENT_STOP, _) => Change::Held,
            (libc::PTRACE_EVENT_FORK, _) => Change::Forked(self.message()),
            (libc::PTRACE_EVENT_CLONE, _) => Change::Cloned(self.message()),
            (libc::PTRACE_EVENT_EXIT, _) => Change::Ending,
            (0, signal) if signal == libc::SIGTRAP | 0x80 => Change::SystemCall,
            (0, signal) => Change::Signal(signal),
            (event, signal) => panic!("event {event}, signal {signal}"),
        }
    }

    fn message(&self) -> i32 {
        let mut message: libc::c_ulong = 0;
        request(libc::PTRACE_GETEVENTMSG, self.tid, 0, (&raw mut message).addr());
        message as i32
    }

    /// Continues the tracee and waits for its next change.
    #[track_caller]
    pub fn resume_and_wait(&self) -> Change {
        self.resume();
        self.wait()
    }

    /// Continues the tracee.
    #[track_caller]
    pub fn resume(&self) {
        request(libc::PTRACE_CONT, self.tid, 0, 0);
    }

    /// Continues the tracee up to its next system call, or to the end of the current one.
    #[track_caller]
    pub fn to_system_call(&self) -> Change {
        request(libc::PTRACE_SYSCALL, self.tid, 0, 0);
        self.wait()
    }

    /// Runs one instruction. Returns false when the tracee ended or received a signal instead.
    #[track_caller]
    pub fn step(&self) -> bool {
        request(libc::PTRACE_SINGLESTEP, self.tid, 0, 0);
        self.wait() == Change::Signal(libc::SIGTRAP)
    }

    /// Continues the tracee until it reaches the instruction at this address for the first time.
    #[track_caller]
    pub fn run_to(&self, address: u64) {
        const BREAKPOINT: [u8; 1] = [0xcc];
        let mut before = [0];
        self.memory.read_exact_at(&mut before, address).expect("code");
        self.memory.write_all_at(&BREAKPOINT, address).expect("code");
        let change = self.resume_and_wait();
        assert_eq!(change, Change::Signal(libc::SIGTRAP), "on the way to a mark");
        self.memory.write_all_at(&before, address).expect("code");
        assert_eq!(self.registers().rip, address + 1);
        self.jump(address);
    }

    /// Sets the address of the tracee's next instruction.
    #[track_caller]
    pub fn jump(&self, address: u64) {
        let mut registers = self.registers();
        registers.rip = address;
        // Prevents the kernel from restarting an interrupted system call.
        registers.orig_rax = u64::MAX;
        request(libc::PTRACE_SETREGS, self.tid, 0, (&raw const registers).addr());
    }

    /// The tracee's registers.
    pub fn registers(&self) -> libc::user_regs_struct {
        // SAFETY: `user_regs_struct` is a C struct of integers, for which all-zero bytes are a valid value.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        request(libc::PTRACE_GETREGS, self.tid, 0, (&raw mut registers).addr());
        registers
    }

    /// The 8-byte word at this address of the tracee's memory.
    pub fn word(&self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, address).expect("mapped memory");
        u64::from_ne_bytes(bytes)
    }

    /// The name of the mapped file or object that contains this address; empty without one.
    pub fn object_at(&self, address: u64) -> String {
        self.mappings().find(|(range, _)| range.contains(&address)).map(|(_, name)| name).unwrap_or_default()
    }

    /// The start of the first mapping with this name, or `None`.
    pub fn mapping(&self, name: &str) -> Option<u64> {
        self.mappings().find(|(_, n)| n == name).map(|(range, _)| range.start)
    }

    fn mappings(&self) -> impl Iterator<Item = (std::ops::Range<u64>, String)> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.tid)).expect("its mappings");
        let parse = |line: &str| {
            let mut words = line.split_whitespace();
            let (start, end) = words.next()?.split_once('-')?;
            let name = words.nth(4).unwrap_or_default().to_owned();
            Some((u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?, name))
        };
        maps.lines().filter_map(parse).collect::<Vec<_>>().into_iter()
    }

    /// Detaches from the tracee. If it was killed meanwhile, the drop collects its status; otherwise its parent would
    /// never see its end.
    pub fn release(self) {}
}

impl Drop for Tracee {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: `status` is a live, writable `c_int`. `PTRACE_DETACH` passes no pointer, and fails for a process that
        // is gone.
        unsafe {
            while libc::ptrace(libc::PTRACE_DETACH, self.tid, 0usize, 0usize) == -1
                && libc::waitpid(self.tid, &mut status, libc::__WALL) == self.tid
                && libc::WIFSTOPPED(status)
            {}
        }
    }
}

#[track_caller]
fn request(request: libc::c_uint, tid: i32, address: usize, data: usize) {
    // SAFETY: every caller passes the data that `request` defines: flags, a signal, or the address of a live local of
    // its type.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    assert_ne!(result, -1, "ptrace({request}, {tid}): {}", io::Error::last_os_error());
}
