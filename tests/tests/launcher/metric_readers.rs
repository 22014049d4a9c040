//! Who can read the metrics of `--metrics`: addresses, a Unix socket, a token.

use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::http::exchange;
use crate::launcher_support::*;
use crate::metrics::Served;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// The user id of `nobody`.
const ANOTHER_USER: u32 = 65_534;

fn write_private(path: &Path, content: &str) {
    std::fs::write(path, content).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

#[test]
fn a_token_file_keeps_the_metrics_from_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    write_private(&file, &format!("{TOKEN}\n"));
    let mut served =
        Served::producer(&[&"--metrics", &"127.0.0.1:0", &"--metrics-token-file", &file], &["say=ready", "wait"]);
    assert_eq!(served.launcher.line(), "ready");
    let status = |request: &str| exchange(served.address(), request).expect("an answer").status;
    let with = |head: &str, authorization: &str| {
        status(&format!("{head} HTTP/1.1\r\nHost: gpu7.example\r\nAuthorization: {authorization}\r\n\r\n"))
    };
    let right = format!("Bearer {TOKEN}");
    assert_eq!(with("GET /metrics", &right), 200, "the host does not matter then");
    assert_eq!((with("GET /", &right), with("POST /metrics", &right)), (404, 405));
    assert_eq!(with("GET /metrics", &format!("{right}\r\nContent-Length: 1")), 413);
    for wrong in ["", "Bearer", TOKEN, &format!("Basic {TOKEN}"), &right[..right.len() - 1], &format!("{right}0")] {
        assert_eq!(with("GET /metrics", wrong), 401, "{wrong}");
    }
    // The token comes first: nothing else is said to those who lack it.
    for head in ["GET /metrics", "GET /", "POST /metrics", "GET /metrics?x"] {
        assert_eq!(status(&format!("{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")), 401, "{head}");
    }
    let refused = exchange(served.address(), "GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    assert!(refused.head.contains("\r\nWWW-Authenticate: Bearer\r\n") && !refused.body.contains(TOKEN));
    served.say("");
    assert!(!served.end().iter().any(|line| line.contains(TOKEN)));
}

#[test]
fn a_token_file_that_others_can_read_is_an_error_before_the_command_starts() {
    let folder = tempfile::tempdir().unwrap();
    let (file, run) = (folder.path().join("token"), folder.path().join("run"));
    let error = |options: &[&str]| {
        let mut command = Command::new(memtrace());
        command.args(options).arg("--metrics-token-file").arg(&file).arg("-o").arg(&run);
        let output = output(command.args(["--", "echo", "started"]));
        assert!(output.stdout.is_empty() && !run.exists());
        (output.status.code().unwrap(), stderr(&output))
    };
    let metrics = ["--metrics", "127.0.0.1:0"];
    let (code, text) = error(&metrics);
    assert!(code == 125 && text.contains("error: cannot read the token in "), "{text}");
    write_private(&file, TOKEN);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let (code, text) = error(&metrics);
    assert!(code == 125 && text.contains("other users can access") && text.contains("help: chmod 600 "), "{text}");
    write_private(&file, "short");
    let (code, text) = error(&metrics);
    assert!(code == 125 && text.contains("has no token: 16 to 1024 characters"), "{text}");
    let (code, text) = error(&[]);
    assert!(code == 125 && text.contains("--metrics <ADDR>"), "{text}");
}

#[test]
fn a_unix_socket_is_for_its_user_only() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let socket = folder.path().join("metrics.sock");
    let address = format!("unix:{}", socket.display());
    // It is private whatever the umask, and the command has the umask of its caller.
    for umask in ["000", "077", "777"] {
        let script = "umask $0; exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", script, umask]).arg(memtrace()).args(["--metrics", &address, "--no-snapshot", "-o"]);
        // A run folder that its own user cannot enter is no run folder.
        command.arg(folder.path().join(umask)).args(["--", "sh", "-c", "umask; read line"]);
        let mut served = Served::of(command, String::new(), tempfile::tempdir().unwrap());
        assert_eq!(served.launcher.line(), format!("0{umask}"));
        assert_eq!(served.url, address);
        let metadata = std::fs::symlink_metadata(&socket).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o600, "umask {umask}");
        let answer = exchange(&address, "GET /metrics HTTP/1.1\r\nHost: anything.example\r\n\r\n").unwrap();
        assert!(answer.status == 200 && answer.body.contains("\nmemtrace_processes 0\n"), "{}", answer.body);
        // SAFETY: `geteuid` has no arguments and always succeeds.
        if unsafe { libc::geteuid() } == 0 {
            // A connection needs the permission to write.
            let mut other = Command::new("test");
            other.arg("-w").arg(&socket).uid(ANOTHER_USER).gid(ANOTHER_USER).current_dir("/");
            assert_eq!(output(&mut other).status.code(), Some(1));
        }
        served.say("");
        served.end();
        assert!(!socket.exists(), "it is removed");
    }
}

#[test]
fn a_unix_socket_of_a_killed_launcher_is_replaced_and_other_files_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("metrics.sock");
    let address = format!("unix:{}", socket.display());
    let start = || Served::producer(&[&"--metrics", &address], &["say=ready", "wait"]);
    let mut killed = start();
    assert_eq!(killed.launcher.line(), "ready");
    let error = || {
        let mut command = Command::new(memtrace());
        command.args(["--metrics", &address, "-o"]).arg(folder.path().join("run")).args(["--", "echo", "started"]);
        let output = output(&mut command);
        assert!(output.status.code() == Some(125) && output.stdout.is_empty());
        stderr(&output)
    };
    let text = error();
    assert!(text.contains("cannot serve metrics on unix:") && text.contains("another program listens there"), "{text}");
    killed.launcher.signal(libc::SIGKILL);
    killed.launcher.child.wait().unwrap();
    assert!(socket.exists());
    let mut served = start();
    assert_eq!(served.launcher.line(), "ready");
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(b"HEAD /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
    served.say("");
    served.end();
    for target in ["nowhere", "file"] {
        write_private(&folder.path().join("file"), "kept");
        std::os::unix::fs::symlink(folder.path().join(target), &socket).unwrap();
        let text = error();
        assert!(text.contains("another file has this path"), "{text}");
        std::fs::remove_file(&socket).unwrap();
    }
    assert!(!folder.path().join("nowhere").exists());
    assert_eq!(std::fs::read_to_string(folder.path().join("file")).unwrap(), "kept");
}

#[test]
fn a_page_of_another_site_reads_no_metrics_on_a_loopback_address() {
    let mut served = Served::producer(&[&"--metrics", &"127.0.0.1:0"], &["say=ready", "wait"]);
    assert_eq!(served.launcher.line(), "ready");
    let status = |hosts: &str| exchange(served.address(), &format!("GET /metrics HTTP/1.1\r\n{hosts}\r\n"));
    let port = served.address().rsplit(':').next().unwrap();
    // As Prometheus names its target, whatever leads to this machine.
    for good in
        ["", "Host: 127.0.0.1\r\n", "Host: LOCALHOST\r\n", "Host: host.docker.internal:9\r\n", "Host: [::1]\r\n"]
    {
        assert_eq!(status(good).unwrap().status, 200, "{good}");
    }
    assert_eq!(status(&format!("Host: 127.0.0.1:{port}\r\n")).unwrap().status, 200);
    for bad in
        ["evil.example", &format!("evil.example:{port}"), "127.0.0.1.evil.example", "localhost\r\nHost: e.example"]
    {
        let answer = status(&format!("Host: {bad}\r\n")).unwrap();
        assert_eq!(answer.status, 403, "{bad}");
        assert!(!answer.body.contains("memtrace_"), "{}", answer.body);
    }
    served.say("");
    served.end();
    let mut served = Served::producer(&[&"--metrics", &"0.0.0.0:0"], &["say=ready", "wait"]);
    assert_eq!(served.launcher.line(), "ready");
    let address = served.address().replace("0.0.0.0", "127.0.0.1");
    let answer = exchange(&address, "GET /metrics HTTP/1.1\r\nHost: gpu7.cluster.example\r\n\r\n").unwrap();
    assert_eq!(answer.status, 200, "the address is for the network, with any name");
    served.say("");
    served.end();
}
