//! Which scopes are whose: blocks on disk of models that are not registered, and the indexes of
//! those that are.
//!
//! Owns [`DiskCatalog`]. One mutex, held to move or to look at a scope; an index's lock is taken
//! without it. The tier's writer calls it.

use kvd_store::{BlockDigests, DiskBlock, DiskPlace, PrefixIndex, RecordUse};
use kvd_tier::{
    BlockName, DiskLocation, KeepChoice, LiveRecord, ReclaimListener, RecoveredRecords, ScopeId,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// A scope's blocks, or who has them.
enum ScopeState {
    /// By lineage.
    Unclaimed(HashMap<u128, DiskBlock>),
    Claimed(Arc<PrefixIndex>),
}

/// All scopes that have blocks on disk or a model.
#[derive(Default)]
pub(crate) struct DiskCatalog {
    scopes: Mutex<HashMap<ScopeId, ScopeState>>,
}

pub(crate) fn digests_of(name: &BlockName) -> BlockDigests {
    let BlockName { digest, lineage, parent_lineage, position, .. } = *name;
    BlockDigests { digest, lineage, parent_lineage, position }
}

pub(crate) fn name_of(scope: ScopeId, digests: &BlockDigests) -> BlockName {
    let BlockDigests { digest, lineage, parent_lineage, position } = *digests;
    BlockName { scope, digest, lineage, parent_lineage, position }
}

pub(crate) fn place_of(location: &DiskLocation) -> DiskPlace {
    DiskPlace(location.to_words())
}

fn block_of(record: &LiveRecord) -> DiskBlock {
    DiskBlock {
        digests: digests_of(&record.name),
        place: place_of(&record.location),
        bytes: record.location.disk_bytes(),
    }
}

impl DiskCatalog {
    /// Takes what was found at the start.
    pub(super) fn add_recovered(&self, found: &RecoveredRecords) {
        let mut scopes = self.scopes.lock();
        for record in &found.records {
            let state = scopes.entry(record.name.scope);
            let state = state.or_insert_with(|| ScopeState::Unclaimed(HashMap::new()));
            if let ScopeState::Unclaimed(blocks) = state {
                blocks.insert(record.name.lineage, block_of(record));
            }
        }
    }

    /// Gives a scope to an index, with its blocks, parents first; none where another has it.
    pub(super) fn claim_scope(
        &self,
        scope: ScopeId,
        index: &Arc<PrefixIndex>,
    ) -> Option<Vec<DiskBlock>> {
        let mut scopes = self.scopes.lock();
        if matches!(scopes.get(&scope), Some(ScopeState::Claimed(_))) {
            return None;
        }
        let before = scopes.insert(scope, ScopeState::Claimed(Arc::clone(index)));
        let mut blocks: Vec<DiskBlock> = match before {
            Some(ScopeState::Unclaimed(blocks)) => blocks.into_values().collect(),
            _ => Vec::new(),
        };
        blocks.sort_unstable_by_key(|block| block.digests.position);
        Some(blocks)
    }

    /// Takes a scope back whose model is no more.
    pub(super) fn return_scope(&self, scope: ScopeId, blocks: Vec<DiskBlock>) {
        let blocks = blocks.into_iter().map(|block| (block.digests.lineage, block)).collect();
        self.scopes.lock().insert(scope, ScopeState::Unclaimed(blocks));
    }

    fn index_of(&self, scope: ScopeId) -> Option<Arc<PrefixIndex>> {
        match self.scopes.lock().get(&scope) {
            Some(ScopeState::Claimed(index)) => Some(Arc::clone(index)),
            _ => None,
        }
    }

    fn with_unclaimed<T>(
        &self,
        scope: ScopeId,
        act: impl FnOnce(&mut HashMap<u128, DiskBlock>) -> T,
    ) -> Option<T> {
        match self.scopes.lock().get_mut(&scope) {
            Some(ScopeState::Unclaimed(blocks)) => Some(act(blocks)),
            _ => None,
        }
    }

    fn choose_for(&self, record: &LiveRecord) -> KeepChoice {
        let block = block_of(record);
        if let Some(index) = self.index_of(record.name.scope) {
            return match index.find_record_uses(&[(block.digests, block.place)])[0] {
                RecordUse::Stale => KeepChoice::Stale,
                RecordUse::Idle => KeepChoice::Drop,
                RecordUse::InPool => KeepChoice::Copy,
                RecordUse::Held => KeepChoice::Pinned,
            };
        }
        let is_it = |blocks: &mut HashMap<u128, DiskBlock>| {
            blocks.get(&block.digests.lineage).is_some_and(|known| known.place == block.place)
        };
        let known = self.with_unclaimed(record.name.scope, is_it).unwrap_or(false);
        if known { KeepChoice::Drop } else { KeepChoice::Stale }
    }
}

impl ReclaimListener for DiskCatalog {
    fn choose_kept(&self, records: &[LiveRecord]) -> Vec<KeepChoice> {
        records.iter().map(|record| self.choose_for(record)).collect()
    }

    fn record_moved(&self, name: &BlockName, from: &DiskLocation, to: &DiskLocation) {
        let (from, to) = (place_of(from), place_of(to));
        if let Some(index) = self.index_of(name.scope) {
            return index.move_record(&digests_of(name), from, to);
        }
        self.with_unclaimed(name.scope, |blocks| {
            let known = blocks.get_mut(&name.lineage).filter(|block| block.place == from);
            known.into_iter().for_each(|block| block.place = to);
        });
    }

    fn records_gone(&self, records: &[LiveRecord]) {
        let mut by_scope: HashMap<ScopeId, Vec<DiskBlock>> = HashMap::new();
        for record in records {
            by_scope.entry(record.name.scope).or_default().push(block_of(record));
        }
        for (scope, gone) in by_scope {
            if let Some(index) = self.index_of(scope) {
                let gone: Vec<_> = gone.iter().map(|of| (of.digests, of.place)).collect();
                index.forget_records(&gone);
                continue;
            }
            self.with_unclaimed(scope, |blocks| {
                for of in &gone {
                    let lineage = of.digests.lineage;
                    if blocks.get(&lineage).is_some_and(|known| known.place == of.place) {
                        blocks.remove(&lineage);
                    }
                }
            });
        }
    }
}
