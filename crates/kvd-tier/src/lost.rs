//! Lineages that are not on disk though records behind them may still wait in the queue. Pure.

use crate::name::{BlockName, ScopeId};
use std::collections::{HashMap, VecDeque};

/// Blocks that failed or went, until the records that were queued by then are through. What is
/// queued later comes from a caller who was told.
#[derive(Debug, Default)]
pub(crate) struct LostLineages {
    lost: HashMap<(ScopeId, u128), u64>,
    order: VecDeque<LostLineage>,
}

#[derive(Clone, Copy, Debug)]
struct LostLineage {
    key: (ScopeId, u128),
    // The last ticket that may be affected.
    until: u64,
}

impl LostLineages {
    /// Notes that a block is not on disk, for records with tickets up to `until`.
    pub(crate) fn add_block(&mut self, name: &BlockName, until: u64) {
        let key = (name.scope, name.lineage);
        self.lost.insert(key, until);
        self.order.push_back(LostLineage { key, until });
    }

    /// Forgets what no record with this ticket or a later one can depend on.
    pub(crate) fn forget_before(&mut self, ticket: u64) {
        while let Some(oldest) = self.order.front().copied().filter(|lost| lost.until < ticket) {
            self.order.pop_front();
            if self.lost.get(&oldest.key) == Some(&oldest.until) {
                self.lost.remove(&oldest.key);
            }
        }
    }

    /// A block is on disk again.
    pub(crate) fn remove_block(&mut self, name: &BlockName) {
        self.lost.remove(&(name.scope, name.lineage));
    }

    /// Whether the parent of a block is lost.
    pub(crate) fn has_parent_of(&self, name: &BlockName) -> bool {
        name.position > 0 && self.lost.contains_key(&(name.scope, name.parent_lineage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(lineage: u128, parent_lineage: u128) -> BlockName {
        BlockName { lineage, parent_lineage, position: 1, ..BlockName::default() }
    }

    #[test]
    fn lost_parent_holds_until_its_queue_is_through() {
        let mut lost = LostLineages::default();
        lost.add_block(&block(1, 0), 5);
        assert!(lost.has_parent_of(&block(2, 1)));
        assert!(!lost.has_parent_of(&block(3, 2)));
        lost.forget_before(5);
        assert!(lost.has_parent_of(&block(2, 1)));
        lost.forget_before(6);
        assert!(!lost.has_parent_of(&block(2, 1)));
        assert!(lost.order.is_empty() && lost.lost.is_empty());
    }

    #[test]
    fn later_loss_of_one_lineage_outlives_the_earlier_one() {
        let mut lost = LostLineages::default();
        lost.add_block(&block(1, 0), 5);
        lost.add_block(&block(1, 0), 9);
        lost.forget_before(7);
        assert!(lost.has_parent_of(&block(2, 1)));
        lost.remove_block(&block(1, 0));
        assert!(!lost.has_parent_of(&block(2, 1)));
    }
}
