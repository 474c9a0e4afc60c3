//! Reclaims the oldest segment: copies what is kept to the front, tells what goes, removes the
//! file. The writer's thread.

use crate::aligned::AlignedBytes;
use crate::draft::SealedRecord;
use crate::files::StoredFile;
use crate::levels::LevelCells;
use crate::name::{KeepChoice, LiveRecord, RecordKind};
use crate::recover::DescriptionKey;
use crate::scan::{SegmentRef, read_outline, read_verified, scan_records};
use crate::segment::RecordEntry;
use crate::table::SegmentInfo;
use crate::writer::{PendingRecord, SegmentWriter, WriteCompletion};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

/// Whether records of a segment may be copied before it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyPolicy {
    /// Those that the index chose, while there is room.
    Chosen,
    /// None: the disk is full.
    Never,
}

/// The fate of a segment's block records.
#[derive(Debug, Default)]
struct ReclaimPlan {
    copied: Vec<LiveRecord>,
    gone: Vec<LiveRecord>,
}

impl SegmentWriter {
    /// Reclaims the oldest segment but the open one. False if there is none.
    pub(crate) fn reclaim_oldest(&mut self, policy: CopyPolicy) -> bool {
        let open = self.open.as_ref().map(|open| open.number);
        let Some((number, info)) = self.shared.table.find_oldest(open) else {
            return false;
        };
        self.is_reclaiming = true;
        match self.shared.table.open_segment(number) {
            Ok(Some(file)) => self.empty_segment(number, info, &file, policy),
            // Its entries turn into misses when they are read.
            Ok(None) | Err(_) => LevelCells::add_to(&self.level_cells().errors_file, 1),
        }
        self.discard_segment(number);
        LevelCells::add_to(&self.level_cells().reclaimed_segments, 1);
        self.is_reclaiming = false;
        true
    }

    fn empty_segment(
        &mut self,
        number: u64,
        info: SegmentInfo,
        file: &Arc<dyn StoredFile>,
        policy: CopyPolicy,
    ) {
        let entries = match self.list_entries(number, info, &**file) {
            Ok(entries) => entries,
            Err(_) => {
                LevelCells::add_to(&self.level_cells().errors_file, 1);
                Vec::new()
            }
        };
        if policy == CopyPolicy::Chosen {
            let kept = entries.iter().filter(|entry| self.is_description(entry));
            for entry in kept.collect::<Vec<_>>() {
                self.copy_record(&**file, entry, WriteCompletion::Nobody);
            }
        }
        let is_block = |entry: &&RecordEntry| entry.kind == RecordKind::Block;
        let live = |entry: &RecordEntry| LiveRecord { name: entry.name, location: entry.location };
        let blocks: Vec<LiveRecord> = entries.iter().filter(is_block).map(live).collect();
        let mut plan = self.plan_blocks(&blocks, info.len, policy);
        for from in std::mem::take(&mut plan.copied) {
            let entry =
                RecordEntry { kind: RecordKind::Block, name: from.name, location: from.location };
            self.copy_record(&**file, &entry, WriteCompletion::Move { from });
        }
        self.sync_pending();
        plan.gone.append(&mut self.failed_moves);
        for record in &plan.gone {
            self.lost.add_block(&record.name, self.last_ticket);
        }
        if !plan.gone.is_empty() {
            LevelCells::add_to(&self.level_cells().reclaimed_records, plan.gone.len() as u64);
            self.listener.records_gone(&plan.gone);
        }
        if policy == CopyPolicy::Never {
            // A description whose record went can no longer be read.
            let mut descriptions = self.shared.descriptions.lock();
            descriptions.retain(|_, location| location.segment != number);
        }
    }

    fn list_entries(
        &self,
        number: u64,
        info: SegmentInfo,
        file: &dyn StoredFile,
    ) -> io::Result<Vec<RecordEntry>> {
        let segment = SegmentRef { file, identity: &self.shared.identity, number };
        let outline = read_outline(segment)?;
        Ok(match outline.footer {
            Some(entries) => entries,
            None => scan_records(segment, outline.len, info.durable_end).records,
        })
    }

    /// Whether a record is a scope's or calibration's newest.
    fn is_description(&self, entry: &RecordEntry) -> bool {
        let (kind, name) = (entry.kind, &entry.name);
        let key = DescriptionKey { kind, scope: name.scope, digest: name.digest };
        self.shared.descriptions.lock().get(&key) == Some(&entry.location)
    }

    /// Pinned records first, then touched ones, while they are a small part of the segment; none
    /// whose parent goes.
    fn plan_blocks(&self, blocks: &[LiveRecord], len: u64, policy: CopyPolicy) -> ReclaimPlan {
        let mut choices = self.listener.choose_kept(blocks);
        choices.resize(blocks.len(), KeepChoice::Drop);
        let mut budget = match policy {
            CopyPolicy::Chosen => len * u64::from(self.shared.settings.reinsert_percent) / 100,
            CopyPolicy::Never => 0,
        };
        let mut is_copied = vec![false; blocks.len()];
        for wanted in [KeepChoice::Pinned, KeepChoice::Copy] {
            for (index, record) in blocks.iter().enumerate() {
                let bytes = record.location.disk_bytes();
                if choices[index] == wanted && bytes <= budget {
                    budget -= bytes;
                    is_copied[index] = true;
                }
            }
        }
        let (mut plan, mut lineages) = (ReclaimPlan::default(), HashSet::new());
        for (index, record) in blocks.iter().enumerate() {
            let key = (record.name.scope, record.name.parent_lineage);
            let is_orphan = record.name.position > 0 && lineages.contains(&key);
            if is_copied[index] && !is_orphan {
                plan.copied.push(*record);
            } else if choices[index] != KeepChoice::Stale {
                lineages.insert((record.name.scope, record.name.lineage));
                plan.gone.push(*record);
            }
        }
        plan
    }

    /// Copies a record to the open segment, if it is sound and fits there.
    fn copy_record(
        &mut self,
        file: &dyn StoredFile,
        entry: &RecordEntry,
        completion: WriteCompletion,
    ) {
        let record = self.read_sealed(file, entry);
        let has_room =
            self.open.as_ref().is_some_and(|open| open.has_room(entry.location.disk_bytes()));
        match (record, completion) {
            (Some(record), completion) if has_room => {
                let pending = PendingRecord::new(record, completion, self.last_ticket);
                self.place_record(pending);
            }
            (_, WriteCompletion::Move { from }) => {
                self.lost.add_block(&from.name, self.last_ticket);
                self.failed_moves.push(from);
            }
            (..) => {
                let name = &entry.name;
                let key =
                    DescriptionKey { kind: entry.kind, scope: name.scope, digest: name.digest };
                self.shared.descriptions.lock().remove(&key);
            }
        }
    }

    fn read_sealed(&self, file: &dyn StoredFile, entry: &RecordEntry) -> Option<SealedRecord> {
        let number = entry.location.segment;
        let segment = SegmentRef { file, identity: &self.shared.identity, number };
        let bytes: AlignedBytes = match read_verified(segment, entry) {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(_)) => {
                LevelCells::add_to(&self.level_cells().corrupt_records, 1);
                return None;
            }
            Err(_) => {
                LevelCells::add_to(&self.level_cells().errors_read, 1);
                return None;
            }
        };
        let place = self.shared.identity.place_at(number, entry.begin_bytes());
        SealedRecord::from_bytes(bytes, &place).ok()
    }
}
