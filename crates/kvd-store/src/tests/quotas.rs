//! Quotas: who has as much as he may is refused, and others are not.

use super::harness::{Bench, namespace, shape};
use super::prefixes::PAGE;
use crate::{
    AppendTicket, BegunAppend, CacheLimits, DeviceQuotas, ModelShape, PublishStop, QuotaKind,
    QuotaLimits, QuotaTable, StoreError,
};
use kvd_core::{Coded, ErrorCode, LayerIndex, SequenceId};
use std::sync::Arc;

/// Bytes of a block of a layer, in rows.
const BLOCK: u64 = 192;

/// A store that counts, with a cache; blocks stay rows where the window is long.
fn counting_bench(capacity: u64, recent: u32) -> Bench {
    let Bench { store, pool, model, bytes } = Bench::new(capacity, shape(1, PAGE, 0, recent));
    let quotas = DeviceQuotas { table: QuotaTable::new(1), device: 0 };
    let cache = CacheLimits { quotas: quotas.clone(), ..CacheLimits::default() };
    Bench { store: store.with_quotas(quotas).with_cache(cache), pool, model, bytes }
}

impl Bench {
    fn quota_table(&self) -> &Arc<QuotaTable> {
        self.store.quota_table()
    }

    fn set_limit(&self, name: &str, kind: QuotaKind, limit: u64) {
        let mut limits = QuotaLimits::default();
        limits.set_limit(kind, Some(limit));
        self.quota_table().set_limits(&namespace(name), &limits);
    }

    fn used_of(&self, name: &str, kind: QuotaKind) -> u64 {
        self.pool.finish_reclaim();
        self.quota_table().open_account(&namespace(name)).used_amount(kind)
    }

    /// Reserves another block of the first layer.
    fn append_block(
        &self,
        model: &Arc<ModelShape>,
        id: SequenceId,
        block: u32,
    ) -> Result<AppendTicket, StoreError> {
        let (ns, start) = (&model.namespace, block * PAGE);
        match self.store.begin_append(ns, id, LayerIndex(0), start, PAGE, 7)? {
            BegunAppend::Ticket(ticket) => Ok(ticket),
            BegunAppend::Replayed { .. } => panic!("replayed"),
        }
    }

    /// Appends blocks until one is refused; how many there were, and why no more.
    fn append_all(&self, model: &Arc<ModelShape>, id: SequenceId) -> (u32, StoreError) {
        for block in 0.. {
            match self.append_block(model, id, block) {
                Ok(ticket) => {
                    self.finish(ticket, &[7; PAGE as usize], |_| false);
                }
                Err(error) => return (block, error),
            }
        }
        unreachable!("a pool without an end")
    }
}

#[test]
fn a_namespace_at_its_quota_of_bytes_is_refused_and_another_goes_on() {
    let b = counting_bench(1 << 16, 10_000);
    let other = shape(2, PAGE, 0, 10_000);
    b.set_limit("ns1", QuotaKind::PoolBytes, 4 * BLOCK + 100);
    let id = b.open();
    let (blocks, error) = b.append_all(&b.model.clone(), id);
    assert_eq!((blocks, error.code()), (4, ErrorCode::QuotaExceeded));
    assert!(error.retry_hint().is_some(), "{error}");
    let text = error.to_string();
    assert!(text.contains("has 768 of the 868") && text.contains("pool_bytes"), "{text}");
    // Nothing is left of what was refused, and only of that.
    assert_eq!(b.used_of("ns1", QuotaKind::PoolBytes), 4 * BLOCK);
    let account = b.quota_table().open_account(b.ns());
    assert_eq!(account.refused_count(QuotaKind::PoolBytes), 1);
    let theirs = b.store.open_sequence(other.clone()).unwrap();
    for block in 0..8 {
        let ticket = b.append_block(&other, theirs, block).unwrap();
        b.finish(ticket, &[7; PAGE as usize], |_| false);
    }
    assert_eq!(b.used_of("ns2", QuotaKind::PoolBytes), 8 * BLOCK);
    // What is closed may be had again, and less than what is there may be allowed.
    b.store.close_sequence(b.ns(), id).unwrap();
    assert_eq!(b.used_of("ns1", QuotaKind::PoolBytes), 0);
    let id = b.open();
    assert_eq!(b.append_all(&b.model.clone(), id).0, 4);
    b.set_limit("ns1", QuotaKind::PoolBytes, BLOCK);
    assert_eq!(
        b.append_block(&b.model.clone(), id, 4).unwrap_err().code(),
        ErrorCode::QuotaExceeded
    );
    b.store.close_sequence(b.ns(), id).unwrap();
    b.store.close_sequence(&other.namespace, theirs).unwrap();
    assert_eq!((b.used(), b.used_of("ns2", QuotaKind::PoolBytes)), (0, 0));
}

#[test]
fn what_is_reserved_is_there_when_others_have_taken_the_rest() {
    let b = counting_bench(64 * BLOCK, 10_000);
    let owner = shape(2, PAGE, 0, 10_000);
    b.set_limit("ns2", QuotaKind::ReservedBytes, 16 * BLOCK);
    let flood = b.open();
    let (blocks, error) = b.append_all(&b.model.clone(), flood);
    assert_eq!(blocks, 48);
    assert!(matches!(&error, StoreError::PoolFull(full) if full.reserved == 16 * BLOCK), "{error}");
    let id = b.store.open_sequence(owner.clone()).unwrap();
    let (blocks, error) = b.append_all(&owner, id);
    assert_eq!((blocks, error.code()), (16, ErrorCode::PoolFull));
    // It stays reserved when it is given back, until nobody wants that.
    b.store.close_sequence(&owner.namespace, id).unwrap();
    assert_eq!(
        b.append_block(&b.model.clone(), flood, 48).unwrap_err().code(),
        ErrorCode::PoolFull
    );
    b.quota_table().set_limits(&owner.namespace, &QuotaLimits::default());
    assert_eq!(b.append_block(&b.model.clone(), flood, 48).unwrap().length_after(), 49 * PAGE);
}

#[test]
fn sequences_are_counted_however_they_come_and_go() {
    let b = counting_bench(1 << 16, 0);
    b.set_limit("ns1", QuotaKind::Sequences, 2);
    let (first, second) = (b.open(), b.open());
    let refused = b.store.open_sequence(b.model.clone()).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::QuotaExceeded);
    assert_eq!(b.store.fork_sequence(b.ns(), first, None).unwrap_err().code(), refused.code());
    b.store.close_sequence(b.ns(), second).unwrap();
    let fork = b.store.fork_sequence(b.ns(), first, None).unwrap();
    assert_eq!(b.used_of("ns1", QuotaKind::Sequences), 2);
    b.store.close_sequence(b.ns(), first).unwrap();
    b.store.close_sequence(b.ns(), fork.id).unwrap();
    assert_eq!(b.used_of("ns1", QuotaKind::Sequences), 0);
}

#[test]
fn the_cache_of_a_namespace_stays_within_its_quota_at_its_own_cost() {
    let b = counting_bench(1 << 18, 0);
    b.cache("a");
    let block = b.cache_usage().bytes;
    b.set_limit("ns1", QuotaKind::CacheBytes, 3 * block);
    for letter in 'b'..='z' {
        b.cache(&letter.to_string());
        assert!(b.used_of("ns1", QuotaKind::CacheBytes) <= 3 * block);
    }
    assert_eq!((b.cache_usage().bytes, b.matched("z")), (3 * block, 1));
    // Those that are held do not go: the publish ends, and says why.
    let (held, published) = b.publish_text("0123456");
    assert_eq!((published.published, published.stop), (3, Some(PublishStop::QuotaExceeded)));
    b.store.close_sequence(b.ns(), held).unwrap();
    b.store.prefix_index().drop_model_blocks(b.model.id);
    assert_eq!(b.used_of("ns1", QuotaKind::CacheBytes), 0);
}

#[test]
fn cached_blocks_within_what_is_reserved_do_not_go_for_others() {
    for is_reserved in [true, false] {
        let b = counting_bench(1 << 14, 0);
        b.cache("abcd");
        if is_reserved {
            b.set_limit("ns1", QuotaKind::ReservedBytes, 1 << 12);
        }
        let other = shape(2, PAGE, 0, 10_000);
        let flood = b.store.open_sequence(other.clone()).unwrap();
        assert_eq!(b.append_all(&other, flood).1.code(), ErrorCode::PoolFull);
        assert_eq!(b.matched("abcd"), if is_reserved { 4 } else { 0 });
    }
}

#[test]
fn accounts_that_say_nothing_are_forgotten() {
    let b = counting_bench(1 << 16, 0);
    for number in 0..1000 {
        drop(b.quota_table().open_account(&namespace(&format!("n{number}"))));
    }
    b.set_limit("kept", QuotaKind::Sessions, 0);
    let held = b.open();
    let names: Vec<_> = b.quota_table().list_accounts();
    let names: Vec<_> = names.iter().map(|of| of.namespace_name().as_str().to_owned()).collect();
    assert_eq!(names, ["kept", "ns1"]);
    b.store.close_sequence(b.ns(), held).unwrap();
}
