//! Who gets an answer: clients that know a secret, and web pages that come from this machine.

use std::net::{Ipv4Addr, Ipv6Addr};

/// A secret that a client must know.
pub(crate) struct Token(String);

impl Token {
    /// This text as a token.
    pub(crate) fn new(text: String) -> Token {
        Token(text)
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// Whether a text is the token. The time that this takes does not depend on what they have in common.
    pub(crate) fn is(&self, text: &str) -> bool {
        let other = text.bytes().chain(std::iter::repeat(0));
        let differences = self.0.bytes().zip(other).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
        differences == 0 && self.0.len() == text.len()
    }

    /// Whether the value of an `Authorization` header has the token: `Bearer TOKEN`.
    pub(crate) fn is_in(&self, authorization: &str) -> bool {
        let parts = authorization.split_once(' ');
        parts.is_some_and(|(scheme, token)| scheme.eq_ignore_ascii_case("Bearer") && self.is(token.trim_start()))
    }
}

/// No message shows a token.
impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// The name or address of a host, without the port. `None` if the text is neither.
fn without_port(host: &str) -> Option<&str> {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if host.starts_with('[') {
        let (address, port) = host.split_at(host.find(']')? + 1);
        return (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(address);
    }
    match host.split_once(':') {
        Some((name, port)) => is_port(port).then_some(name),
        None => Some(host),
    }
}

/// Whether the host of a request is 127.0.0.1 or `localhost`. A page of another site can lead its own name to 127.0.0.1
/// (DNS rebinding), and its requests carry that name. The port does not matter: it can be forwarded (`ssh -L`).
pub(crate) fn is_loopback_name(host: &str) -> bool {
    without_port(host).is_some_and(|name| name == "127.0.0.1" || name.eq_ignore_ascii_case("localhost"))
}

/// Whether the host of a request can be a name that a stranger owns. `own` is the name of this machine.
///
/// Nobody can lead an address elsewhere, or the name of this machine, or a name without a domain, or one of a domain
/// that is reserved for private use (`host.docker.internal`).
pub(crate) fn may_be_foreign(host: &str, own: &str) -> bool {
    let Some(name) = without_port(host) else { return true };
    if let Some(address) = name.strip_prefix('[') {
        return address.strip_suffix(']').is_none_or(|address| address.parse::<Ipv6Addr>().is_err());
    }
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let is_private = [".localhost", ".internal"].iter().any(|domain| name.ends_with(domain));
    let is_ours = !name.contains('.') || name == own.to_ascii_lowercase() || is_private;
    !(is_name && is_ours || name.parse::<Ipv4Addr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_is_the_token() {
        let text = "0123456789abcdef";
        let token = Token::new(text.to_owned());
        assert!(token.is(text) && token.is_in(&format!("Bearer {text}")) && token.is_in(&format!("bEARER  {text}")));
        for other in ["", &text[1..], &text[..15], &format!("{text}0"), &format!("{text}\0"), "0123456789abcdeF"] {
            assert!(!token.is(other) && !token.is_in(&format!("Bearer {other}")), "{other}");
        }
        for other in [text, &format!("Basic {text}"), &format!("Bearer{text}"), "Bearer", ""] {
            assert!(!token.is_in(other), "{other}");
        }
        assert!(!format!("{token:?}").contains(text));
    }

    #[test]
    fn hosts_of_this_machine() {
        for host in ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LocalHost:65535"] {
            assert!(is_loopback_name(host) && !may_be_foreign(host, "gpu7"), "{host}");
        }
        for host in ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "localhost:"] {
            assert!(!is_loopback_name(host) && may_be_foreign(host, "gpu7"), "{host}");
        }
        for host in ["a:127.0.0.1", "[::1]:80", "localhost:1:2", "[127.0.0.1]"] {
            assert!(!is_loopback_name(host), "{host}");
        }
    }

    #[test]
    fn names_that_a_stranger_can_own() {
        let own = "gpu7.Cluster.example";
        for host in [
            "[::1]",
            "[::1]:9400",
            "10.0.0.7:9400",
            "0.0.0.0",
            "gpu7",
            "GPU7.cluster.example:9400",
            "gpu7.cluster.example.:9400",
            "host.docker.internal:9400",
            "memtrace.localhost",
        ] {
            assert!(!may_be_foreign(host, own), "{host}");
        }
        for host in [
            "gpu8.cluster.example",
            "cluster.example",
            "evil.gpu7.cluster.example",
            "gpu7.cluster.example.evil.example:9400",
            "internal.evil",
            "[::1",
            "[::1]x",
            "[evil.example]",
            "1.2.3.4.5",
            "a b",
            "ä",
            ":80",
            "..",
        ] {
            assert!(may_be_foreign(host, own), "{host}");
        }
    }
}
