//! The bytes that any client may send to the servers of `--metrics` and `open --serve`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../launcher/src/http/access.rs"]
#[allow(dead_code, unused_imports, reason = "part of the launcher")]
mod access;
#[path = "../../../launcher/src/commands/serve/query.rs"]
#[allow(dead_code, unused_imports, reason = "part of the launcher")]
mod query;
#[path = "../../../launcher/src/http/request.rs"]
#[allow(dead_code, unused_imports, reason = "part of the launcher")]
mod request;

use access::{Token, is_loopback_name, may_be_foreign};
use request::{Content, Head, MAX_HEAD};

const TOKEN: &str = "0123456789abcdef";

fuzz_target!(|data: &[u8]| {
    let whole = Head::read(data);
    // A server reads a head in parts, and looks at each: it comes to the same result, and no later than at the end.
    let mut parts = (0..=data.len().min(MAX_HEAD)).step_by(1 + data.len() / 64).chain([data.len().min(MAX_HEAD)]);
    let early = parts.find_map(|end| Some(Head::read(&data[..end])).filter(|head| *head != Head::Incomplete));
    assert_eq!(early.unwrap_or(Head::Incomplete), whole);
    assert!(whole != Head::Incomplete || data.len() < MAX_HEAD, "a head has an end");
    let Head::Complete(request, content) = whole else { return };
    assert!(request.target.len() + request.hosts.iter().map(String::len).sum::<usize>() <= 3 * MAX_HEAD);
    if content == Content::None {
        // The head ends with its first empty line.
        let text = String::from_utf8_lossy(data).to_lowercase().replace('\r', "");
        let head = text.trim_start_matches('\n').split("\n\n").next().unwrap_or_default();
        assert!(!head.contains("\ntransfer-encoding:"), "a body is noticed");
    }
    let token = Token::new(TOKEN.to_owned());
    for host in &request.hosts {
        assert!(!is_loopback_name(host) || !may_be_foreign(host, "gpu7.example"));
        let name = host.split(':').next().unwrap_or_default();
        assert!(
            !name.ends_with(".example")
                || name.eq_ignore_ascii_case("gpu7.example")
                || may_be_foreign(host, "gpu7.example")
        );
    }
    if let Some(authorization) = &request.authorization {
        assert!(!token.is_in(authorization) || authorization.ends_with(TOKEN));
    }
    let (path, query) = request.path_and_query();
    assert!(request.target.starts_with(path));
    let _ = query::window(query);
    let is_token = path.split('/').nth(1).is_some_and(|part| token.is(part));
    assert!(!is_token || path.contains(TOKEN));
});
