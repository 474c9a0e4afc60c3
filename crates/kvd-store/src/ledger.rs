//! Live totals by model: what slots of a model hold, kept by the slots themselves.
//!
//! Owns [`ModelLedger`] (atomic counters of one model) and [`SlotAccount`] (one slot's share of
//! them, taken off in its drop). A slot that several sequences share has one account, so it is
//! counted once. No locks: a snapshot taken while others work may mix moments, at rest it is exact.

use kvd_core::{PackedBytes, StoredBytes};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// The holdings of all sequences of a model; shared blocks are counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelUsage {
    /// Open sequences.
    pub sequences: u64,
    /// Contents of their slots, and of slots that readers still pin.
    pub stored: StoredBytes,
}

/// The counters of one model.
#[derive(Debug, Default)]
pub(crate) struct ModelLedger {
    sequences: AtomicU64,
    parts: [AtomicU64; StoredBytes::PARTS.len()],
}

impl ModelLedger {
    pub(crate) fn sequence_opened(&self) {
        self.sequences.fetch_add(1, Relaxed);
    }

    pub(crate) fn sequence_closed(&self) {
        self.sequences.fetch_sub(1, Relaxed);
    }

    pub(crate) fn read_usage(&self) -> ModelUsage {
        let parts = std::array::from_fn(|i| self.parts[i].load(Relaxed));
        ModelUsage {
            sequences: self.sequences.load(Relaxed),
            stored: StoredBytes::from_array(parts),
        }
    }

    fn add_bytes(&self, amount: StoredBytes) {
        for (part, n) in self.parts.iter().zip(amount.to_array()) {
            if n > 0 {
                part.fetch_add(n, Relaxed);
            }
        }
    }

    fn subtract_bytes(&self, amount: StoredBytes) {
        for (part, n) in self.parts.iter().zip(amount.to_array()) {
            if n > 0 {
                part.fetch_sub(n, Relaxed);
            }
        }
    }
}

/// One slot's share of a ledger.
#[derive(Debug)]
pub(crate) struct SlotAccount {
    ledger: Arc<ModelLedger>,
    /// The part that never changes: everything but the values of a raw slot's rows.
    fixed: StoredBytes,
    values_per_row: u64,
    rows: AtomicU32,
}

impl SlotAccount {
    /// A packed block.
    pub(crate) fn new_packed(
        ledger: &Arc<ModelLedger>,
        parts: &PackedBytes,
        reserved_bytes: u64,
    ) -> Self {
        Self::new(ledger, StoredBytes::count_packed(parts, reserved_bytes), 0)
    }

    /// A raw slot without rows so far.
    pub(crate) fn new_raw(
        ledger: &Arc<ModelLedger>,
        values_per_row: u64,
        reserved_bytes: u64,
    ) -> Self {
        Self::new(ledger, StoredBytes::count_raw(0, reserved_bytes), values_per_row)
    }

    fn new(ledger: &Arc<ModelLedger>, fixed: StoredBytes, values_per_row: u64) -> Self {
        ledger.add_bytes(fixed);
        Self { ledger: Arc::clone(ledger), fixed, values_per_row, rows: AtomicU32::new(0) }
    }

    /// Rows of a raw slot that somebody may read.
    pub(crate) fn rows(&self) -> u32 {
        self.rows.load(Relaxed)
    }

    /// Sets [`SlotAccount::rows`].
    pub(crate) fn set_rows(&self, rows: u32) {
        let before = self.rows.swap(rows, Relaxed);
        self.ledger.add_bytes(self.count_rows(rows));
        self.ledger.subtract_bytes(self.count_rows(before));
    }

    /// Values of [`SlotAccount::rows`], in number.
    pub(crate) fn row_values(&self) -> u64 {
        u64::from(self.rows()) * self.values_per_row
    }

    fn count_rows(&self, rows: u32) -> StoredBytes {
        StoredBytes::count_raw(u64::from(rows) * self.values_per_row, 0)
    }
}

impl Drop for SlotAccount {
    fn drop(&mut self) {
        self.ledger.subtract_bytes(self.count_rows(self.rows()));
        self.ledger.subtract_bytes(self.fixed);
    }
}
