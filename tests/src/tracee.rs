//! Threads of other processes, held still at a chosen instruction with `ptrace(2)`: what is tested is the shipped library in an
//! unchanged program, at a place that chance would hardly ever hit.
//!
//! A signal that is sent to a thread while it is held takes effect before its next instruction. All calls about one tracee
//! must come from the thread that seized it: that is `ptrace`'s rule.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A thread that this test holds, steps and lets go.
#[derive(Debug)]
pub struct Tracee {
    tid: i32,
    memory: File,
}

/// What a tracee did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It is about to get this signal.
    Signal(i32),
    /// It was interrupted, or is new.
    Held,
    /// It is about to enter a system call, or has returned from one.
    SystemCall,
    /// It has made this process.
    Forked(i32),
    /// It has made this thread.
    Cloned(i32),
    /// It is ending; all of its own code has run.
    Ending,
    /// It is gone, with this status.
    Ended(i32),
}

/// What a tracee's new threads and children do, and what is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Follow {
    /// The thread alone.
    Nothing,
    /// Threads it makes are held from their first instruction on.
    Threads,
    /// Children it makes are held from their first instruction on.
    Children,
}

impl Tracee {
    /// Takes hold of a running thread.
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

    /// A thread or child that was told of by [`Change::Cloned`] or [`Change::Forked`], once it is held.
    #[track_caller]
    pub fn newborn(tid: i32) -> Tracee {
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

    /// Holds a running tracee.
    #[track_caller]
    pub fn interrupt(&self) {
        request(libc::PTRACE_INTERRUPT, self.tid, 0, 0);
        assert_eq!(self.wait(), Change::Held);
    }

    /// Waits until it is held again, or gone.
    #[track_caller]
    pub fn wait(&self) -> Change {
        let mut status = 0;
        // SAFETY: a tracee of this thread, and a place for its status.
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

    /// Lets it run; gives what it does next.
    #[track_caller]
    pub fn go(&self) -> Change {
        self.resume();
        self.wait()
    }

    /// Lets it run.
    #[track_caller]
    pub fn resume(&self) {
        request(libc::PTRACE_CONT, self.tid, 0, 0);
    }

    /// Lets it run up to its next system call, or to the end of the one it is in.
    #[track_caller]
    pub fn to_system_call(&self) -> Change {
        request(libc::PTRACE_SYSCALL, self.tid, 0, 0);
        self.wait()
    }

    /// Lets it execute one instruction. False when it does not come to it: it has ended, or a signal waits.
    #[track_caller]
    pub fn step(&self) -> bool {
        request(libc::PTRACE_SINGLESTEP, self.tid, 0, 0);
        self.wait() == Change::Signal(libc::SIGTRAP)
    }

    /// Lets it run up to the instruction at this address, for the first time.
    #[track_caller]
    pub fn run_to(&self, address: u64) {
        const BREAKPOINT: [u8; 1] = [0xcc];
        let mut before = [0];
        self.memory.read_exact_at(&mut before, address).expect("code");
        self.memory.write_all_at(&BREAKPOINT, address).expect("code");
        let change = self.go();
        assert_eq!(change, Change::Signal(libc::SIGTRAP), "on the way to a mark");
        self.memory.write_all_at(&before, address).expect("code");
        assert_eq!(self.registers().rip, address + 1);
        self.jump(address);
    }

    /// Makes this address its next instruction.
    #[track_caller]
    pub fn jump(&self, address: u64) {
        let mut registers = self.registers();
        registers.rip = address;
        // A system call that was interrupted is not to be made again.
        registers.orig_rax = u64::MAX;
        request(libc::PTRACE_SETREGS, self.tid, 0, (&raw const registers).addr());
    }

    /// Its registers.
    pub fn registers(&self) -> libc::user_regs_struct {
        // SAFETY: plain numbers.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        request(libc::PTRACE_GETREGS, self.tid, 0, (&raw mut registers).addr());
        registers
    }

    /// A word of its memory.
    pub fn word(&self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, address).expect("mapped memory");
        u64::from_ne_bytes(bytes)
    }

    /// The mapped file or object that this address is in.
    pub fn object_at(&self, address: u64) -> String {
        self.mappings().find(|(range, _)| range.contains(&address)).map(|(_, name)| name).unwrap_or_default()
    }

    /// Where the first mapping begins whose name begins so.
    pub fn mapping(&self, name: &str) -> Option<u64> {
        self.mappings().find(|(_, n)| n.starts_with(name)).map(|(range, _)| range.start)
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

    /// Lets it go for good. Of one that was killed meanwhile its tracer must take notice, or its parent never hears of it.
    pub fn release(self) {}
}

impl Drop for Tracee {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: plain calls about a tracee of this thread, or about one that is gone, which is an error.
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
    // SAFETY: the callers pass what the request wants: flags, a signal, or the address of a local.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    assert_ne!(result, -1, "ptrace({request}, {tid}): {}", io::Error::last_os_error());
}
