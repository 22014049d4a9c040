//! The help of an error for a name that does not exist: the names like it.

/// The typing errors that a name may have to be suggested.
const TYPING_ERRORS: usize = 3;
/// The most names that an error suggests.
const SUGGESTED: usize = 3;

/// Asks "did you mean" with the names like the requested one, and says how to list all. `last` gives the part of a name
/// that typing errors are counted in: all of it, or what follows the folders of a path.
pub(super) fn did_you_mean<'a>(
    requested: &'a str,
    names: impl Iterator<Item = &'a str>,
    last: impl Fn(&'a str) -> &'a str,
    how_to_list: &str,
) -> String {
    let distance = |name: &'a str| strsim::osa_distance(last(name), last(requested));
    let mut close: Vec<&str> = names
        .filter(|name| (requested.len() > 2 && name.contains(requested)) || distance(name) <= TYPING_ERRORS)
        .collect();
    close.sort_by_key(|name| distance(name));
    close.truncate(SUGGESTED);
    if close.is_empty() {
        how_to_list.to_owned()
    } else {
        format!("did you mean {}? {how_to_list}", close.join(" or "))
    }
}
