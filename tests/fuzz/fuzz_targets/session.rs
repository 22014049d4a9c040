//! The connection setup between launcher and traced process: the session variable, the address made from it, the first
//! message.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_trace::definition::Definition;
use memtrace_trace::options::Options;
use memtrace_trace::shm::handshake::{Hello, address};
use memtrace_trace::wire::Cursor;

fuzz_target!(|data: &[u8]| {
    if let Some(first) = data.first_chunk()
        && let Some(hello) = Hello::from_bytes(first)
    {
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Some(options) = Options::parse(text)
    {
        assert_eq!(Options::parse(&options.encode()), Some(options.clone()));
        assert!(address(&options.token).is_ok(), "every token that is taken has an address");
    }
    // Encoding a decoded definition must give the same definition again.
    let mut cursor = Cursor::new(data);
    while let Ok(definition) = Definition::decode(&mut cursor) {
        if let Some(definition) = definition {
            let mut bytes = Vec::new();
            definition.encode(&mut bytes);
            assert_eq!(Definition::decode(&mut Cursor::new(&bytes)).expect("our own bytes"), Some(definition));
        }
    }
});
