//! A client of an HTTP server that misbehaves, as any user of the machine can.
//!
//! The first argument is the server's address. The others are words that are executed in order:
//! - `idle=N` opens N connections that never send anything
//! - `slow=N` N connections that send a head without an end, a byte at a time; each is opened again when it is closed
//! - `body=N` N connections whose body never ends, a byte at a time; each is opened again when it is closed
//! - `deaf=N` N connections that send a request and read nothing
//! - `line=MIB` `header=MIB` `headers=MIB` `bytes=MIB` sends a request line, a header, headers or zeros of so many MiB,
//!   on as many connections as it takes
//! - `requests=N` sends N requests at once on one connection, and prints the number of answers
//! - `flood=N` connects and disconnects N times
//! - `say=TEXT` prints a line, and `wait` waits for one on stdin
//!
//! Connections stay open until the program ends.

use std::io::{BufRead, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";

fn connect(address: &str) -> TcpStream {
    loop {
        // A server that is flooded refuses some.
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Sends a beginning and then a byte at a time, for ever.
fn trickle(address: String, start: &'static str, rest: &'static str) {
    std::thread::spawn(move || {
        loop {
            let mut stream = connect(&address);
            let bytes = start.bytes().chain(rest.bytes().cycle());
            for byte in bytes {
                if stream.write_all(&[byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    });
}

/// Sends so many bytes: a beginning, and then the rest again and again.
fn pour(address: &str, start: &str, rest: &str, mut bytes: usize) {
    let chunk = rest.repeat((1 << 16) / rest.len());
    while bytes > 0 {
        let mut stream = connect(address);
        let _ = stream.write_all(start.as_bytes());
        while bytes > 0 {
            bytes = bytes.saturating_sub(chunk.len());
            if stream.write_all(chunk.as_bytes()).is_err() {
                break;
            }
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().expect("an address");
    let mut kept = Vec::new();
    for word in arguments {
        let (name, value) = word.split_once('=').unwrap_or((&word, ""));
        let count = value.parse().unwrap_or(0);
        match name {
            "idle" => kept.extend((0..count).map(|_| connect(&address))),
            "slow" => (0..count).for_each(|_| trickle(address.clone(), "GET /metrics HTTP/1.1\r\n", "A: b\r\n")),
            "body" => {
                let head = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000000\r\n\r\n";
                (0..count).for_each(|_| trickle(address.clone(), head, "a"));
            }
            "deaf" => kept.extend((0..count).map(|_| {
                let mut stream = connect(&address);
                let _ = stream.write_all(REQUEST);
                stream
            })),
            "line" => pour(&address, "GET /", "a", count << 20),
            "header" => pour(&address, "GET / HTTP/1.1\r\nA: ", "b", count << 20),
            "headers" => pour(&address, "GET / HTTP/1.1\r\n", "A: b\r\n", count << 20),
            "bytes" => pour(&address, "", "\0", count << 20),
            "requests" => {
                let mut stream = connect(&address);
                let mut sender = stream.try_clone().expect("a descriptor");
                let send = std::thread::spawn(move || _ = (0..count).try_for_each(|_| sender.write_all(REQUEST)));
                // The connection can be reset, with what was sent on it.
                let (mut answer, mut chunk) = (Vec::new(), [0; 1 << 16]);
                while let Ok(read @ 1..) = stream.read(&mut chunk) {
                    answer.extend_from_slice(&chunk[..read]);
                }
                send.join().expect("a thread that ends");
                println!("{}", answer.windows(9).filter(|bytes| bytes == b"HTTP/1.1 ").count());
            }
            "flood" => (0..count).for_each(|_| drop(connect(&address))),
            "say" => println!("{value}"),
            "wait" => _ = std::io::stdin().lock().read_line(&mut String::new()),
            _ => panic!("unknown word {word}"),
        }
    }
}
