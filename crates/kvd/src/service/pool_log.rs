//! Lines about a full pool: who holds it, at most once a minute. Refusals themselves are `debug`,
//! since a client that tries again and again would fill the log with them.

use super::{RegisteredModel, Service};
use bytesize::ByteSize;
use kvd_core::ErrorCode;
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Shortest time between two lines of a kind.
const INTERVAL: Duration = Duration::from_secs(60);

/// Models that a line names, those that hold most first.
const HOLDERS_MAX: usize = 3;

/// Lines about full pools that were written, and events that wait for the next.
#[derive(Default)]
pub(super) struct PoolLog {
    refused: LineLimiter,
    deferred: LineLimiter,
}

/// Lets one line through every [`INTERVAL`], which then tells of all events since the last.
#[derive(Default)]
struct LineLimiter(Mutex<ToldEvents>);

#[derive(Default)]
struct ToldEvents {
    /// When the last line was written.
    at: Option<Instant>,
    /// Events since.
    events: u64,
}

impl LineLimiter {
    /// Counts events; those that a line at `now` tells of, where one may be written.
    fn count_events(&self, events: u64, now: Instant) -> Option<u64> {
        let mut told = self.0.lock();
        told.events += events;
        let waits = told.at.is_some_and(|at| now.saturating_duration_since(at) < INTERVAL);
        if waits || told.events == 0 {
            return None;
        }
        told.at = Some(now);
        Some(std::mem::take(&mut told.events))
    }
}

/// A model and what it holds.
struct PoolHolder {
    name: String,
    namespace: String,
    sequences: u64,
    bytes: u64,
}

impl Service {
    /// Warns about a store that was refused since the pool is full.
    pub(super) fn warn_of_refusal(&self, code: ErrorCode, now: Instant) {
        if code != ErrorCode::PoolFull {
            return;
        }
        if let Some(refused) = self.pool_log.refused.count_events(1, now) {
            let (pool, holders) = (self.pool_stats(), self.name_holders());
            tracing::warn!(
                refused,
                used_bytes = pool.used_bytes,
                capacity_bytes = pool.capacity_bytes,
                holders,
                "the pool is full, stores are refused: close sequences, or give it more \
                 device.pool_bytes"
            );
        }
    }

    /// Warns about blocks of `model` that stay raw, and so take more room, for want of room.
    pub(super) fn warn_of_deferred(&self, model: &RegisteredModel, blocks: u64, now: Instant) {
        if let Some(blocks) = self.pool_log.deferred.count_events(blocks, now) {
            let (pool, holders) = (self.pool_stats(), self.name_holders());
            tracing::warn!(
                blocks,
                model = model.name,
                used_bytes = pool.used_bytes,
                capacity_bytes = pool.capacity_bytes,
                holders,
                "blocks stay raw: the pool has no room for their pages; the next stores try again"
            );
        }
    }

    /// The models that hold most.
    fn name_holders(&self) -> String {
        let holder = |model: &std::sync::Arc<RegisteredModel>| {
            let usage = self.model_usage(model);
            PoolHolder {
                name: model.name.clone(),
                namespace: model.shape.namespace.as_str().to_owned(),
                sequences: usage.sequences,
                bytes: usage.stored.packed_bytes + usage.stored.raw_bytes,
            }
        };
        describe_holders(self.models.list_models(None).iter().map(holder).collect())
    }
}

fn describe_holders(mut holders: Vec<PoolHolder>) -> String {
    holders.retain(|holder| holder.bytes > 0);
    holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let more = holders.len().saturating_sub(HOLDERS_MAX);
    let name = |holder: &PoolHolder| {
        let PoolHolder { name, namespace, sequences, bytes } = holder;
        format!("{name} of {namespace}: {sequences} sequences, {}", ByteSize(*bytes))
    };
    let mut named: Vec<_> = holders.iter().take(HOLDERS_MAX).map(name).collect();
    if more > 0 {
        named.push(format!("{more} more"));
    }
    named.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_once_a_minute_and_tells_of_all_events() {
        let (limiter, start) = (LineLimiter::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(limiter.count_events(0, at(0)), None);
        assert_eq!(limiter.count_events(1, at(0)), Some(1));
        for second in 1..60 {
            assert_eq!(limiter.count_events(2, at(second)), None);
        }
        assert_eq!(limiter.count_events(1, at(60)), Some(119));
        // A clock of another thread may be behind.
        assert_eq!(limiter.count_events(1, at(3)), None);
        assert_eq!(limiter.count_events(0, at(200)), Some(1));
        assert_eq!(limiter.count_events(0, at(300)), None);
    }

    #[test]
    fn those_that_hold_most_are_named_first() {
        let holder = |name: &str, bytes| PoolHolder {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            sequences: 2,
            bytes,
        };
        let holders = [("a", 1 << 20), ("b", 3 << 20), ("c", 0), ("d", 2 << 20), ("e", 5)];
        let text = describe_holders(holders.map(|(name, bytes)| holder(name, bytes)).into());
        let named: Vec<_> = text.split("; ").collect();
        assert_eq!(named[0], "b of default: 2 sequences, 3.0 MiB");
        assert!(named[1].starts_with("d of") && named[2].starts_with("a of"), "{text}");
        assert_eq!(named[3..], ["1 more"]);
        assert_eq!(describe_holders(Vec::new()), "");
    }
}
