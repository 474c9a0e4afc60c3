//! The segments that are there, and their open files. Shared by the writer and readers.
//!
//! Two locks, never both: the table's and the open files'. No I/O under either but an `open`.

use crate::files::{OpenPurpose, StoredFile, StoredFolder};
use crate::scan::DurableEnd;
use crate::segment::segment_name;
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

/// A segment that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentInfo {
    /// Bytes of its file.
    pub(crate) len: u64,
    /// Matters if it has no footer.
    pub(crate) durable_end: DurableEnd,
}

#[derive(Default)]
struct OpenFiles {
    files: HashMap<u64, OpenFile>,
    clock: u64,
}

struct OpenFile {
    file: Arc<dyn StoredFile>,
    last_use: u64,
}

pub(crate) struct SegmentTable {
    folder: Arc<dyn StoredFolder>,
    segments: RwLock<BTreeMap<u64, SegmentInfo>>,
    open_files: Mutex<OpenFiles>,
    open_files_max: usize,
}

impl SegmentTable {
    pub(crate) fn new(
        folder: Arc<dyn StoredFolder>,
        segments: BTreeMap<u64, SegmentInfo>,
        open_files_max: usize,
    ) -> Self {
        let open_files = Mutex::new(OpenFiles::default());
        Self { folder, segments: RwLock::new(segments), open_files, open_files_max }
    }

    /// The file of a segment; `None` if the segment is gone.
    pub(crate) fn open_segment(&self, number: u64) -> io::Result<Option<Arc<dyn StoredFile>>> {
        if !self.segments.read().contains_key(&number) {
            return Ok(None);
        }
        {
            let mut open = self.open_files.lock();
            open.clock += 1;
            let now = open.clock;
            if let Some(found) = open.files.get_mut(&number) {
                found.last_use = now;
                return Ok(Some(Arc::clone(&found.file)));
            }
        }
        match self.folder.open_file(&segment_name(number), OpenPurpose::Read) {
            Ok(file) => {
                self.keep_open(number, Arc::clone(&file));
                Ok(Some(file))
            }
            // Reclaimed between the two.
            Err(_) if !self.segments.read().contains_key(&number) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn keep_open(&self, number: u64, file: Arc<dyn StoredFile>) {
        let mut open = self.open_files.lock();
        if open.files.len() >= self.open_files_max {
            let oldest = open.files.iter().min_by_key(|(_, file)| file.last_use);
            if let Some(oldest) = oldest.map(|(number, _)| *number) {
                open.files.remove(&oldest);
            }
        }
        open.clock += 1;
        let last_use = open.clock;
        open.files.insert(number, OpenFile { file, last_use });
        // It may have gone meanwhile.
        if !self.segments.read().contains_key(&number) {
            open.files.remove(&number);
        }
    }

    pub(crate) fn set_segment(&self, number: u64, info: SegmentInfo) {
        self.segments.write().insert(number, info);
    }

    /// Takes a segment out: reads of it are misses from now on.
    pub(crate) fn forget_segment(&self, number: u64) {
        self.segments.write().remove(&number);
        self.open_files.lock().files.remove(&number);
    }

    /// The segment that was made first, other than `number`.
    pub(crate) fn find_oldest(&self, except: Option<u64>) -> Option<(u64, SegmentInfo)> {
        let segments = self.segments.read();
        let mut others = segments.iter().filter(|(number, _)| Some(**number) != except);
        others.next().map(|(number, info)| (*number, *info))
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.segments.read().values().map(|info| info.len).sum()
    }

    pub(crate) fn segment_count(&self) -> usize {
        self.segments.read().len()
    }
}
