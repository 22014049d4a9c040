//! Reads the query of a request for a window.

use memtrace_analysis::PageWindow;

/// The window that a query asks for: `process=0&device=0&from=17&to=99`.
pub(crate) fn window(query: &str) -> Option<PageWindow> {
    let value = |name: &str| {
        let mut values = query.split('&').filter_map(|part| part.split_once('=')).filter(|(key, _)| *key == name);
        values.next().map(|(_, value)| value).filter(|_| values.next().is_none())
    };
    Some(PageWindow {
        process: value("process")?.parse().ok()?,
        device: value("device")?.parse().ok()?,
        first: value("from")?.parse().ok()?,
        last: value("to")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let expected = PageWindow { process: 1, device: -1, first: 17, last: 99 };
        assert_eq!(window("process=1&device=-1&from=17&to=99"), Some(expected));
        assert_eq!(window("to=99&from=17&device=-1&process=1&more=0"), Some(expected));
        for query in
            ["", "process=1&device=0&from=17", "process=1&device=0&from=17&to=x", "process=1&device=0&from=1&to=9&to=8"]
        {
            assert_eq!(window(query), None, "{query}");
        }
    }
}
