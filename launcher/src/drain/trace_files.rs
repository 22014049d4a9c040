//! The names of a run's trace files: one file for each recorded process image.

use std::collections::HashMap;

use super::refusal::RefusalReason;
use super::writer::FileKey;

/// The maximum number of trace files in one run.
const MAX_FILES: u32 = 65_536;
/// The maximum number of recorded images of one process, so that it cannot use up all files of the run.
const MAX_IMAGES: u32 = 4096;

/// The trace files that were started so far.
#[derive(Debug, Default)]
pub(super) struct TraceFiles {
    started: u32,
    /// The number of files by pid.
    images: HashMap<u32, u32>,
}

impl TraceFiles {
    /// Whether the run has the maximum number of files.
    pub(super) fn is_full(&self) -> bool {
        self.started >= MAX_FILES
    }

    /// The number of the next image of this process, from 0. Fails if it had the maximum number of images.
    pub(super) fn next_image(&self, pid: u32) -> Result<u32, RefusalReason> {
        let image = self.images.get(&pid).copied().unwrap_or(0);
        if image >= MAX_IMAGES { Err(RefusalReason::TooManyImages) } else { Ok(image) }
    }

    /// Starts the file of this image, and returns its key and its name.
    pub(super) fn start(&mut self, pid: u32, image: u32) -> (FileKey, String) {
        self.images.insert(pid, image + 1);
        self.started += 1;
        let name = if image == 0 { format!("{pid}.mtr") } else { format!("{pid}.{image}.mtr") };
        (FileKey(self.started), name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_image_has_a_file_of_its_own() {
        let mut files = TraceFiles::default();
        let names: Vec<(u32, String)> = [7, 8, 7]
            .into_iter()
            .map(|pid| {
                let image = files.next_image(pid).unwrap();
                let (FileKey(key), name) = files.start(pid, image);
                (key, name)
            })
            .collect();
        assert_eq!(names, [(1, "7.mtr".into()), (2, "8.mtr".into()), (3, "7.1.mtr".into())]);
        assert!(!files.is_full());
        files.start(7, MAX_IMAGES - 1);
        assert_eq!(files.next_image(7), Err(RefusalReason::TooManyImages));
        assert_eq!(files.next_image(8), Ok(1));
    }
}
