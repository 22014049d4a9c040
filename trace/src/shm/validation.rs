//! Decides which definitions a traced process may send. Its bytes may be arbitrary. Accepted definitions are valid and
//! small enough for the tables of a reader.

use crate::definition::{Definition, MAX_DEFINITION};
use crate::wire::Cursor;

/// The largest id of a definition. Readers index tables with it.
pub const MAX_ID: u32 = 1 << 24;

/// Decodes one definition. `None` if it is invalid, has bytes after it, or a traced process must not define it. Only
/// the launcher defines threads and what rotation has dropped.
pub fn decode_definition(bytes: &[u8]) -> Option<Definition<'_>> {
    let mut cursor = Cursor::new(bytes);
    let definition = Definition::decode(&mut cursor).ok().flatten()?;
    let id = match definition {
        Definition::Frame { id, .. } | Definition::NativeFrame { id, .. } => id.0,
        Definition::Stack { id, parent, .. } if parent < id => id.0,
        Definition::FrameOrigin { frame, .. } => frame.0,
        Definition::Context { id, .. } => id.0,
        Definition::NnCall { id, caller, .. } if caller < id => id.0,
        Definition::Module { id, .. } => id.0,
        Definition::Stack { .. }
        | Definition::NnCall { .. }
        | Definition::Thread { .. }
        | Definition::Rotation { .. }
        | Definition::PackedRotation { .. }
        | Definition::PackedBlock { .. } => return None,
        _ => 1,
    };
    (cursor.is_empty() && bytes.len() <= MAX_DEFINITION && (1..=MAX_ID).contains(&id)).then_some(definition)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{FrameId, StackId, ThreadId};

    fn is_accepted(definition: &Definition<'_>, extra: &[u8]) -> bool {
        let mut bytes = Vec::new();
        definition.encode(&mut bytes);
        bytes.extend_from_slice(extra);
        decode_definition(&bytes).is_some()
    }

    #[test]
    fn only_valid_definitions_are_accepted() {
        let stack = |id, parent| Definition::Stack { id: StackId(id), parent: StackId(parent), frame: FrameId(1) };
        assert!(is_accepted(&stack(1, 0), &[]) && is_accepted(&stack(MAX_ID, 7), &[]));
        assert!(!is_accepted(&stack(0, 0), &[]) && !is_accepted(&stack(MAX_ID + 1, 7), &[]));
        assert!(!is_accepted(&stack(2, 2), &[]) && !is_accepted(&stack(2, 3), &[]));
        assert!(!is_accepted(&stack(1, 0), &[0]));
        assert!(!is_accepted(&Definition::Rotation { rotation: Default::default() }, &[]));
        let rotation = Default::default();
        assert!(!is_accepted(&Definition::PackedRotation { rotation, progress: &[] }, &[]));
        assert!(!is_accepted(&Definition::PackedBlock { block: &[] }, &[]));
        assert!(!is_accepted(&Definition::Thread { id: ThreadId(1), tid: 1, name: "forged" }, &[]));
        assert!(!is_accepted(
            &Definition::Context { id: Default::default(), node: "n", forward: StackId(1), module: Default::default() },
            &[]
        ));
        let long = "x".repeat(MAX_DEFINITION);
        assert!(!is_accepted(&Definition::Pool { id: 1, pool: (0, 1) }, long.as_bytes()));
        assert!(decode_definition(&[200, 0]).is_none() && decode_definition(&[]).is_none());
    }
}
