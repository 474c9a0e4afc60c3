//! Series of quotas: they come and go with the quotas that operators set.

use super::group::GroupBuilder;
use super::{Metric, Metrics};
use kvd_store::QuotaKind;

/// One quota of one namespace right now.
pub(crate) struct QuotaLevel<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) kind: QuotaKind,
    pub(crate) used: u64,
    pub(crate) allowed: u64,
    pub(crate) refused: u64,
}

/// The share of one namespace.
pub(crate) struct NamespaceWeight<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) weight: u32,
}

impl Metrics {
    /// Shows these quotas and weights from now on, and no others.
    pub(crate) fn show_quotas(&self, levels: &[QuotaLevel<'_>], weights: &[NamespaceWeight<'_>]) {
        let mut group = GroupBuilder::new(&[]);
        for level in levels {
            let labels = [("namespace", level.namespace), ("quota", level.kind.quota_name())];
            group.gauge(Metric::QuotaUsed, &labels).set(level.used as f64);
            group.gauge(Metric::QuotaAllowed, &labels).set(level.allowed as f64);
            group.counter(Metric::QuotaRefusalsTotal, &labels).absolute(level.refused);
        }
        for NamespaceWeight { namespace, weight } in weights {
            let labels = [("namespace", *namespace)];
            group.gauge(Metric::NamespaceWeight, &labels).set(f64::from(*weight));
        }
        *self.quotas.lock() = Some(group.build_group());
    }
}
