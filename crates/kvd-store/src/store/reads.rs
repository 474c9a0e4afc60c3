//! Reads: ranges of one layer that are pinned until they are read.

use super::{EntryLayer, SequenceStore};
use crate::error::StoreError;
use crate::pinned::{ChosenRange, PinnedRange};
use kvd_core::{LayerIndex, Namespace, SequenceId};
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

impl SequenceStore {
    /// Pins tokens of one layer for reading. `length` is how many tokens the read may see, all
    /// that are stored when absent; `range` lies within them, and an open end means to their end.
    ///
    /// # Errors
    /// [`StoreError::RangeNotStored`] when `length` or `range` reaches past what is stored,
    /// [`StoreError::InvalidRange`] when `range` ends before it starts;
    /// [`StoreError::LayerOnItsWay`] or [`StoreError::PrefixLost`] of a prefix that comes back.
    pub fn pin_range(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        range: impl RangeBounds<u32>,
        length: Option<u32>,
    ) -> Result<PinnedRange, StoreError> {
        self.pin_chosen(ns, id, layer, length, |length| {
            let start = match range.start_bound() {
                Bound::Included(&start) => start,
                Bound::Excluded(&before) => before.saturating_add(1),
                Bound::Unbounded => 0,
            };
            let end = match range.end_bound() {
                Bound::Included(&last) => last.saturating_add(1),
                Bound::Excluded(&end) => end,
                Bound::Unbounded => length.max(start),
            };
            Ok((start..end).into())
        })
    }

    /// As [`SequenceStore::pin_range`], of a range that follows from how many tokens the read may
    /// see. `choose` is called with the layer locked: it must be short and take no lock.
    ///
    /// # Errors
    /// As [`SequenceStore::pin_range`], or as `choose`.
    pub fn pin_chosen<E: From<StoreError>>(
        &self,
        ns: &Namespace,
        id: SequenceId,
        layer: LayerIndex,
        length: Option<u32>,
        choose: impl FnOnce(u32) -> Result<ChosenRange, E>,
    ) -> Result<PinnedRange, E> {
        let EntryLayer { entry, layer: index } = self.entry_and_layer(ns, id, layer)?;
        let state = entry.layer_mutex(index).lock();
        let stored = state.length;
        let length = length.unwrap_or(stored);
        if length > stored {
            return Err(StoreError::RangeNotStored { asked: length, stored }.into());
        }
        let chosen = choose(length)?;
        let Range { start, end } = chosen.tokens;
        if start > end {
            return Err(StoreError::InvalidRange { start, end }.into());
        }
        if end > length {
            return Err(StoreError::RangeNotStored { asked: end, stored: length }.into());
        }
        let views = state.pin_range(&entry.model, chosen);
        drop(state);
        Ok(PinnedRange { model: Arc::clone(&entry.model), length, range: start..end, views })
    }
}
