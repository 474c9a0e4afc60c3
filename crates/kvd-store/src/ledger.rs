//! Live totals by model: what slots of a model hold, kept by the slots themselves.
//!
//! Owns [`ModelLedger`] (atomic counters of one model) and [`SlotAccount`] (one slot's share of
//! them, taken off in its drop). A slot that several sequences share has one account, so it is
//! counted once. No locks: a snapshot taken while others work may mix moments, at rest it is exact.

use std::ops::{AddAssign, SubAssign};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// The parts of one packed block; bytes unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedBytes {
    /// Quantized codes, or their entropy-coded form.
    pub codes: u64,
    /// Scales, zero points, norms.
    pub scales: u64,
    /// Row and stream offsets.
    pub offsets: u64,
    /// Page headers and checksums.
    pub header: u64,
    /// Bytes of the K pages.
    pub key: u64,
    /// Bytes of the V pages.
    pub value: u64,
    /// K and V values that the pages stand for, in number.
    pub values: u64,
}

/// All that is held, by part; bytes unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBytes {
    /// K and V values in packed blocks, in number.
    pub packed_values: u64,
    /// Pool memory of packed blocks: the four parts below and the rounding to granules.
    pub packed_bytes: u64,
    /// Codes of packed blocks.
    pub code_bytes: u64,
    /// Scales of packed blocks.
    pub scale_bytes: u64,
    /// Offsets of packed blocks.
    pub offset_bytes: u64,
    /// Headers of packed blocks.
    pub header_bytes: u64,
    /// K and V values held in the stored precision, in number.
    pub raw_values: u64,
    /// Pool memory of raw slots, with the rows that are still free and the rounding to granules.
    pub raw_bytes: u64,
    /// K pages of packed blocks.
    pub packed_key_bytes: u64,
    /// V pages of packed blocks.
    pub packed_value_bytes: u64,
}

/// The holdings of all sequences of a model; shared blocks are counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelUsage {
    /// Open sequences.
    pub sequences: u64,
    /// Contents of their slots, and of slots that readers still pin.
    pub stored: StoredBytes,
}

const FIELDS: usize = 10;

impl StoredBytes {
    /// A packed block that takes `reserved_bytes` from the pool.
    pub(crate) fn count_packed(parts: &PackedBytes, reserved_bytes: u64) -> Self {
        Self {
            packed_values: parts.values,
            packed_bytes: reserved_bytes,
            code_bytes: parts.codes,
            scale_bytes: parts.scales,
            offset_bytes: parts.offsets,
            header_bytes: parts.header,
            packed_key_bytes: parts.key,
            packed_value_bytes: parts.value,
            ..Self::default()
        }
    }

    /// A raw slot that takes `reserved_bytes` and holds `values` values.
    pub(crate) fn count_raw(values: u64, reserved_bytes: u64) -> Self {
        Self { raw_values: values, raw_bytes: reserved_bytes, ..Self::default() }
    }

    fn to_array(self) -> [u64; FIELDS] {
        [
            self.packed_values,
            self.packed_bytes,
            self.code_bytes,
            self.scale_bytes,
            self.offset_bytes,
            self.header_bytes,
            self.raw_values,
            self.raw_bytes,
            self.packed_key_bytes,
            self.packed_value_bytes,
        ]
    }

    fn from_array(array: [u64; FIELDS]) -> Self {
        let [
            packed_values,
            packed_bytes,
            code_bytes,
            scale_bytes,
            offset_bytes,
            header_bytes,
            raw_values,
            raw_bytes,
            packed_key_bytes,
            packed_value_bytes,
        ] = array;
        Self {
            packed_values,
            packed_bytes,
            code_bytes,
            scale_bytes,
            offset_bytes,
            header_bytes,
            raw_values,
            raw_bytes,
            packed_key_bytes,
            packed_value_bytes,
        }
    }
}

impl AddAssign for StoredBytes {
    fn add_assign(&mut self, other: Self) {
        let mut sum = self.to_array();
        for (s, o) in sum.iter_mut().zip(other.to_array()) {
            *s += o;
        }
        *self = Self::from_array(sum);
    }
}

impl SubAssign for StoredBytes {
    fn sub_assign(&mut self, other: Self) {
        let mut rest = self.to_array();
        for (r, o) in rest.iter_mut().zip(other.to_array()) {
            *r -= o;
        }
        *self = Self::from_array(rest);
    }
}

/// The counters of one model.
#[derive(Debug, Default)]
pub(crate) struct ModelLedger {
    sequences: AtomicU64,
    parts: [AtomicU64; FIELDS],
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
