//! Rows of page memory: the pool, and what is cached in it.

use super::{DEVICE, DashboardPanel, lines};
use crate::dashboard::query::{PanelQuery, legend, quantile_queries, rate, sum_level};
use crate::dashboard::threshold;
use crate::metrics::Metric;

pub(super) fn pool_panels() -> Vec<DashboardPanel> {
    use Metric::{PoolCapacityBytes, PoolLargestFreeBytes, PoolSlots, PoolUsedBytes};
    const TIER: &[&str] = &["instance", "device", "tier"];
    let used =
        format!("{} / {}", sum_level(PoolUsedBytes, TIER), sum_level(PoolCapacityBytes, TIER));
    vec![
        lines(
            "Pool",
            "bytes",
            [
                PanelQuery::level(PoolUsedBytes, TIER).named("used"),
                PanelQuery::level(PoolCapacityBytes, TIER).named("capacity"),
                PanelQuery::level(PoolLargestFreeBytes, TIER).named("largest free"),
            ],
        )
        .described("A small largest free range with much free memory in all is fragmentation.")
        .wide(12),
        lines("Pool use", "percentunit", [PanelQuery::new(used, &legend(TIER))])
            .described("Used over capacity, by device.")
            .colored(threshold::POOL)
            .up_to(1.0)
            .wide(6),
        lines("Slots", "none", [PanelQuery::level(PoolSlots, TIER)]).explained(PoolSlots).wide(6),
    ]
}

pub(super) fn cache_panels() -> Vec<DashboardPanel> {
    use Metric::{
        AttachedTokensTotal, CachedBytes, EventResetsTotal, EventsTotal, EvictBlockedTotal,
        EvictedBlocksTotal, IndexEntries, Leases, MatchHitTokensTotal, MatchKeysTotal,
        MatchSeconds, PinnedBytes, PublishedBlocksTotal,
    };
    let found = [
        PanelQuery::new(rate(MatchHitTokensTotal, &[]), "found"),
        PanelQuery::new(rate(AttachedTokensTotal, &[]), "attached"),
    ];
    let bytes = [
        PanelQuery::level(CachedBytes, DEVICE).named("cached"),
        PanelQuery::level(PinnedBytes, DEVICE).named("pinned"),
    ];
    let by = |metric, label| PanelQuery::rate(metric, &["instance", "device", label]);
    vec![
        lines("Tokens from the cache", "ops", found).described(
            "Tokens of prefixes that look-ups found, and that new sequences began with.",
        ),
        lines("Keys looked up", "ops", [PanelQuery::rate(MatchKeysTotal, &["instance"])])
            .explained(MatchKeysTotal),
        lines("Look-ups", "s", quantile_queries(MatchSeconds, &["instance"], ""))
            .explained(MatchSeconds),
        lines("Bytes", "bytes", bytes).explained(CachedBytes),
        lines("Cached blocks", "none", [PanelQuery::level(IndexEntries, DEVICE)])
            .explained(IndexEntries),
        lines("Leases", "none", [PanelQuery::level(Leases, DEVICE)]).explained(Leases),
        lines("Published", "ops", [by(PublishedBlocksTotal, "result")])
            .explained(PublishedBlocksTotal),
        lines("Evicted", "ops", [by(EvictedBlocksTotal, "reason")]).explained(EvictedBlocksTotal),
        lines("Refused for held blocks", "ops", [PanelQuery::rate(EvictBlockedTotal, DEVICE)])
            .explained(EvictBlockedTotal),
        lines("Events for watchers", "ops", [PanelQuery::rate(EventsTotal, &["instance"])])
            .explained(EventsTotal),
        lines(
            "Watches that began anew",
            "ops",
            [PanelQuery::rate(EventResetsTotal, &["instance", "reason"])],
        )
        .explained(EventResetsTotal),
    ]
}
