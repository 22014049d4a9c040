//! Who may read what the server has: those who know the token in the URL.

use rustix::rand::{GetRandomFlags, getrandom};

/// The bytes of a token.
const BYTES: usize = 16;

/// A random part of the URL.
#[derive(Debug)]
pub(super) struct Token(String);

impl Token {
    /// A token that nobody can guess.
    pub(super) fn random() -> std::io::Result<Token> {
        let mut bytes = [0; BYTES];
        // Up to 256 bytes come whole.
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        Ok(Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Whether a text is the token. The time that this takes depends on the length of the text only.
    pub(super) fn is(&self, text: &str) -> bool {
        let differences = self.0.bytes().zip(text.bytes()).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
        differences == 0 && self.0.len() == text.len()
    }
}

/// Whether a request is addressed to this machine. A page of another site can lead its own name to 127.0.0.1 (DNS
/// rebinding), and its requests carry that name. The port does not matter: it can be forwarded (`ssh -L`).
pub(super) fn is_local_host(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        Some(_) => return false,
        None => host,
    };
    name == "127.0.0.1" || name.eq_ignore_ascii_case("localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_is_the_token() {
        let token = Token::random().unwrap();
        let text = token.text().to_owned();
        assert_eq!(text.len(), 2 * BYTES);
        assert!(token.is(&text));
        for other in ["", &text[1..], &format!("{text}0"), &text.to_uppercase().replace(char::is_numeric, "x")] {
            assert!(!token.is(other), "{other}");
        }
        assert_ne!(text, Token::random().unwrap().text());
    }

    #[test]
    fn hosts_of_this_machine() {
        for host in ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LocalHost:65535"] {
            assert!(is_local_host(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:80",
            "localhost:",
            "a:127.0.0.1",
            "[::1]:80",
        ] {
            assert!(!is_local_host(host), "{host}");
        }
    }
}
