//! Reads a snapshot in JSON, token by token, on the same [`Machine`] as pickles.

use super::Stop;
use super::input::{Input, longest_text};
use super::machine::{Machine, Value};

/// The maximum nesting depth. A snapshot has a depth of six.
const DEEPEST: usize = 256;
/// The number of items that are collected before they are added to their list.
const BATCH: usize = 1000;

/// A container that is being read.
enum Inside {
    List { gathered: usize },
    Dict,
}

fn wrong(input: &Input<'_>, what: &str) -> Stop {
    Stop::Refused(format!("it is no JSON: {what} at byte {}", input.position()))
}

/// Reads one value with everything inside it. Fails with [`Stop::Memory`] above `room` bytes.
pub(super) fn read(input: &mut Input<'_>, machine: &mut Machine, room: usize) -> Result<Value, Stop> {
    let mut refills = 0;
    let mut inside: Vec<Inside> = Vec::new();
    let mut scratch = Vec::new();
    loop {
        // A value, or the end of an empty container.
        let mut first = next(input)?;
        if input.refills != refills {
            refills = input.refills;
            if machine.bytes() > room {
                return Err(Stop::Memory);
            }
        }
        if let (Some(Inside::Dict), b'"') = (inside.last(), first) {
            text(input, &mut scratch)?;
            machine.push_text(&scratch);
            if next(input)? != b':' {
                return Err(wrong(input, "a key without a value"));
            }
            first = next(input)?;
        } else if let (Some(Inside::Dict), other) = (inside.last(), first)
            && other != b'}'
        {
            return Err(wrong(input, "something else than a key"));
        }
        match first {
            b'{' | b'[' => {
                if inside.len() >= DEEPEST {
                    return Err(Stop::Refused(format!(
                        "it is nested deeper than {DEEPEST} levels, and a snapshot has six"
                    )));
                }
                machine.open(first == b'{');
                machine.mark();
                inside.push(if first == b'{' { Inside::Dict } else { Inside::List { gathered: 0 } });
                continue;
            }
            b'}' | b']' => close(input, machine, &mut inside, first)?,
            b'"' => {
                text(input, &mut scratch)?;
                machine.push_text(&scratch);
            }
            b't' => word(input, b"rue", machine, Value::Bool(true))?,
            b'f' => word(input, b"alse", machine, Value::Bool(false))?,
            b'n' => word(input, b"ull", machine, Value::None)?,
            b'N' => word(input, b"aN", machine, Value::Other)?,
            b'I' => word(input, b"nfinity", machine, Value::Other)?,
            b'-' | b'0'..=b'9' => {
                let value = number(input, first)?;
                machine.push(value);
            }
            _ => return Err(wrong(input, "something that is no value")),
        }
        // A value is followed by a comma, or by the ends of containers.
        loop {
            let Some(container) = inside.last_mut() else { return machine.finish() };
            if let Inside::List { gathered } = container {
                *gathered += 1;
                if *gathered == BATCH {
                    *gathered = 0;
                    machine.append_all()?;
                    machine.mark();
                }
            }
            match next(input)? {
                b',' => break,
                end @ (b'}' | b']') => close(input, machine, &mut inside, end)?,
                _ => return Err(wrong(input, "neither a comma nor an end")),
            }
        }
    }
}

fn close(input: &Input<'_>, machine: &mut Machine, inside: &mut Vec<Inside>, end: u8) -> Result<(), Stop> {
    match (inside.pop(), end) {
        (Some(Inside::List { .. }), b']') => machine.append_all(),
        (Some(Inside::Dict), b'}') => machine.set_items(),
        _ => Err(wrong(input, "an end of what has not begun")),
    }
}

/// The next byte that is not white space.
fn next(input: &mut Input<'_>) -> Result<u8, Stop> {
    loop {
        let [byte] = input.take()?;
        if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
            return Ok(byte);
        }
    }
}

fn word(input: &mut Input<'_>, rest: &[u8], machine: &mut Machine, value: Value) -> Result<(), Stop> {
    for expected in rest {
        let [byte] = input.take()?;
        if byte != *expected {
            return Err(wrong(input, "a word that JSON has not"));
        }
    }
    machine.push(value);
    Ok(())
}

fn number(input: &mut Input<'_>, first: u8) -> Result<Value, Stop> {
    let mut digits = [0; 64];
    digits[0] = first;
    let mut len = 1;
    loop {
        if input.here().is_empty() && !input.ended() {
            input.refill()?;
        }
        match input.here().first() {
            Some(byte @ (b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-')) if len < digits.len() => {
                digits[len] = *byte;
                len += 1;
                input.skip_here(1);
            }
            Some(b'I') if digits[..len] == *b"-" => {
                input.pass(b"Infinity".len() as u64)?;
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
        Err(_) if input.here().is_empty() => Err(Stop::End),
        Err(_) => Err(wrong(input, "a number that is none")),
    }
}

/// Reads a text whose opening quote has been consumed.
fn text(input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<(), Stop> {
    out.clear();
    let mut cut = false;
    let mut add = |out: &mut Vec<u8>, bytes: &[u8]| {
        let room = longest_text().saturating_sub(out.len());
        cut |= room < bytes.len();
        out.extend_from_slice(&bytes[..bytes.len().min(room)]);
    };
    let mut high = None;
    loop {
        if input.here().is_empty() {
            input.refill()?;
            if input.here().is_empty() {
                return Err(Stop::End);
            }
        }
        let here = input.here();
        let plain = here.iter().position(|byte| matches!(byte, b'"' | b'\\')).unwrap_or(here.len());
        add(out, &here[..plain]);
        let stopped = here.get(plain).copied();
        input.skip_here(plain + usize::from(stopped.is_some()));
        if plain > 0 {
            high = None;
        }
        match stopped {
            None => continue,
            Some(b'"') => break,
            Some(_) => {}
        }
        let [escape] = input.take()?;
        let byte = match escape {
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 8,
            b'f' => 12,
            b'u' => {
                let digits: [u8; 4] = input.take()?;
                let code = std::str::from_utf8(&digits).ok().and_then(|d| u32::from_str_radix(d, 16).ok());
                let Some(code) = code else { return Err(wrong(input, "an escape that is none")) };
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
    input.cut_texts += u64::from(cut);
    Ok(())
}
