//! Reads a snapshot in JSON, token by token, on the same [`SnapshotBuilder`] as pickles.

use memtrace_trace::file::Budget;

use super::builder::SnapshotBuilder;
use super::contents::Value;
use super::read_error::ReadError;
use super::reader::{ByteReader, MAX_TEXT};

/// The maximum nesting depth. A snapshot has a depth of six.
const MAX_DEPTH: usize = 256;
/// The number of items that are collected before they are added to their list.
const BATCH_SIZE: usize = 1000;

/// A container that is being read.
enum Container {
    List { pending: usize },
    Dict,
}

fn invalid(reader: &ByteReader<'_>, what: &str) -> ReadError {
    ReadError::Invalid(format!("it is not valid JSON at byte {}: {what}", reader.position()))
}

/// Reads one value with everything inside it. Fails with [`ReadError::Exceeded`] if it needs
/// more than the budget.
pub(super) fn read(
    reader: &mut ByteReader<'_>,
    builder: &mut SnapshotBuilder,
    budget: &Budget,
) -> Result<Value, ReadError> {
    let mut refills = 0;
    let mut open: Vec<Container> = Vec::new();
    let mut scratch = Vec::new();
    loop {
        // A value, or the end of an empty container.
        let mut first = next_byte(reader)?;
        if reader.refills != refills {
            refills = reader.refills;
            budget.check(builder.bytes() as u64)?;
        }
        if let (Some(Container::Dict), b'"') = (open.last(), first) {
            string(reader, &mut scratch)?;
            builder.push_text(&scratch);
            if next_byte(reader)? != b':' {
                return Err(invalid(reader, "a key has no value"));
            }
            first = next_byte(reader)?;
        } else if let (Some(Container::Dict), other) = (open.last(), first)
            && other != b'}'
        {
            return Err(invalid(reader, "expected a key in quotes"));
        }
        match first {
            b'{' | b'[' => {
                if open.len() >= MAX_DEPTH {
                    return Err(ReadError::Invalid(format!(
                        "it is nested deeper than {MAX_DEPTH} levels; a snapshot has six levels"
                    )));
                }
                builder.open(first == b'{');
                builder.mark();
                open.push(if first == b'{' { Container::Dict } else { Container::List { pending: 0 } });
                continue;
            }
            b'}' | b']' => close_container(reader, builder, &mut open, first)?,
            b'"' => {
                string(reader, &mut scratch)?;
                builder.push_text(&scratch);
            }
            b't' => literal(reader, b"rue", builder, Value::Bool(true))?,
            b'f' => literal(reader, b"alse", builder, Value::Bool(false))?,
            b'n' => literal(reader, b"ull", builder, Value::None)?,
            b'N' => literal(reader, b"aN", builder, Value::Other)?,
            b'I' => literal(reader, b"nfinity", builder, Value::Other)?,
            b'-' | b'0'..=b'9' => {
                let value = number(reader, first)?;
                builder.push(value);
            }
            _ => return Err(invalid(reader, "expected a value")),
        }
        // A value is followed by a comma, or by the ends of containers.
        loop {
            let Some(container) = open.last_mut() else { return builder.finish() };
            if let Container::List { pending } = container {
                *pending += 1;
                if *pending == BATCH_SIZE {
                    *pending = 0;
                    builder.append_all()?;
                    builder.mark();
                }
            }
            match next_byte(reader)? {
                b',' => break,
                end @ (b'}' | b']') => close_container(reader, builder, &mut open, end)?,
                _ => return Err(invalid(reader, "expected a comma or a closing bracket")),
            }
        }
    }
}

fn close_container(
    reader: &ByteReader<'_>,
    builder: &mut SnapshotBuilder,
    open: &mut Vec<Container>,
    end: u8,
) -> Result<(), ReadError> {
    match (open.pop(), end) {
        (Some(Container::List { .. }), b']') => builder.append_all(),
        (Some(Container::Dict), b'}') => builder.set_items(),
        _ => Err(invalid(reader, "unexpected closing bracket")),
    }
}

/// The next byte that is not white space.
fn next_byte(reader: &mut ByteReader<'_>) -> Result<u8, ReadError> {
    loop {
        let [byte] = reader.take()?;
        if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
            return Ok(byte);
        }
    }
}

fn literal(
    reader: &mut ByteReader<'_>,
    rest: &[u8],
    builder: &mut SnapshotBuilder,
    value: Value,
) -> Result<(), ReadError> {
    for expected in rest {
        let [byte] = reader.take()?;
        if byte != *expected {
            return Err(invalid(reader, "unknown literal"));
        }
    }
    builder.push(value);
    Ok(())
}

fn number(reader: &mut ByteReader<'_>, first: u8) -> Result<Value, ReadError> {
    let mut digits = [0; 64];
    digits[0] = first;
    let mut len = 1;
    loop {
        if reader.buffer().is_empty() && !reader.is_at_end() {
            reader.refill()?;
        }
        match reader.buffer().first() {
            Some(byte @ (b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-')) if len < digits.len() => {
                digits[len] = *byte;
                len += 1;
                reader.consume(1);
            }
            Some(b'I') if digits[..len] == *b"-" => {
                reader.skip(b"Infinity".len() as u64)?;
                return Ok(Value::Other);
            }
            _ => break,
        }
    }
    let text = std::str::from_utf8(&digits[..len]).unwrap_or_default();
    if let Ok(number) = text.parse::<i64>() {
        return Ok(Value::Int(number));
    }
    if let Ok(number) = text.parse::<u64>() {
        return Ok(Value::Int(number as i64));
    }
    match text.parse::<f64>() {
        Ok(number) => Ok(Value::Float(number)),
        Err(_) if reader.buffer().is_empty() => Err(ReadError::EndOfFile),
        Err(_) => Err(invalid(reader, "invalid number")),
    }
}

/// Reads a string whose opening quote has been consumed.
fn string(reader: &mut ByteReader<'_>, out: &mut Vec<u8>) -> Result<(), ReadError> {
    out.clear();
    let mut cut = false;
    let mut add = |out: &mut Vec<u8>, bytes: &[u8]| {
        let room = MAX_TEXT.saturating_sub(out.len());
        cut |= room < bytes.len();
        out.extend_from_slice(&bytes[..bytes.len().min(room)]);
    };
    let mut high = None;
    loop {
        if reader.buffer().is_empty() {
            reader.refill()?;
            if reader.buffer().is_empty() {
                return Err(ReadError::EndOfFile);
            }
        }
        let buffer = reader.buffer();
        let plain = buffer.iter().position(|byte| matches!(byte, b'"' | b'\\')).unwrap_or(buffer.len());
        add(out, &buffer[..plain]);
        let stopped = buffer.get(plain).copied();
        reader.consume(plain + usize::from(stopped.is_some()));
        if plain > 0 {
            high = None;
        }
        match stopped {
            None => continue,
            Some(b'"') => break,
            Some(_) => {}
        }
        let [escape] = reader.take()?;
        let byte = match escape {
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 8,
            b'f' => 12,
            b'u' => {
                let digits: [u8; 4] = reader.take()?;
                let code = std::str::from_utf8(&digits).ok().and_then(|d| u32::from_str_radix(d, 16).ok());
                let Some(code) = code else { return Err(invalid(reader, "invalid escape sequence")) };
                let code = match (code, high.take()) {
                    (0xd800..=0xdbff, _) => {
                        high = Some(code);
                        continue;
                    }
                    (0xdc00..=0xdfff, Some(high)) => 0x10000 + ((high - 0xd800) << 10) + (code - 0xdc00),
                    (code, _) => code,
                };
                let mut bytes = [0; 4];
                add(out, char::from_u32(code).unwrap_or('\u{fffd}').encode_utf8(&mut bytes).as_bytes());
                continue;
            }
            other => other,
        };
        high = None;
        add(out, &[byte]);
    }
    reader.cut_texts += u64::from(cut);
    Ok(())
}
