//! Reading is bounded: malicious files of a few kilobytes or megabytes take no more memory and work than their size
//! allows. The tests measure allocated bytes, which are the same on an idle and on a busy machine.

mod folders;
mod measured;
mod objects;
mod snapshots;
mod traces;
