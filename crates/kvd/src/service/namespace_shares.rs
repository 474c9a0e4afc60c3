//! Each namespace's share of the bytes in flight: without one, a namespace with many connections
//! would leave others nothing.

use super::budget::ByteBudget;
use crate::config::Config;
use kvd_core::Namespace;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Most budgets that are kept before those that nobody uses are looked for.
const KEPT_MIN: usize = 64;

/// A budget for each namespace that has bytes in flight.
pub(super) struct NamespaceShares {
    /// None where a share is no less than what there is.
    max_bytes: Option<u64>,
    kept: Mutex<KeptShares>,
}

#[derive(Default)]
struct KeptShares {
    by_name: HashMap<Namespace, ByteBudget>,
    /// How many there may be before the next look.
    most: usize,
}

impl NamespaceShares {
    /// Shares as configured.
    pub(super) fn new(config: &Config) -> Self {
        Self::of_bytes(config.namespace_bytes_max, config.inflight_bytes_max)
    }

    /// Shares of so many bytes of that many in all.
    fn of_bytes(max_bytes: usize, all_bytes: usize) -> Self {
        let max_bytes = (max_bytes < all_bytes).then_some(max_bytes as u64);
        Self { max_bytes, kept: Mutex::default() }
    }

    /// A namespace's budget; none where it may take all.
    pub(super) fn find_share(&self, name: &Namespace) -> Option<ByteBudget> {
        let max_bytes = self.max_bytes?;
        let kept = &mut *self.kept.lock();
        if let Some(budget) = kept.by_name.get(name) {
            return Some(budget.clone());
        }
        if kept.by_name.len() >= kept.most.max(KEPT_MIN) {
            kept.by_name.retain(|_, budget| budget.is_shared());
            kept.most = 2 * kept.by_name.len();
        }
        let budget = ByteBudget::new("limits.namespace_bytes_max", max_bytes);
        kept.by_name.insert(name.clone(), budget.clone());
        Some(budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_one_budget_while_it_is_used_and_unused_ones_go() {
        let shares = NamespaceShares::of_bytes(4 << 10, 8 << 10);
        let share = |name: &str| shares.find_share(&Namespace::new(name).unwrap()).unwrap();
        let first = share("first");
        for number in 0..10 * KEPT_MIN {
            drop(share(&format!("other-{number}")));
        }
        assert!(shares.kept.lock().by_name.len() <= KEPT_MIN, "those that nobody uses are gone");
        assert!(first.is_shared(), "it is the same as before");
        let all = NamespaceShares::of_bytes(8 << 10, 8 << 10);
        assert!(all.find_share(&Namespace::new("first").unwrap()).is_none());
    }
}
