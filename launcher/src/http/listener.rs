//! The socket on which the server listens.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{geteuid, umask};

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    /// The path of a Unix socket, which only this user and root can connect to.
    Unix(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A listening socket. It does not block.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixSocket),
}

impl Listener {
    /// Listens on this address. Port 0 takes a free port. This process must have no other threads.
    pub(crate) fn bind(address: &Address) -> io::Result<Listener> {
        match address {
            Address::Tcp(address) => Listener::of(TcpListener::bind(address)?),
            Address::Unix(path) => UnixSocket::bind(path).map(Listener::Unix),
        }
    }

    /// A listening socket of TCP.
    pub(crate) fn of(listener: TcpListener) -> io::Result<Listener> {
        listener.set_nonblocking(true)?;
        Ok(Listener::Tcp(listener))
    }

    /// The address, with the port that was taken.
    pub(crate) fn address(&self) -> io::Result<Address> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Address::Tcp),
            Listener::Unix(socket) => Ok(Address::Unix(socket.path.clone())),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(socket) => socket.listener.as_fd(),
        }
    }
}

/// A Unix socket in the file system, with mode 0600. It is removed with this value.
#[derive(Debug)]
pub(crate) struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    id: FileId,
}

/// The device and the inode.
type FileId = (u64, u64);

/// The file itself, not what a link leads to.
fn id(path: &Path) -> io::Result<FileId> {
    std::fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

impl UnixSocket {
    fn bind(path: &Path) -> io::Result<UnixSocket> {
        // The working directory can be another one at the end.
        let path = std::path::absolute(path)?;
        let listener = match bind_private(&path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(&path)?;
                bind_private(&path)
            }
            bound => bound,
        }?;
        let id = id(&path)?;
        let socket = UnixSocket { listener, path, id };
        socket.listener.set_nonblocking(true)?;
        Ok(socket)
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        // Another program may have replaced it.
        if id(&self.path).is_ok_and(|id| id == self.id) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Creates a socket with mode 0600. It never has another one, so nobody else can connect before. The kernel creates the
/// file as `mknod` does: it follows no link in the last place.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let old = umask(Mode::XUSR | Mode::RWXG | Mode::RWXO);
    let bound = UnixListener::bind(path);
    umask(old);
    bound
}

/// Removes a socket of this user on which nobody listens: its launcher was killed.
fn remove_stale(path: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(path)?;
    if !found.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another file has this path"));
    }
    if found.uid() != geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "a socket of another user has this path"));
    }
    match connect_at_once(path) {
        Err(Errno::CONNREFUSED) => {}
        _ => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another program listens there")),
    }
    if id(path)? != (found.dev(), found.ino()) {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another program uses this path"));
    }
    std::fs::remove_file(path)
}

/// Connects without waiting for a listener that accepts nothing.
fn connect_at_once(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_unix_socket_is_private_and_ends_with_its_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        for mask in [0, 0o777, 0o077, 0o022] {
            let old = umask(Mode::from_raw_mode(mask));
            let listener = Listener::bind(&Address::Unix(path.clone()));
            assert_eq!(umask(old).as_raw_mode(), mask, "the umask stays");
            let listener = listener.unwrap();
            let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o600, "umask {mask:03o}");
            assert_eq!(listener.address().unwrap(), Address::Unix(path.clone()));
            drop(listener);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_socket_whose_listener_was_killed_is_replaced_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.sock");
        let address = Address::Unix(path.clone());
        let error = || Listener::bind(&address).unwrap_err().to_string();
        drop(UnixListener::bind(&path).unwrap());
        let first = Listener::bind(&address).expect("the socket of a listener that has ended");
        assert_eq!(error(), "another program listens there");
        // The path can lead to another socket meanwhile, which stays.
        std::fs::remove_file(&path).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "kept").unwrap();
        assert_eq!(error(), "another file has this path");
        let link = folder.path().join("link");
        for target in [&path, &folder.path().join("nowhere")] {
            std::os::unix::fs::symlink(target, &link).unwrap();
            let error = Listener::bind(&Address::Unix(link.clone())).unwrap_err().to_string();
            assert_eq!(error, "another file has this path");
            std::fs::remove_file(&link).unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"kept");
        assert!(!folder.path().join("nowhere").exists());
    }
}
