//! Reads pickles of protocols 2 to 5: each opcode is executed on the [`Machine`]. No opcode runs code. Opcodes that
//! would import or call something are refused.

use super::Stop;
use super::input::Input;
use super::machine::{Machine, Value};

/// The maximum length of an opcode with its arguments, in bytes, except for texts.
const LONGEST: usize = 16;

/// Reads to the end of the pickle and returns its value. Fails with [`Stop::Memory`] above `room` bytes.
pub(super) fn read(input: &mut Input<'_>, machine: &mut Machine, room: usize) -> Result<Value, Stop> {
    let mut refills = 0;
    loop {
        if input.here().len() < LONGEST && !input.ended() {
            input.refill()?;
        }
        if input.refills != refills {
            refills = input.refills;
            if machine.bytes() > room {
                return Err(Stop::Memory);
            }
        }
        let Some(&opcode) = input.here().first() else { return Err(Stop::End) };
        let at = input.position();
        input.skip_here(1);
        match opcode {
            b'}' => machine.open(true),
            b']' => machine.open(false),
            b'(' => machine.mark(),
            0x94 => machine.memoize(None)?,
            b'h' => {
                let [n] = input.take()?;
                machine.recall(n.into())?;
            }
            b'j' => {
                let n = u32::from_le_bytes(input.take()?);
                machine.recall(n)?;
            }
            b'q' => {
                let [n] = input.take()?;
                machine.memoize(Some(n.into()))?;
            }
            b'r' => {
                let n = u32::from_le_bytes(input.take()?);
                machine.memoize(Some(n))?;
            }
            b'K' => {
                let [n] = input.take()?;
                machine.push(Value::Int(n.into()));
            }
            b'M' => {
                let n = u16::from_le_bytes(input.take()?);
                machine.push(Value::Int(n.into()));
            }
            b'J' => {
                let n = i32::from_le_bytes(input.take()?);
                machine.push(Value::Int(n.into()));
            }
            0x8a => {
                let [len] = input.take()?;
                let value = input.text(len.into(), long)?;
                machine.push(value);
            }
            0x8b => {
                let len = u32::from_le_bytes(input.take()?);
                let value = input.text(len.into(), long)?;
                machine.push(value);
            }
            b'G' => {
                let n = f64::from_be_bytes(input.take()?);
                machine.push(Value::Float(n));
            }
            b'N' => machine.push(Value::None),
            0x88 => machine.push(Value::Bool(true)),
            0x89 => machine.push(Value::Bool(false)),
            // Texts, and byte strings of Python 2.
            0x8c | b'U' => {
                let [len] = input.take()?;
                input.text(len.into(), |bytes| machine.push_text(bytes))?;
            }
            b'X' | b'T' => {
                let len = u32::from_le_bytes(input.take()?);
                input.text(len.into(), |bytes| machine.push_text(bytes))?;
            }
            0x8d => {
                let len = u64::from_le_bytes(input.take()?);
                input.text(len, |bytes| machine.push_text(bytes))?;
            }
            b'u' => machine.set_items()?,
            b's' => machine.set_item()?,
            b'e' => machine.append_all()?,
            b'a' => machine.append()?,
            b'd' => machine.dict_of_batch()?,
            b'l' => machine.list_of_batch()?,
            b't' => machine.tuple(None)?,
            b')' => machine.tuple(Some(0))?,
            0x85 => machine.tuple(Some(1))?,
            0x86 => machine.tuple(Some(2))?,
            0x87 => machine.tuple(Some(3))?,
            b'0' => machine.drop_top()?,
            b'1' => machine.drop_batch()?,
            b'2' => machine.again()?,
            // No field of a snapshot is bytes.
            b'C' => {
                let [len] = input.take()?;
                input.pass(len.into())?;
                machine.push(Value::Other);
            }
            b'B' => {
                let len = u32::from_le_bytes(input.take()?);
                input.pass(len.into())?;
                machine.push(Value::Other);
            }
            0x8e | 0x96 => {
                let len = u64::from_le_bytes(input.take()?);
                input.pass(len)?;
                machine.push(Value::Other);
            }
            // No field of a snapshot is a set.
            0x8f => machine.open(false),
            0x90 => machine.append_all()?,
            0x91 => machine.list_of_batch()?,
            0x80 => {
                let [version] = input.take()?;
                if version > 5 {
                    return Err(Stop::Refused(format!(
                        "it is of pickle protocol {version}, and 5 is the newest that there is"
                    )));
                }
            }
            0x95 => {
                input.take::<8>()?;
            }
            b'.' => return machine.finish(),
            b'c' => {
                let (module, name) = (line(input)?, line(input)?);
                return Err(runs(at, &format!("{module}.{name}")));
            }
            b'i' => {
                let (module, name) = (line(input)?, line(input)?);
                return Err(runs(at, &format!("{module}.{name}")));
            }
            0x93 => return Err(runs(at, &machine.named())),
            b'R' | b'b' | b'o' | 0x81 | 0x92 => return Err(runs(at, "something")),
            b'P' | b'Q' | 0x82 | 0x83 | 0x84 | 0x97 | 0x98 => {
                return Err(Stop::Refused(format!(
                    "it refers to something outside of itself (opcode {opcode:#04x} at byte {at})"
                )));
            }
            b'I' | b'L' | b'F' | b'S' | b'V' | b'p' | b'g' => {
                return Err(Stop::Refused(format!(
                    "it has opcodes of pickle protocol 0 ({:?} at byte {at}), and 2 to 5 are read: save it anew with Python's pickle.dump",
                    char::from(opcode)
                )));
            }
            _ => {
                return Err(Stop::Refused(format!(
                    "byte {at} is {opcode:#04x}, which is no pickle opcode: it is damaged"
                )));
            }
        }
    }
}

/// The error for an opcode that would make Python import and call something.
fn runs(at: u64, what: &str) -> Stop {
    Stop::Refused(format!(
        "to load it, Python would have to call {what} (at byte {at}), which no memory snapshot needs, and memtrace calls \
         nothing that a file names"
    ))
}

/// A little-endian signed integer. One of more than 64 bits becomes [`Value::Other`].
fn long(bytes: &[u8]) -> Value {
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
fn line(input: &mut Input<'_>) -> Result<String, Stop> {
    let mut text = Vec::new();
    loop {
        match input.take()? {
            [b'\n'] => break,
            [byte] if text.len() < 80 => text.push(byte),
            _ => {}
        }
    }
    Ok(crate::printable::line(&String::from_utf8_lossy(&text)).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_a_sign() {
        assert_eq!(long(&[]), Value::Int(0));
        assert_eq!(long(&[0xff]), Value::Int(-1));
        assert_eq!(long(&[0xff, 0]), Value::Int(255));
        assert_eq!(long(&[0, 0, 0, 0, 0, 0, 0, 0x80, 0]), Value::Int(i64::MIN));
        assert_eq!(long(&[1; 9]), Value::Other);
    }
}
