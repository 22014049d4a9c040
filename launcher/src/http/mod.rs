//! The HTTP server of `memtrace run --metrics` and of `memtrace open --serve`.
//!
//! Any user of the machine can connect to it, so whatever a client sends, or does not send, costs little: one thread
//! serves all connections, of which there are few at a time ([`server`]). A request is its head, of bounded length
//! ([`request`]). A body is refused, each connection is for one request, and each step of it has a deadline
//! ([`connection`]). Nothing waits for a client, neither while the server runs nor when it ends.

mod access;
mod answer;
mod connection;
mod listener;
mod request;
mod server;
mod token_file;

pub(crate) use access::{Token, is_loopback_name, may_be_foreign};
pub(crate) use answer::{Answer, Body, Reply};
pub(crate) use listener::{Address, Listener};
pub(crate) use request::Request;
pub(crate) use server::{Server, Site};
