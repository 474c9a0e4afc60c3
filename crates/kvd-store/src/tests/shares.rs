//! Shares of the cache: what tenants can do to one another.

use super::harness::{Bench, shape};
use super::prefixes::{PAGE, bench, chain, keys, values};
use crate::{CacheLimits, ModelShape};
use kvd_core::Namespace;
use std::sync::Arc;

/// A namespace's shape beside the bench's own.
fn tenant(id: u64) -> Arc<ModelShape> {
    shape(id, PAGE, 0, 0)
}

/// Publishes a text of another model and closes the sequence.
fn cache_for(b: &Bench, model: &Arc<ModelShape>, text: &str) -> usize {
    let (ns, store) = (&model.namespace, &b.store);
    let id = store.open_sequence(Arc::clone(model)).unwrap();
    for layer in 0..2 {
        let appended =
            store.begin_append(ns, id, kvd_core::LayerIndex(layer), 0, 4 * text.len() as u32, 7);
        match appended.unwrap() {
            crate::BegunAppend::Ticket(ticket) => b.finish(ticket, &values(text), |_| false),
            crate::BegunAppend::Replayed { .. } => unreachable!(),
        };
    }
    let keys = keys(text);
    let ticket = store.begin_publish(ns, id, 0, &chain(&keys)).unwrap();
    let published = b.finish_publish(ticket, |_| false);
    store.close_sequence(ns, id).unwrap();
    published.published
}

#[test]
fn a_tenant_cannot_push_another_below_its_share() {
    for (weight, parts) in [(1, 2), (3, 4)] {
        let b = bench(0, 0);
        b.cache("a");
        let bytes_max = 16 * b.cache_usage().bytes;
        let limits = CacheLimits { bytes_max, ..CacheLimits::default() };
        let table = limits.quotas.table.clone();
        let b = Bench::cached(1 << 20, tenant(1), limits);
        // The cache follows a weight that is set while it serves.
        table.set_weight(&namespace_of(2), weight);
        let (one, two) = (tenant(1), tenant(2));
        // The first fills the cache; the second takes its share and no more; the first comes again.
        for round in 0..3 {
            for letter in 'a'..='p' {
                cache_for(&b, &one, &format!("{round}{letter}"));
            }
            for letter in 'a'..='p' {
                cache_for(&b, &two, &format!("{round}{letter}"));
            }
            let held = b.store.prefix_index().tenant_bytes(&two.namespace);
            let share = bytes_max * (parts - 1) / parts;
            let block = bytes_max / 16;
            assert!(held.abs_diff(share) <= 2 * block, "{held} of {bytes_max}, weight {weight}");
        }
        b.store.prefix_index().check_blocks();
    }
}

fn namespace_of(id: u64) -> Namespace {
    tenant(id).namespace.clone()
}
