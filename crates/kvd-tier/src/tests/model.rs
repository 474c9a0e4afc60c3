//! An index as a daemon has one, and content that follows from a block's digest.

use super::sim::{Random, SimFolder};
use crate::draft::{LayerShape, RecordDraft, RecordShape};
use crate::identity::StoreIdentity;
use crate::listener::ReclaimListener;
use crate::name::{BlockName, DiskLocation, KeepChoice, LiveRecord, RecordMeta, ScopeId};
use crate::part::RecordPart;
use crate::settings::DiskSettings;
use crate::tier::{OpenedStore, open_store};
use crate::writer::{PendingRecord, WriteCompletion};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

pub(super) const SCOPE: ScopeId = ScopeId([5; 16]);

/// The block at `position` of chain `chain`: its names follow from the two.
pub(super) fn block_name(chain: u64, position: u32) -> BlockName {
    let word = |salt: u64, position: u64| {
        let mut random = Random::new(chain << 20 ^ position << 4 ^ salt);
        u128::from(random.next_u64()) << 64 | u128::from(random.next_u64())
    };
    let parent_lineage = if position == 0 { 0 } else { word(1, u64::from(position) - 1) };
    BlockName {
        scope: SCOPE,
        digest: word(2, position.into()),
        lineage: word(1, position.into()),
        parent_lineage,
        position,
    }
}

pub(super) fn block_shape(name: &BlockName) -> RecordShape {
    let mut random = Random::new(name.digest as u64);
    let layers = (0..1 + random.below(3))
        .map(|_| LayerShape { form: vec![7; random.below(40)], bytes: random.below(5000) })
        .collect();
    let key = name.digest.to_le_bytes().into();
    let tables = vec![random.below(256) as u8; random.below(100)];
    RecordShape { meta: RecordMeta { name: *name, key }, tables, layers }
}

/// Content of a layer.
pub(super) fn layer_content(name: &BlockName, layer: usize, bytes: usize) -> Vec<u8> {
    let mut random = Random::new(name.digest as u64 ^ (layer as u64 + 1) << 60);
    let words = std::iter::repeat_with(|| random.next_u64().to_le_bytes());
    words.flatten().take(bytes).collect()
}

pub(super) fn block_draft(name: &BlockName) -> RecordDraft {
    let shape = block_shape(name);
    let mut draft = RecordDraft::new(&shape).unwrap();
    for (layer, of) in shape.layers.iter().enumerate() {
        let content = layer_content(name, layer, of.bytes);
        draft.layer_mut(layer).unwrap().copy_from_slice(&content);
    }
    draft
}

/// Panics if a part of all layers is not exactly what was written under its name.
pub(super) fn assert_content(part: &RecordPart, name: &BlockName) {
    let shape = block_shape(name);
    assert_eq!(part.record_meta(), shape.meta);
    assert_eq!(part.table_bytes(), shape.tables);
    assert_eq!(part.layer_range(), 0..shape.layers.len() as u32);
    for (layer, of) in shape.layers.iter().enumerate() {
        assert_eq!(part.layer_form(layer as u32), Some(&of.form[..]));
        let bytes = part.layer_bytes(layer as u32).unwrap();
        assert!(bytes == layer_content(name, layer, of.bytes), "layer {layer} of {name:?}");
    }
}

/// A block as its owner knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexEntry {
    pub(super) name: BlockName,
    /// Where it is durable.
    pub(super) location: Option<DiskLocation>,
}

#[derive(Debug, Default)]
pub(super) struct IndexState {
    pub(super) entries: BTreeMap<u128, IndexEntry>,
    /// Digests whose tombstone is durable.
    pub(super) removed: BTreeSet<u128>,
    pub(super) failures: u64,
}

impl IndexState {
    /// Drops an entry and all behind it.
    pub(super) fn drop_subtree(&mut self, digest: u128) {
        let mut open = vec![digest];
        while let Some(digest) = open.pop() {
            let Some(entry) = self.entries.remove(&digest) else {
                continue;
            };
            let lineage = entry.name.lineage;
            let children = self
                .entries
                .values()
                .filter(|child| child.name.position > 0 && child.name.parent_lineage == lineage);
            open.extend(children.map(|child| child.name.digest));
        }
    }
}

/// The index, which chooses at random what to keep.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) state: Mutex<IndexState>,
    random: Mutex<Random>,
}

impl Index {
    pub(super) fn new(seed: u64) -> Arc<Self> {
        let random = Mutex::new(Random::new(seed));
        Arc::new(Self { state: Mutex::default(), random })
    }
}

impl ReclaimListener for Index {
    fn choose_kept(&self, records: &[LiveRecord]) -> Vec<KeepChoice> {
        let (state, mut random) = (self.state.lock(), self.random.lock());
        let choose = |record: &LiveRecord| {
            let entry = state.entries.get(&record.name.digest);
            if entry.and_then(|entry| entry.location) != Some(record.location) {
                return KeepChoice::Stale;
            }
            [KeepChoice::Drop, KeepChoice::Copy, KeepChoice::Pinned][random.below(3)]
        };
        records.iter().map(choose).collect()
    }

    fn record_moved(&self, name: &BlockName, from: &DiskLocation, to: &DiskLocation) {
        let mut state = self.state.lock();
        if let Some(entry) = state.entries.get_mut(&name.digest)
            && entry.location == Some(*from)
        {
            entry.location = Some(*to);
        }
    }

    fn records_gone(&self, records: &[LiveRecord]) {
        let mut state = self.state.lock();
        for record in records {
            let entry = state.entries.get(&record.name.digest);
            if entry.and_then(|entry| entry.location) == Some(record.location) {
                state.drop_subtree(record.name.digest);
            }
        }
    }
}

pub(super) const SEGMENT_BYTES: u64 = 96 << 10;

pub(super) fn small_settings() -> DiskSettings {
    let mut settings = DiskSettings::new("/simulated".into(), 5 * SEGMENT_BYTES);
    settings.segment_bytes = SEGMENT_BYTES;
    settings.reserve_free_bytes = 0;
    settings.recover_threads = 1;
    settings
}

/// A store on a simulated folder, with the index that listens.
pub(super) struct SimStore {
    pub(super) opened: OpenedStore,
    pub(super) index: Arc<Index>,
    ticket: u64,
}

impl SimStore {
    /// Opens the store; the index takes up what was recovered.
    pub(super) fn open_store(folder: &SimFolder, index: &Arc<Index>) -> Self {
        let identity = StoreIdentity { uuid: [9; 16], hash_seed: 1, frame_seed: 2 };
        identity.write_to(folder).unwrap();
        let folder = Arc::new(folder.clone());
        let listener = Arc::clone(index) as Arc<dyn ReclaimListener>;
        let opened = open_store(folder, Path::new("/sim"), small_settings(), listener).unwrap();
        let mut state = index.state.lock();
        for record in &opened.found.records {
            let (name, location) = (record.name, Some(record.location));
            state.entries.insert(name.digest, IndexEntry { name, location });
        }
        drop(state);
        Self { opened, index: Arc::clone(index), ticket: 0 }
    }

    /// Writes a block; its entry becomes durable when the writer says so.
    pub(super) fn write_block(&mut self, name: &BlockName) {
        let mut state = self.index.state.lock();
        // A copy that was durable is so until the new one is.
        state.entries.entry(name.digest).or_insert(IndexEntry { name: *name, location: None });
        // From now on it may be there again.
        state.removed.remove(&name.digest);
        drop(state);
        let (index, name) = (Arc::clone(&self.index), *name);
        let on_durable = move |result: Result<DiskLocation, _>| {
            let mut state = index.state.lock();
            match result {
                Ok(location) => {
                    if let Some(entry) = state.entries.get_mut(&name.digest) {
                        entry.location = Some(location);
                    }
                    state.removed.remove(&name.digest);
                }
                Err(_) => {
                    state.failures += 1;
                    if state.entries.get(&name.digest).is_some_and(|e| e.location.is_none()) {
                        state.drop_subtree(name.digest);
                    }
                }
            }
        };
        self.push_draft(block_draft(&name), WriteCompletion::Caller(Box::new(on_durable)));
    }

    /// Writes a tombstone.
    pub(super) fn remove_block(&mut self, name: &BlockName) {
        self.index.state.lock().drop_subtree(name.digest);
        let meta = RecordMeta { name: *name, key: Box::default() };
        let draft = crate::tier::draft_plain(crate::RecordKind::Tombstone, meta, None).unwrap();
        let (index, digest) = (Arc::clone(&self.index), name.digest);
        let on_durable = move |result: Result<DiskLocation, _>| {
            if let Ok(tombstone) = result {
                let mut state = index.state.lock();
                state.removed.insert(digest);
                // Written before the tombstone and acknowledged after the entry was made anew.
                if let Some(entry) = state.entries.get_mut(&digest) {
                    entry.location = entry.location.filter(|at| at.serial > tombstone.serial);
                }
            }
        };
        self.push_draft(draft, WriteCompletion::Caller(Box::new(on_durable)));
    }

    pub(super) fn push_draft(&mut self, draft: RecordDraft, completion: WriteCompletion) {
        self.ticket += 1;
        let pending = PendingRecord::new(draft.seal_record(), completion, self.ticket);
        self.opened.writer.write_pending(pending, self.ticket);
    }

    pub(super) fn sync_records(&mut self) {
        self.opened.writer.sync_pending();
    }

    /// Panics unless each durable entry gives its content.
    pub(super) fn assert_readable(&self) {
        let state = self.index.state.lock();
        for entry in state.entries.values() {
            if let Some(location) = entry.location {
                let part = self.opened.shared.read_record(&location).unwrap();
                assert_content(&part, &entry.name);
            }
        }
    }
}
