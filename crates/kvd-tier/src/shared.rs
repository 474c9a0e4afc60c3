//! State that the writer, readers and callers of a tier share.

use crate::files::StoredFolder;
use crate::identity::StoreIdentity;
use crate::levels::{LevelCells, TierState};
use crate::name::DiskLocation;
use crate::recover::{DescriptionKey, RecoveredStore};
use crate::settings::DiskSettings;
use crate::table::SegmentTable;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

pub(crate) struct TierShared {
    pub(crate) folder: Arc<dyn StoredFolder>,
    pub(crate) identity: StoreIdentity,
    pub(crate) settings: DiskSettings,
    pub(crate) table: SegmentTable,
    pub(crate) cells: LevelCells,
    /// At most `descriptions_max`, checked where one is queued.
    pub(crate) descriptions: Mutex<HashMap<DescriptionKey, DiskLocation>>,
    state: AtomicU8,
}

impl TierShared {
    /// Takes over what recovery found, but for the records.
    pub(crate) fn new(
        folder: Arc<dyn StoredFolder>,
        identity: StoreIdentity,
        settings: DiskSettings,
        recovered: &mut RecoveredStore,
    ) -> Self {
        let segments = std::mem::take(&mut recovered.segments);
        let table = SegmentTable::new(Arc::clone(&folder), segments, settings.open_files_max);
        let cells = LevelCells::default();
        let counts = recovered.found.counts;
        LevelCells::set_to(&cells.capacity_bytes, settings.bytes);
        LevelCells::set_to(&cells.recovered_live, counts.live);
        LevelCells::set_to(&cells.recovered_orphan, counts.orphan);
        LevelCells::set_to(&cells.recovered_replaced, counts.replaced);
        LevelCells::set_to(&cells.recovered_removed, counts.removed);
        LevelCells::set_to(&cells.recovered_torn, counts.torn);
        LevelCells::set_to(&cells.errors_file, counts.file_errors);
        let descriptions = Mutex::new(std::mem::take(&mut recovered.descriptions));
        let state = AtomicU8::new(TierState::Ok as u8);
        Self { folder, identity, settings, table, cells, descriptions, state }
    }

    pub(crate) fn tier_state(&self) -> TierState {
        match self.state.load(Ordering::Relaxed) {
            0 => TierState::Ok,
            1 => TierState::Degraded,
            _ => TierState::Off,
        }
    }

    pub(crate) fn set_state(&self, state: TierState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }
}
