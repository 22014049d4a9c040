//! Reads pickles of protocols 2 to 5: each opcode is executed on the [`SnapshotBuilder`]. No opcode runs code. Opcodes
//! that would import or call something are refused.

use memtrace_trace::file::Budget;

use super::builder::SnapshotBuilder;
use super::contents::Value;
use super::read_error::ReadError;
use super::reader::ByteReader;

/// The maximum length of an opcode with its arguments, in bytes, except for texts.
const MAX_OPCODE_LENGTH: usize = 16;

/// Reads to the end of the pickle and returns its value. Fails with [`ReadError::Exceeded`] if it needs
/// more than the budget.
pub(super) fn read(
    reader: &mut ByteReader<'_>,
    builder: &mut SnapshotBuilder,
    budget: &Budget,
) -> Result<Value, ReadError> {
    let mut refills = 0;
    loop {
        if reader.buffer().len() < MAX_OPCODE_LENGTH && !reader.is_at_end() {
            reader.refill()?;
        }
        if reader.refills != refills {
            refills = reader.refills;
            budget.check(builder.bytes() as u64)?;
        }
        let Some(&opcode) = reader.buffer().first() else { return Err(ReadError::EndOfFile) };
        let at = reader.position();
        reader.consume(1);
        match opcode {
            b'}' => builder.open(true),
            b']' => builder.open(false),
            b'(' => builder.mark(),
            0x94 => builder.memoize(None)?,
            b'h' => {
                let [n] = reader.take()?;
                builder.recall(n.into())?;
            }
            b'j' => {
                let n = u32::from_le_bytes(reader.take()?);
                builder.recall(n)?;
            }
            b'q' => {
                let [n] = reader.take()?;
                builder.memoize(Some(n.into()))?;
            }
            b'r' => {
                let n = u32::from_le_bytes(reader.take()?);
                builder.memoize(Some(n))?;
            }
            b'K' => {
                let [n] = reader.take()?;
                builder.push(Value::Int(n.into()));
            }
            b'M' => {
                let n = u16::from_le_bytes(reader.take()?);
                builder.push(Value::Int(n.into()));
            }
            b'J' => {
                let n = i32::from_le_bytes(reader.take()?);
                builder.push(Value::Int(n.into()));
            }
            0x8a => {
                let [len] = reader.take()?;
                let value = reader.take_text(len.into(), long_integer)?;
                builder.push(value);
            }
            0x8b => {
                let len = u32::from_le_bytes(reader.take()?);
                let value = reader.take_text(len.into(), long_integer)?;
                builder.push(value);
            }
            b'G' => {
                let n = f64::from_be_bytes(reader.take()?);
                builder.push(Value::Float(n));
            }
            b'N' => builder.push(Value::None),
            0x88 => builder.push(Value::Bool(true)),
            0x89 => builder.push(Value::Bool(false)),
            // Texts, and byte strings of Python 2.
            0x8c | b'U' => {
                let [len] = reader.take()?;
                reader.take_text(len.into(), |bytes| builder.push_text(bytes))?;
            }
            b'X' | b'T' => {
                let len = u32::from_le_bytes(reader.take()?);
                reader.take_text(len.into(), |bytes| builder.push_text(bytes))?;
            }
            0x8d => {
                let len = u64::from_le_bytes(reader.take()?);
                reader.take_text(len, |bytes| builder.push_text(bytes))?;
            }
            b'u' => builder.set_items()?,
            b's' => builder.set_item()?,
            b'e' => builder.append_all()?,
            b'a' => builder.append()?,
            b'd' => builder.dict_of_batch()?,
            b'l' => builder.list_of_batch()?,
            b't' => builder.tuple(None)?,
            b')' => builder.tuple(Some(0))?,
            0x85 => builder.tuple(Some(1))?,
            0x86 => builder.tuple(Some(2))?,
            0x87 => builder.tuple(Some(3))?,
            b'0' => builder.drop_top()?,
            b'1' => builder.drop_batch()?,
            b'2' => builder.duplicate_top()?,
            // No field of a snapshot is bytes.
            b'C' => {
                let [len] = reader.take()?;
                reader.skip(len.into())?;
                builder.push(Value::Other);
            }
            b'B' => {
                let len = u32::from_le_bytes(reader.take()?);
                reader.skip(len.into())?;
                builder.push(Value::Other);
            }
            0x8e | 0x96 => {
                let len = u64::from_le_bytes(reader.take()?);
                reader.skip(len)?;
                builder.push(Value::Other);
            }
            // No field of a snapshot is a set.
            0x8f => builder.open(false),
            0x90 => builder.append_all()?,
            0x91 => builder.list_of_batch()?,
            0x80 => {
                let [version] = reader.take()?;
                if version > 5 {
                    return Err(ReadError::Invalid(format!(
                        "it uses pickle protocol {version}; protocols 2 to 5 are supported"
                    )));
                }
            }
            0x95 => {
                reader.take::<8>()?;
            }
            b'.' => return builder.finish(),
            b'c' => {
                let (module, name) = (line(reader)?, line(reader)?);
                return Err(would_call(at, &format!("{module}.{name}")));
            }
            b'i' => {
                let (module, name) = (line(reader)?, line(reader)?);
                return Err(would_call(at, &format!("{module}.{name}")));
            }
            0x93 => return Err(would_call(at, &builder.import_name())),
            b'R' | b'b' | b'o' | 0x81 | 0x92 => return Err(would_call(at, "a function")),
            b'P' | b'Q' | 0x82 | 0x83 | 0x84 | 0x97 | 0x98 => {
                return Err(ReadError::Invalid(format!(
                    "it refers to data outside the file (opcode {opcode:#04x} at byte {at})"
                )));
            }
            b'I' | b'L' | b'F' | b'S' | b'V' | b'p' | b'g' => {
                return Err(ReadError::Invalid(format!(
                    "it uses pickle protocol 0 (opcode {:?} at byte {at}); protocols 2 to 5 are supported",
                    char::from(opcode)
                )));
            }
            _ => {
                return Err(ReadError::Invalid(format!("byte {at} is {opcode:#04x}, which is not a pickle opcode")));
            }
        }
    }
}

/// The error for an opcode that would make Python import and call something.
fn would_call(at: u64, what: &str) -> ReadError {
    ReadError::Invalid(format!(
        "loading it would call {what} (at byte {at}); memory snapshots call nothing, and memtrace executes no pickle"
    ))
}

/// A little-endian signed integer. One of more than 64 bits becomes [`Value::Other`].
fn long_integer(bytes: &[u8]) -> Value {
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut word = if negative { [0xff; 8] } else { [0; 8] };
    let (low, high) = bytes.split_at(bytes.len().min(8));
    word[..low.len()].copy_from_slice(low);
    // An unsigned 64-bit address with the highest bit set has a ninth byte for the sign.
    if high.iter().any(|byte| *byte != if negative { 0xff } else { 0 }) {
        Value::Other
    } else {
        Value::Int(i64::from_le_bytes(word))
    }
}

/// Reads a line for a message. Unprintable characters are replaced, and a long line is cut.
fn line(reader: &mut ByteReader<'_>) -> Result<String, ReadError> {
    let mut text = Vec::new();
    loop {
        match reader.take()? {
            [b'\n'] => break,
            [byte] if text.len() < 80 => text.push(byte),
            _ => {}
        }
    }
    Ok(memtrace_trace::printable::line(&String::from_utf8_lossy(&text)).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_a_sign() {
        assert_eq!(long_integer(&[]), Value::Int(0));
        assert_eq!(long_integer(&[0xff]), Value::Int(-1));
        assert_eq!(long_integer(&[0xff, 0]), Value::Int(255));
        assert_eq!(long_integer(&[0, 0, 0, 0, 0, 0, 0, 0x80, 0]), Value::Int(i64::MIN));
        assert_eq!(long_integer(&[1; 9]), Value::Other);
    }
}
