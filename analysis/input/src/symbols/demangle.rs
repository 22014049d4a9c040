//! Demangles linkage names, in full and shortened.

use std::fmt::{self, Write};

use cpp_demangle::{DemangleOptions, ParseOptions, Symbol};

/// The maximum length of a name in bytes. Some PyTorch kernels have several kilobytes of template arguments.
const MAX_NAME: usize = 16 << 10;
/// The maximum nesting depth. A deeper name would need too much stack. And the parser tries several readings of each
/// level: names of 1,200 bytes, made to need depth 160, take minutes. All names of PyTorch's libraries (70,280) need at
/// most 96.
const MAX_DEPTH: u32 = 100;

/// The name of a function.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FunctionName {
    /// As declared, with template arguments, parameters and qualifiers.
    pub full: String,
    /// Without arguments and qualifiers: `at::native::add` for `at::Tensor at::native::add<float>(at::Tensor const&)`.
    pub short: String,
}

impl FunctionName {
    /// Makes a readable name from a symbol of an object. C++ and Rust names are demangled; others stay unchanged.
    pub fn of(raw: &str) -> FunctionName {
        // A versioned name such as `memcpy@@GLIBC_2.14`.
        let raw = raw.split_once('@').map_or(raw, |(name, _)| if name.is_empty() { raw } else { name });
        // nvcc generates such host functions to launch kernels.
        const STUB: &str = "__device_stub_";
        if let Some(kernel) = raw.strip_prefix(STUB).filter(|rest| rest.starts_with("_Z")) {
            let FunctionName { full, short } = FunctionName::of(kernel);
            return FunctionName { full: format!("{STUB} {full}"), short: format!("{STUB} {short}") };
        }
        if is_rust(raw)
            && let Ok(name) = rustc_demangle::try_demangle(raw)
        {
            let full = write_limited(|out| write!(out, "{name:#}"));
            let short = without_trait(&full);
            return FunctionName { full, short };
        }
        let (mangled, suffix) = split_suffix(raw);
        let options = ParseOptions::default().recursion_limit(MAX_DEPTH);
        if mangled.starts_with("_Z")
            && let Ok(symbol) = Symbol::new_with_options(mangled, &options)
        {
            let style = DemangleOptions::new().recursion_limit(MAX_DEPTH);
            let full = write_limited(|out| symbol.structured_demangle(out, &style));
            let plain = write_limited(|out| symbol.structured_demangle(out, &style.no_return_type()));
            if !full.is_empty() && !plain.is_empty() {
                let full = if suffix.is_empty() { full } else { format!("{full} [clone {suffix}]") };
                return FunctionName { full, short: without_arguments(&plain) };
            }
        }
        FunctionName { full: raw.to_owned(), short: raw.to_owned() }
    }
}

/// Whether a name contains its namespace and parameters.
pub(super) fn is_mangled(raw: &str) -> bool {
    raw.starts_with("_Z") || raw.starts_with("_R")
}

/// Rust names begin with `_R`. Older Rust names look like C++ names except for the hash at their end.
fn is_rust(raw: &str) -> bool {
    let hash =
        |tail: &str| tail.len() == 17 && tail.starts_with('h') && tail[1..].bytes().all(|b| b.is_ascii_hexdigit());
    raw.starts_with("_R")
        || raw.starts_with("_ZN")
            && raw.strip_suffix('E').and_then(|r| r.rsplit_once("17")).is_some_and(|(_, tail)| hash(tail))
}

/// Splits off a compiler suffix: `f.part.0` and `f.cold` are parts of `f` that the compiler moved away.
fn split_suffix(raw: &str) -> (&str, &str) {
    match raw.find('.') {
        Some(at) if at > 0 => raw.split_at(at),
        _ => (raw, ""),
    }
}

struct LimitedString(String);

impl Write for LimitedString {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = MAX_NAME - self.0.len();
        if text.len() > room {
            self.0.push_str(&text[..text.floor_char_boundary(room)]);
            // Names can refer to their own parts and so grow without bound.
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// The text that `write` writes, cut at the maximum length. Empty if it fails otherwise.
fn write_limited(write: impl FnOnce(&mut LimitedString) -> fmt::Result) -> String {
    let mut out = LimitedString(String::new());
    match write(&mut out) {
        Ok(()) => out.0,
        Err(_) if out.0.len() + 4 >= MAX_NAME => out.0 + "...",
        Err(_) => String::new(),
    }
}

/// Shortens Rust's `<Type as Trait>::method` to `Type::method`, without type arguments.
fn without_trait(name: &str) -> String {
    let mut depth = 0_usize;
    let end = name.char_indices().find(|(at, c)| {
        match c {
            '<' => depth += 1,
            // The arrow of a function type.
            '>' if !name[..*at].ends_with('-') => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0
    });
    match end.and_then(|(end, _)| Some((name.get(1..end)?, name.get(end + 1..)?))) {
        Some((of, method)) if !of.is_empty() => {
            let of = of.split(" as ").next().unwrap_or(of);
            format!("{}{}", without_arguments(of), without_arguments_after(method))
        }
        _ => without_arguments(name),
    }
}

/// Shortens the rest of a name, which begins with `::`.
fn without_arguments_after(rest: &str) -> String {
    match rest.strip_prefix("::") {
        Some(rest) => format!("::{}", without_arguments(rest)),
        None => String::new(),
    }
}

/// A demangled name without template arguments, parameters and qualifiers. `(anonymous namespace)` is removed, too.
fn without_arguments(name: &str) -> String {
    const OPERATOR: &str = "operator";
    let mut short = String::with_capacity(name.len().min(256));
    let mut depth = 0_usize;
    let mut rest = name;
    while let Some(c) = rest.chars().next() {
        let mut taken = c.len_utf8();
        match c {
            _ if depth == 0 && rest.starts_with(OPERATOR) && !short.ends_with(is_word) => {
                // In `operator<`, `operator()` or `operator->`, these characters are not brackets.
                let after = &rest[OPERATOR.len()..];
                let signs = ["()", "<=>", "<<=", ">>=", "->*", "<<", ">>", "<=", ">=", "->", "<", ">"];
                let sign = signs.iter().find(|sign| after.starts_with(**sign)).map_or("", |sign| *sign);
                // `operator<<int>(...)` is read as `operator<<`, although it can be `operator<` of `int`. That is rare
                // and only makes the name longer.
                short.push_str(OPERATOR);
                short.push_str(sign);
                taken = OPERATOR.len() + sign.len();
            }
            '<' | '(' | '[' => {
                // Rust's `name::<arguments>`.
                if c == '<' && depth == 0 && short.ends_with("::") {
                    short.truncate(short.len() - 2);
                }
                depth += 1;
            }
            '>' | ')' | ']' => {
                // The arrow of a return type in a template argument.
                if !(c == '>' && name[..name.len() - rest.len()].ends_with('-')) {
                    depth = depth.saturating_sub(1);
                }
            }
            _ if depth > 0 => {}
            _ => short.push(c),
        }
        rest = &rest[taken..];
    }
    // Removes qualifiers after the parameters: `const`, `&`, `volatile`.
    let mut kept = short.trim_end_matches([' ', '&']);
    for qualifier in [" const", " volatile", " noexcept"] {
        kept = kept.strip_suffix(qualifier).unwrap_or(kept);
    }
    let mut kept = kept.trim_start_matches("::").to_owned();
    while kept.contains("::::") {
        kept = kept.replace("::::", "::");
    }
    if kept.is_empty() { name.to_owned() } else { kept }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_demangled_and_shortened() {
        let check = |raw: &str, full: &str, short: &str| {
            assert_eq!(FunctionName::of(raw), FunctionName { full: full.into(), short: short.into() });
        };
        check("main", "main", "main");
        check("_ZN2at6native3addERKNS_6TensorE", "at::native::add(at::Tensor const&)", "at::native::add");
        check("_ZNK3c106Device3strB5cxx11Ev", "c10::Device::str[abi:cxx11]() const", "c10::Device::str");
        check("_ZN12_GLOBAL__N_13fooEv.part.0", "(anonymous namespace)::foo() [clone .part.0]", "foo");
        check(
            "_ZN2at12_GLOBAL__N_112_GLOBAL__N_13fooEv",
            "at::(anonymous namespace)::(anonymous namespace)::foo()",
            "at::foo",
        );
        check("_ZlsRSoRK1A", "operator<<(std::ostream&, A const&)", "operator<<");
        check("_ZNK1AclEi", "A::operator()(int) const", "A::operator()");
        check("_ZZ4mainENKUlvE_clEv", "main::{lambda()#1}::operator()() const", "main::{lambda#1}::operator()");
        check("_Z5applyIiET_S0_", "int apply<int>(int)", "apply");
        check("_ZN3foo3bar17h0123456789abcdefE", "foo::bar", "foo::bar");
        check("_RNvCs1234_7mycrate3foo", "mycrate::foo", "mycrate::foo");
        check(
            "_ZN66_$LT$alloc..vec..Vec$LT$T$GT$$u20$as$u20$core..ops..drop..Drop$GT$4drop17h0123456789abcdefE",
            "<alloc::vec::Vec<T> as core::ops::drop::Drop>::drop",
            "alloc::vec::Vec::drop",
        );
        check("_RINvCs1234_7mycrate3foolE", "mycrate::foo::<i32>", "mycrate::foo");
        check("__device_stub__Z4copyPf", "__device_stub_ copy(float*)", "__device_stub_ copy");
        check("memcpy@@GLIBC_2.14", "memcpy", "memcpy");
        check("_Znot a name", "_Znot a name", "_Znot a name");
        check("", "", "");
    }

    /// Found by the fuzzer: the parser tries so many readings of this name that it did not end in a minute.
    #[test]
    fn a_name_of_many_readings_stays_as_it_is() {
        let raw = include_str!("../../../../tests/fuzz/corpus/names/many_readings");
        assert_eq!(FunctionName::of(raw).full, raw);
    }

    #[test]
    fn names_that_expand_exponentially_are_cut() {
        // Each parameter is a pair of the previous one: 2^30 letters in full.
        let mut raw = "_Z1f1a1bIS_S_E".to_owned();
        for pair in 1..30_u32 {
            let digit = char::from_digit(pair, 36).unwrap().to_ascii_uppercase();
            raw.push_str(&format!("S0_IS{digit}_S{digit}_E"));
        }
        let name = FunctionName::of(&raw);
        assert!(name.full.starts_with("f(a, b<a, a>, b<b<a, a>, b<a, a> >, "), "{:.80}", name.full);
        assert!((MAX_NAME..=MAX_NAME + 3).contains(&name.full.len()), "{}", name.full.len());
        assert_eq!(name.short, "f");
    }

    proptest::proptest! {
        #[test]
        fn any_name_is_accepted(raw in "(_Z|_R|_ZN)?[a-zA-Z0-9_<>(). ]{0,60}") {
            let name = FunctionName::of(&raw);
            proptest::prop_assert!(raw.is_empty() || !name.short.is_empty() || raw.trim().is_empty());
        }
    }
}
