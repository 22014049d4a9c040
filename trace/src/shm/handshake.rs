//! How a process gets its segment at its first event.
//!
//! The launcher listens on an abstract Unix socket whose name contains the session's token. The process connects
//! and sends [`Hello`]. It receives one byte with the segment's descriptor, then one with that of the run's lock, which
//! is missing if there is none. Then both close the connection. No descriptor stays open in the traced process.
//!
//! Both ask the kernel for the other's user id and do not trust a message. The socket's name is no secret, and any
//! process may bind it once the launcher has ended.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::layout::BUILD;

/// The first message of the process. It has a fixed size and native byte order, because both ends are on one machine
/// and from one build.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// [`BUILD`].
    pub build: u64,
    /// How many requests this process and its ancestors have made before (0 for the first).
    pub generation: u32,
    /// Reserved, zero.
    pub reserved: u32,
}

impl Hello {
    /// The message of a process of this build.
    pub const fn new(generation: u32) -> Hello {
        Hello { build: BUILD, generation, reserved: 0 }
    }

    /// The message's bytes.
    pub fn to_bytes(self) -> [u8; size_of::<Hello>()] {
        let mut bytes = [0; size_of::<Hello>()];
        let (build, rest) = bytes.split_at_mut(8);
        build.copy_from_slice(&self.build.to_ne_bytes());
        let (generation, _) = rest.split_at_mut(4);
        generation.copy_from_slice(&self.generation.to_ne_bytes());
        bytes
    }

    /// Decodes a message. `None` if it is from another build.
    pub fn from_bytes(bytes: &[u8; size_of::<Hello>()]) -> Option<Hello> {
        let (build, rest) = bytes.split_at(8);
        let build = u64::from_ne_bytes(build.try_into().ok()?);
        let generation = u32::from_ne_bytes(rest.split_at(4).0.try_into().ok()?);
        (build == BUILD).then_some(Hello { build, generation, reserved: 0 })
    }
}

/// The abstract address of a session's socket and its length. The error is `InvalidInput` for a token that is too long.
pub fn address(token: &str) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: `sockaddr_un` is plain data, for which zeros are valid.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let name = b"memtrace-".iter().chain(token.as_bytes());
    let mut len = 1; // The leading NUL makes the address abstract.
    for byte in name {
        let Some(place) = address.sun_path.get_mut(len) else { return Err(io::ErrorKind::InvalidInput.into()) };
        *place = *byte as libc::c_char;
        len += 1;
    }
    Ok((address, (std::mem::offset_of!(libc::sockaddr_un, sun_path) + len) as libc::socklen_t))
}

/// The credentials of the other end, from the kernel: of the connecting process on the launcher's side, of the
/// listening process on the other side.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the socket is open, and `len` is the size of `cred`.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut cred).cast(), &mut len)
    };
    match result {
        0 if len as usize == size_of::<libc::ucred>() => Ok(cred),
        0 => Err(io::ErrorKind::InvalidData.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the listening process belongs to this process's user or to root. Recordings are only for these users, and
/// only their memory is mapped.
pub fn is_trusted(socket: BorrowedFd<'_>) -> bool {
    // SAFETY: `geteuid` takes no arguments and cannot fail.
    let ours = unsafe { libc::geteuid() };
    peer_credentials(socket).is_ok_and(|peer| peer.uid == ours || peer.uid == 0)
}

/// A control message buffer for exactly one descriptor.
#[repr(C, align(8))]
struct Control([u8; 32]);

/// Sends one byte with `fd` attached.
pub fn send_fd(socket: BorrowedFd<'_>, fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut byte = 1u8;
    let mut io = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = Control([0; 32]);
    // SAFETY: the message points to live locals. The `CMSG_*` macros stay inside `control`, which has space for one
    // descriptor.
    let sent = unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &mut io;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as _;
        let head = libc::CMSG_FIRSTHDR(&message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_RIGHTS;
        (*head).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        libc::CMSG_DATA(head).cast::<RawFd>().write_unaligned(fd.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL)
    };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives the byte and the descriptor of [`send_fd`]. The error is `InvalidData` for any other message.
pub fn recv_fd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut byte = 0u8;
    let mut io = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = Control([0; 32]);
    // SAFETY: the message points to live locals. The `CMSG_*` macros stay inside `control`, which has space for one
    // descriptor. The received descriptor is new and belongs to this process.
    unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &mut io;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        // There is space for exactly one descriptor, so the kernel drops any others.
        message.msg_controllen = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        let received = libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC);
        if received < 0 {
            return Err(io::Error::last_os_error());
        }
        let head = libc::CMSG_FIRSTHDR(&message);
        if received != 1
            || head.is_null()
            || (*head).cmsg_level != libc::SOL_SOCKET
            || (*head).cmsg_type != libc::SCM_RIGHTS
            || (*head).cmsg_len as usize != libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize
        {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(OwnedFd::from_raw_fd(libc::CMSG_DATA(head).cast::<RawFd>().read_unaligned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_descriptor_is_sent_and_received() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        send_fd(a.as_fd(), file.as_fd()).unwrap();
        let got = recv_fd(b.as_fd()).unwrap();
        assert_eq!(
            std::fs::read_link(format!("/proc/self/fd/{}", got.as_raw_fd())).unwrap().to_str(),
            Some("/dev/null")
        );
    }

    #[test]
    fn this_process_trusts_itself() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert_eq!(peer_credentials(a.as_fd()).unwrap().pid as u32, std::process::id());
        assert!(is_trusted(a.as_fd()));
    }

    #[test]
    fn a_closed_peer_is_an_error() {
        let (a, b) = UnixStream::pair().unwrap();
        drop(a);
        assert!(recv_fd(b.as_fd()).is_err());
    }

    #[test]
    fn a_hello_of_another_build_is_rejected() {
        let hello = Hello::new(3);
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
        let mut other = hello.to_bytes();
        other[0] ^= 1;
        assert_eq!(Hello::from_bytes(&other), None);
    }
}
